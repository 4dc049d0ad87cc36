"""Chelsea, arXiv 2506.11418: merging of similar keys, and heads that keep everything."""
