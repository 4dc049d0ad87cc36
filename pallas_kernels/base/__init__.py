"""Shared by all operations: choice of an implementation, logits, rows, and parts of kernels."""
