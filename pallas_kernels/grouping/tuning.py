"""Calls of the kernels that group keys, which `pallas_kernels.tune` measures."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.base.tiles import Tile
from pallas_kernels.grouping.best_match import ChunkRows, best_match
from pallas_kernels.grouping.kmeans_kernel import means


class Grouping(NamedTuple):
    """A measured call: 8 heads of 128 bfloat16 channels by default, grouped chunk by chunk.

    Args:
      rows: rows of a batch.
      slots: keys of each head.
      chunk: keys that are grouped together; divides `slots`.
      clusters: clusters of a chunk; None: each even key finds the most similar odd key instead.
      average: whether centroids become means; otherwise keys find their centroids.
      heads, channels, dtype: heads, channels and dtype of the keys.
    """

    rows: int
    slots: int
    chunk: int
    clusters: int | None = None
    average: bool = False
    heads: int = 8
    channels: int = 128
    dtype: str = "bfloat16"

    @property
    def tried(self) -> dict[str, tuple[int, ...]]:
        """Values to try by field of `Tile`, besides tile sizes, warps and stages."""
        return {"programs": (1,)}  # no keys are split among programs

    @property
    def bytes(self) -> int:
        """Bytes that must move: keys, centroids, and the numbers read or written for each key."""
        keys = self.rows * self.heads * self.slots
        per_key = self.channels * jnp.dtype(self.dtype).itemsize + (4 if self.average else 8)
        centroids = keys // self.chunk * (self.clusters or 0) * self.channels * 4
        return keys * per_key + centroids * (2 if self.average else 1)

    def operands(self) -> tuple[jax.Array, ...]:
        """Makes random arguments of `call`."""
        first, second, third = jax.random.split(jax.random.key(0), 3)
        lists = (self.rows, self.heads * self.slots // self.chunk)
        keys = jax.random.normal(first, (*lists, self.chunk, self.channels), self.dtype)
        if self.clusters is None:
            return jnp.zeros(()), keys
        centroids = jax.random.normal(second, (*lists, self.clusters, self.channels))
        label = jax.random.randint(third, keys.shape[:3], 0, self.clusters, jnp.int32)
        return (centroids, keys, label) if self.average else (centroids, keys)

    def call(
        self,
        x: jax.Array,
        keys: jax.Array,
        label: jax.Array | None = None,
        *,
        tile: Tile,
        interpret: bool = False,
    ) -> jax.Array:
        """Runs the measured call. x is the centroids, or 0; the result can be added to it."""
        options = {"tile": tile, "interpret": interpret}
        if label is not None:
            return means(keys, label, x, **options)
        if self.clusters is None:
            there = jnp.full(keys.shape[:3], x < 1)  # all true, but dependent on the call before
            parts = ChunkRows(self.chunk, 0, 2), ChunkRows(self.chunk, 1, 2)
            best, _ = best_match(keys, keys, there, *parts, "rounded_cosine", **options)
        else:
            there = jnp.ones(x.shape[:3], bool)
            parts = ChunkRows(self.chunk), ChunkRows(self.clusters)
            best, _ = best_match(keys, x, there, *parts, "cosine", **options)
        return best[0, 0, 0]
