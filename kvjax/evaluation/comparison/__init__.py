"""Runs of a comparison: its prompts, and the measurement of each cell."""
