"""What `pallas_kernels.tune` measures of the kernels that group keys."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.base.tiles import Tile
from pallas_kernels.grouping.best_match import Every, best_match
from pallas_kernels.grouping.kmeans_kernel import means


class Grouping(NamedTuple):
    """Keys in bfloat16, 8 heads of 128 channels, in chunks that are grouped by themselves.

    Args:
      rows: of a batch.
      slots: keys of each head.
      chunk: keys that are grouped together; divides `slots`.
      clusters: of a chunk; None: even keys look for the most similar odd one instead.
      average: whether centroids become means; else keys look for their centroids.
      heads, channels, dtype: of the keys.
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
        """What else is tried beside sizes of tiles, warps and stages, by the fields of `Tile`."""
        return {"programs": (1,)}  # no keys are split among programs

    @property
    def bytes(self) -> int:
        """What must move: keys, centroids, and the numbers that are read or written of each key."""
        keys = self.rows * self.heads * self.slots
        per_key = self.channels * jnp.dtype(self.dtype).itemsize + (4 if self.average else 8)
        centroids = keys // self.chunk * (self.clusters or 0) * self.channels * 4
        return keys * per_key + centroids * (2 if self.average else 1)

    def operands(self) -> tuple[jax.Array, ...]:
        """Random arguments of `call`."""
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
        """What is measured; x is the centroids, or 0. The result can be added to it."""
        how = {"tile": tile, "interpret": interpret}
        if label is not None:
            return means(keys, label, x, **how)
        if self.clusters is None:
            there = jnp.full(keys.shape[:3], x < 1)  # all, by way of what the call before gave
            parts = Every(self.chunk, 0, 2), Every(self.chunk, 1, 2)
            best, _ = best_match(keys, keys, there, *parts, "rounded_cosine", **how)
        else:
            there = jnp.ones(x.shape[:3], bool)
            parts = Every(self.chunk), Every(self.clusters)
            best, _ = best_match(keys, x, there, *parts, "cosine", **how)
        return best[0, 0, 0]
