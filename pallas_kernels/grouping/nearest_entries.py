"""The entry of a codebook whose direction is nearest to that of a vector."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

VECTORS = 256  # at a time
ENTRIES = 4096  # whose cosines are held at a time: on CPU, so few that they stay in its caches


def nearest_entries(
    vectors: Float[Array, "B N D"],
    entries: Float[Array, "B E D"],
    count: Int[Array, " B"],
) -> tuple[Int[Array, "B N"], Float[Array, "B N"]]:
    """The entry with the highest cosine to each vector, the first of equals, and that cosine.

    Args:
      vectors: of any length; the cosine of a zero vector is 0.
      entries: of any length but 0.
      count: how many of them there are; without any, the cosines are `-inf`.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import nearest_entries
      >>> entries = jnp.array([[[1.0, 0.0], [0.0, 2.0]]])
      >>> index, cosine = nearest_entries(jnp.array([[[0.0, 5.0]]]), entries, jnp.array([2]))
      >>> index.tolist(), cosine.tolist()
      ([[1]], [[1.0]])
    """
    return jax.vmap(_nearest)(vectors, entries, count)


def directions(
    vectors: Float[Array, "... D"],
) -> tuple[Float[Array, "... D"], Float[Array, ...]]:
    """Float32 unit vectors and Euclidean norms; a zero vector stays zero."""
    vectors = vectors.astype(jnp.float32)
    # Divided by its largest number first: the square of a small one may be 0.
    largest = jnp.abs(vectors).max(-1, keepdims=True)
    scaled = vectors / jnp.where(largest > 0, largest, 1.0)
    length = jnp.sqrt((scaled * scaled).sum(-1, keepdims=True))
    return scaled / jnp.where(length > 0, length, 1.0), (length * largest)[..., 0]


def nearest_directions(
    units: Float[Array, "N D"], entries: Float[Array, "E D"], count: Int[Array, ""]
) -> tuple[Int[Array, " N"], Float[Array, " N"]]:
    """`nearest_entries` of so few unit vectors that N x ENTRIES cosines may be held."""
    number, total = units.shape[0], entries.shape[0]
    size = min(ENTRIES, total)

    def block(j: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        # The last block begins early enough to be whole; what it has twice changes nothing.
        start = jnp.minimum(j * size, total - size)
        rows, norms = directions(jax.lax.dynamic_slice_in_dim(entries, start, size))
        own = (start + jnp.arange(size, dtype=jnp.int32))[:, None]
        cosine = jnp.minimum(jnp.dot(rows, units.T, precision="highest"), 1.0)
        cosine = jnp.where((own < count) & (norms > 0)[:, None], cosine, -jnp.inf)
        highest = cosine.max(0)
        first = jnp.where(cosine == highest[None], own, total).min(0)
        higher = highest > best[1]
        return jnp.where(higher, first, best[0]), jnp.maximum(highest, best[1])

    none = jnp.zeros(number, jnp.int32), jnp.full(number, -jnp.inf)
    return jax.lax.fori_loop(0, -(-count // size), block, none)


def _nearest(
    vectors: Float[Array, "N D"], entries: Float[Array, "E D"], count: Int[Array, ""]
) -> tuple[Int[Array, " N"], Float[Array, " N"]]:
    units, size = directions(vectors)[0], vectors.shape[0]
    part = min(VECTORS, size)
    parts = jnp.pad(units, ((0, -size % part), (0, 0))).reshape(-1, part, units.shape[1])
    index, cosine = jax.lax.map(lambda units: nearest_directions(units, entries, count), parts)
    return index.reshape(-1)[:size], cosine.reshape(-1)[:size]
