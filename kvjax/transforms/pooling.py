"""Pooling of scores along positions: a token counts for its neighbours, too."""

from __future__ import annotations

import functools
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.cache.payload import take_slots, write_slots
from kvjax.cache.slots import KVCache, sorted_slots
from kvjax.checks import check_count

Pooling = Literal["max", "avg"]
_MOST_KERNEL = 4095  # pooling costs one operation per position and place of the kernel


def check_kernel(kernel: int) -> None:
    """Raises TypeError or ValueError, unless a pooling width is an odd number up to 4,095."""
    check_count("kernel", kernel, 1, _MOST_KERNEL)
    if kernel % 2 == 0:
        raise ValueError(f"kernel must be odd, got {kernel}")


def pool(
    score: Float[Array, "B H N S"],
    cache: KVCache,
    tokens: Bool[Array, "B H S"],
    kernel: int,
    pooling: Pooling,
) -> Float[Array, "B H N S"]:
    """Pools scores of tokens over their neighbours in position order, with zeros beyond both ends.

    `pooled[i] = max or mean over |j - i| <= kernel // 2 of score[j]`

    Args:
      score: N scores of each slot.
      tokens: those that are pooled, and have neighbours among themselves; others get 0.
      kernel: pooling width, odd.
      pooling: `"max"`, or `"avg"`, which counts the zeros.
    """
    if kernel == 1:
        return jnp.where(tokens[:, :, None], score, 0.0)
    order = sorted_slots(tokens, cache.position)
    ordered = jnp.moveaxis(jnp.where(tokens[:, :, None], score, 0.0), 2, 3)
    ordered = take_slots(ordered, order)
    size, half = ordered.shape[2], kernel // 2
    padded = jnp.pad(ordered, ((0, 0), (0, 0), (half, half), (0, 0)))
    neighbours = [padded[:, :, i : i + size] for i in range(kernel)]
    pooled = functools.reduce(jnp.maximum if pooling == "max" else jnp.add, neighbours)
    if pooling == "avg":
        pooled = pooled / kernel
    pooled = jnp.moveaxis(write_slots(pooled, order, pooled), 3, 2)
    return jnp.where(tokens[:, :, None], pooled, 0.0)
