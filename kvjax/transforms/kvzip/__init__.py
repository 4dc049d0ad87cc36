"""KVzip, arXiv 2505.23416: keeps what a repetition of the document looks up."""
