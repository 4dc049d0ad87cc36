"""Rotary position embedding in Llama's half-split layout (arXiv 2104.09864)."""

from __future__ import annotations

import numpy as np


def inverse_frequencies(rotary_dim: int, theta: float = 10000.0) -> np.ndarray:
    """theta ** (-2 i / rotary_dim) for i = 0 .. rotary_dim / 2 - 1."""
    return theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)


def rope(
    x: np.ndarray, positions: np.ndarray, inv_freq: np.ndarray, factor: float = 1.0
) -> np.ndarray:
    """Rotate channel i against channel i + R, for i < R = len(inv_freq), by an angle a.

        y[i]     = factor * (x[i] * cos(a) - x[i + R] * sin(a))
        y[i + R] = factor * (x[i + R] * cos(a) + x[i] * sin(a))       a = position * inv_freq[i]

    Channels from 2 R on pass through unchanged.  x: [..., T, D]; positions: [T].
    """
    x = np.asarray(x, np.float64)
    half = len(inv_freq)
    angle = np.asarray(positions, np.float64)[:, None] * np.asarray(inv_freq, np.float64)
    cos, sin = factor * np.cos(angle), factor * np.sin(angle)
    first, second = x[..., :half], x[..., half : 2 * half]
    rotated = [first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]]
    return np.concatenate(rotated, axis=-1)
