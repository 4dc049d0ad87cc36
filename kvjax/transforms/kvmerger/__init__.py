"""KVMerger, arXiv 2407.08454: merging of neighbours, and the tokens that are not merged."""
