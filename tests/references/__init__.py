"""Plain NumPy (float64) references, written from the papers' equations.

Each method is a small class that holds one row and one KV head as a list of tokens.  Nothing here
imports the library: the references exist to disagree with it.
"""
