"""Stored forms of rows: 8 to 2 bits, references to a codebook, packed bits."""
