"""InfiniGen, arXiv 2406.19707: its selection and its projections."""
