"""Chelsea, arXiv 2506.11418: its merging, and heads that keep everything."""
