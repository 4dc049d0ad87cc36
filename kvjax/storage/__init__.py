"""Storage of keys and values in other forms and places: 8 and 4 bits, codebooks, host memory."""
