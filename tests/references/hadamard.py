"""The Hadamard rotation of vectors before they are rounded (QuaRot, arXiv 2404.00456)."""

from __future__ import annotations

import numpy as np


def hadamard_matrix(size: int) -> np.ndarray:
    """H[i, j] = (-1) ** (number of binary digits that i and j have in common) / sqrt(size)."""
    if size < 1 or size & (size - 1):
        raise ValueError(f"a power of two; given {size}")
    signs = [[(-1) ** bin(i & j).count("1") for j in range(size)] for i in range(size)]
    return np.array(signs, np.float64) / np.sqrt(size)


def block_size(channels: int) -> int:
    """The largest power of two that divides the number of channels."""
    size = 1
    while channels % (2 * size) == 0:
        size *= 2
    return size


def rotate(x: np.ndarray) -> np.ndarray:
    """x [..., D] -> [..., D]: every block of channels times the matrix of its size."""
    x = np.asarray(x, np.float64)
    size = block_size(x.shape[-1])
    matrix = hadamard_matrix(size)
    starts = range(0, x.shape[-1], size)
    return np.concatenate([x[..., at : at + size] @ matrix for at in starts], axis=-1)
