"""KVMerger, arXiv 2407.08454: its merging, and the tokens that it leaves alone."""
