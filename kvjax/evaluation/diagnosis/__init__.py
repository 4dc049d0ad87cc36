"""Diagnoses: how far methods change the attention over a given text."""
