"""The tasks of RULER, generated at any length."""
