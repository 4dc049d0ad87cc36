"""Diagnoses: the change that methods make to the attention over a given text."""
