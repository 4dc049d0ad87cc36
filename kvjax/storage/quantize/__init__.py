"""Quantize: keys and values in 8, 4, 3 or 2 bits."""
