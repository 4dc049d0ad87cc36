"""SpindleKV, arXiv 2507.06517: eviction by layer, and what a cache with codebooks holds."""
