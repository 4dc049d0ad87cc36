"""Codebook: keys and values as references to few directions."""
