"""Other forms and places of keys and values: 8 and 4 bits, a codebook, host memory."""
