"""Random numbers for tests of single operations."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np


def normal(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    """Draws standard normal numbers in a dtype."""
    return np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype))
