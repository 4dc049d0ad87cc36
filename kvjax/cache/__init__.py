"""Holds the slots of one attention layer and their keys and values. Knows no method."""
