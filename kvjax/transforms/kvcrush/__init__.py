"""KVCrush, arXiv 2503.00022: its bits, units and representatives."""
