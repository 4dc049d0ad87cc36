"""Attention over slots in every form that they are stored in."""
