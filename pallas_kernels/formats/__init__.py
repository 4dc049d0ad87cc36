"""Stored forms of rows: 8 and 4 bits, references to a codebook, packed bits."""
