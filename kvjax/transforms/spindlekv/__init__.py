"""SpindleKV, arXiv 2507.06517: eviction by layer, and the bytes of caches with codebooks."""
