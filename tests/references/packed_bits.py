"""Bits in 32-bit words."""

from __future__ import annotations

import numpy as np


def pack_bits(bits: np.ndarray) -> np.ndarray:
    """[..., N] of 0 and 1 -> [..., ceil(N / 32)]: bit n is worth 2 ** (n % 32) in word n // 32."""
    words = np.zeros((*bits.shape[:-1], -(-bits.shape[-1] // 32)), np.uint64)
    for n in range(bits.shape[-1]):
        words[..., n // 32] += bits[..., n].astype(np.uint64) * np.uint64(2 ** (n % 32))
    return words


def hamming(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Over the last axis of two arrays of bits, unpacked."""
    return (a != b).sum(axis=-1)
