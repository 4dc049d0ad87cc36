"""The Hadamard transform of rows, which spreads large channels over others before rounding."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def hadamard_transform(x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Returns `x H` over the last axis in float32; H is orthonormal, `H[i, j] = ±1 / sqrt(n)`.

    H is symmetric. The sign of `H[i, j]` is `(-1) ** popcount(i & j)` (Sylvester's matrix). n is
    the largest power of two that divides D. If n is less than D, consecutive blocks of n channels
    are transformed separately, so that an x of odd D comes back unchanged. The transform is its own
    inverse and keeps inner products: `(q H) · (k H) = q · k`.

    Returns:
      Float32, of the shape of x.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import hadamard_transform
      >>> rows = hadamard_transform(jnp.array([[8.0, 0.0, 0.0, 0.0]]))
      >>> rows.tolist(), hadamard_transform(rows).tolist()
      ([[4.0, 4.0, 4.0, 4.0]], [[8.0, 0.0, 0.0, 0.0]])
    """
    channels = x.shape[-1]
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, channels & -channels)
    # Up to 128 channels, a product is faster than log2(n) passes of sums and differences: it takes
    # half the time on a CPU for all rows of a cache, and it is one launch on a GPU.
    rows = jnp.einsum(
        "...i,ij->...j", blocks, _matrix(blocks.shape[-1]), precision=jax.lax.Precision.HIGHEST
    )
    return rows.reshape(x.shape)


@functools.cache
def _matrix(size: int) -> Float[np.ndarray, "n n"]:
    """Builds Sylvester's matrix: each doubling repeats it four times, once with the other sign."""
    signs = np.ones((1, 1), np.float32)
    while len(signs) < size:
        signs = np.block([[signs, signs], [signs, -signs]])
    return signs * np.float32(size**-0.5)
