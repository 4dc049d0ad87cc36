"""Blocks of slots that a tile of queries may see, found from positions alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from pallas_kernels.base.logits import Seen

NEVER = np.int32(np.iinfo(np.int32).max)  # a position that no query reaches


def meets(
    query_position: Int[Array, "B R"], seen: Seen, window: int | None, rows: int, block: int
) -> Bool[Array, "B H I J"]:
    """Returns whether one of tile i's `rows` queries may see one of block j's `block` slots."""
    query = _in_tiles(query_position, rows)[:, None, :, None]
    key = jnp.where(seen.live, seen.position, -1)
    key = _in_tiles(key, block)[:, :, None]
    oldest_key = jnp.where(key >= 0, key, NEVER).min(-1)
    sees = oldest_key <= query.max(-1)
    if window is not None:
        oldest_query = jnp.where(query >= 0, query, NEVER).min(-1)
        sees &= key.max(-1) > oldest_query - window
    return sees


def sees_all(
    query_position: Int[Array, "B R"], seen: Seen, window: int | None, rows: int, block: int
) -> Bool[Array, "B H I J"]:
    """Returns whether all of tile i's queries see all of block j's slots, whose biases are all 0.

    Then logits are products alone, to which no mask and no bias is applied.
    """
    query = _in_tiles(query_position, rows)[:, None, :, None]
    key = _in_tiles(jnp.where(seen.bias == 0, seen.position, -1), block)[:, :, None]
    oldest_key = key.min(-1)
    sees = (oldest_key >= 0) & (key.max(-1) <= query.min(-1))
    return sees if window is None else sees & (oldest_key > query.max(-1) - window)


def _in_tiles(position: Int[Array, "*B N"], size: int) -> Int[Array, "*B I size"]:
    """Cuts positions into tiles; -1 fills the last one."""
    tiles = -(-position.shape[-1] // size)
    widths = [(0, 0)] * (position.ndim - 1) + [(0, tiles * size - position.shape[-1])]
    padded = jnp.pad(position, widths, constant_values=-1)
    return padded.reshape(*position.shape[:-1], tiles, size)


def hull(met: Bool[Array, ...], axis: int) -> tuple[Array, Array]:
    """Returns the smallest range [first, end) with every true entry along an axis.

    Without a true entry, end is 0 and the range is empty.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.base.seen_blocks import hull
      >>> [x.tolist() for x in hull(jnp.array([[0, 1, 0, 1, 0], [0, 0, 0, 0, 0]], bool), 1)]
      [[1, 5], [4, 0]]
    """
    place = jax.lax.broadcasted_iota(jnp.int32, met.shape, axis)
    count = met.shape[axis]
    first = jnp.where(met, place, count).min(axis, initial=count)
    return first, jnp.where(met, place + 1, 0).max(axis, initial=0)


def first_run(met: Bool[Array, ...], axis: int) -> tuple[Array, Array]:
    """Returns the range [first, end) of the first true entries in a row along an axis.

    Without a true entry, the range is empty.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.base.seen_blocks import first_run
      >>> [x.tolist() for x in first_run(jnp.array([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0]], bool), 1)]
      [[1, 5], [3, 5]]
    """
    place = jax.lax.broadcasted_iota(jnp.int32, met.shape, axis)
    count = met.shape[axis]
    first = jnp.where(met, place, count).min(axis, initial=count)
    beyond = (place >= jnp.expand_dims(first, axis)) & ~met
    return first, jnp.where(beyond, place, count).min(axis, initial=count)
