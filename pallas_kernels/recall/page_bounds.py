"""Least and greatest value of each channel among the keys of a page."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.base.rows import block_of, take_slots

AT_ONCE = 1024  # slots of a head whose keys are gathered at a time


def page_bounds(
    keys: Float[Array, "B H S D"],
    order: Int[Array, "B H S"],
    count: Int[Array, "B H"],
    page: int,
    pages: int,
) -> tuple[Float[Array, "B H P D"], Float[Array, "B H P D"]]:
    """Returns minimum and maximum per channel over the keys of each page; 0 for an empty page.

    Each key is read once, in blocks of pages.

    Args:
      keys: keys of all slots.
      order: slot numbers; first those of tokens, in the order in which they fill the pages.
      count: number of tokens.
      page: tokens of a page; the last page of a head may have fewer.
      pages: P, number of pages.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import page_bounds
      >>> keys = jnp.array([[[[3.0], [1.0], [2.0], [9.0]]]])
      >>> low, high = page_bounds(keys, jnp.arange(4)[None, None], jnp.array([[3]]), 2, 2)
      >>> low[0, 0, :, 0].tolist(), high[0, 0, :, 0].tolist()
      ([1.0, 2.0], [3.0, 2.0])
    """
    batch, kv_heads, size, _ = keys.shape
    blocks = -(-pages // max(AT_ONCE // page, 1))
    per_block = -(-pages // blocks)  # pages of a block
    slots = blocks * per_block * page
    order = jnp.pad(order[..., :slots], ((0, 0), (0, 0), (0, max(slots - size, 0))))

    def block(start: Int[Array, ""]) -> tuple[Array, Array]:
        index = block_of(order, start, per_block * page, 2)
        rows = take_slots(keys, index).reshape(batch, kv_heads, per_block, page, -1)
        token = start + jnp.arange(per_block * page, dtype=jnp.int32)[None, None]
        there = (token < count[..., None]).reshape(batch, kv_heads, per_block, page, 1)
        low = jnp.where(there, rows, jnp.inf).min(3)
        high = jnp.where(there, rows, -jnp.inf).max(3)
        filled = there.any(3)
        return jnp.where(filled, low, 0), jnp.where(filled, high, 0)

    starts = jnp.arange(blocks, dtype=jnp.int32) * (per_block * page)
    low, high = (
        jnp.moveaxis(x, 0, 2).reshape(batch, kv_heads, blocks * per_block, -1)[:, :, :pages]
        for x in jax.lax.map(block, starts)
    )
    return low, high
