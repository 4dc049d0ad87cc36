"""KVCrush, arXiv 2503.00022: bits of head behaviour, units of tokens, and representatives."""
