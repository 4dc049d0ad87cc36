"""Storage of keys and values in other forms and places: 8 to 2 bits, codebooks, host memory."""
