"""InfiniGen, arXiv 2406.19707: selection of tokens by predicted scores, and its projections."""
