"""What all operations share: choice of an implementation, logits, rows, and parts of kernels."""
