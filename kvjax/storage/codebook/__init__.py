"""Codebook: keys and values stored as references to a few directions."""
