"""Least and greatest value of each channel among the rows of a page, or mean and variance."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.base.rows import block_of, take_slots

AT_ONCE = 1024  # slots of a head whose keys are gathered at a time
OfPages = tuple[Float[Array, "B H P D"], Float[Array, "B H P D"]]  # two numbers of each channel


def page_bounds(
    keys: Float[Array, "B H S D"],
    order: Int[Array, "B H S"],
    count: Int[Array, "B H"],
    page: int,
    pages: int,
) -> OfPages:
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

    def bounds(rows: Array, there: Array) -> tuple[Array, Array]:
        return jnp.where(there, rows, jnp.inf).min(3), jnp.where(there, rows, -jnp.inf).max(3)

    return _of_pages(bounds, keys, order, count, page, pages)


def page_moments(
    rows: Float[Array, "B H S D"],
    mass: Float[Array, "B H S"],
    order: Int[Array, "B H S"],
    count: Int[Array, "B H"],
    page: int,
    pages: int,
) -> OfPages:
    """Returns mean and variance per channel over the rows of each page, in float32.

    Both are 0 for an empty page.

    Args:
      rows: keys or values of all slots.
      mass: weight of each row, such as the number of tokens that it stands for.
      order, count, page, pages: as in `page_bounds`.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import page_moments
      >>> rows, mass = jnp.array([[[[3.0], [1.0], [2.0], [9.0]]]]), jnp.ones((1, 1, 4))
      >>> order, count = jnp.arange(4)[None, None], jnp.array([[3]])
      >>> mean, variance = page_moments(rows, mass, order, count, 2, 2)
      >>> mean[0, 0, :, 0].tolist(), variance[0, 0, :, 0].tolist()
      ([2.0, 2.0], [1.0, 0.0])
    """

    def moments(rows: Array, there: Array, mass: Array) -> tuple[Array, Array]:
        rows, mass = rows.astype(jnp.float32), jnp.where(there, mass, 0)
        total = jnp.where(there.any(3), mass.sum(3), 1)
        mean = jnp.where(there, mass * rows, 0).sum(3) / total
        apart = jnp.where(there, mass * (rows - mean[:, :, :, None]) ** 2, 0)
        return mean, apart.sum(3) / total

    return _of_pages(moments, rows, order, count, page, pages, mass[..., None])


def _of_pages(
    reduce: Callable[..., OfPages],
    keys: Float[Array, "B H S D"],
    order: Int[Array, "B H S"],
    count: Int[Array, "B H"],
    page: int,
    pages: int,
    *beside: Float[Array, "B H S 1"],
) -> OfPages:
    """Returns two numbers per channel of each page; 0 for an empty page.

    Args:
      reduce: computes them from the rows of N pages of T tokens, `[B, H, N, T, D]`, from which of
        them there are, `[B, H, N, T, 1]`, and from what lies `beside` them, in the same form.
    """
    batch, kv_heads, size, _ = keys.shape
    blocks = -(-pages // max(AT_ONCE // page, 1))
    per_block = -(-pages // blocks)  # pages of a block
    slots = blocks * per_block * page
    order = jnp.pad(order[..., :slots], ((0, 0), (0, 0), (0, max(slots - size, 0))))

    def block(start: Int[Array, ""]) -> tuple[Array, Array]:
        index = block_of(order, start, per_block * page, 2)
        rows, *others = (
            take_slots(x, index).reshape(batch, kv_heads, per_block, page, -1)
            for x in (keys, *beside)
        )
        token = start + jnp.arange(per_block * page, dtype=jnp.int32)[None, None]
        there = (token < count[..., None]).reshape(batch, kv_heads, per_block, page, 1)
        filled, (first, second) = there.any(3), reduce(rows, there, *others)
        return jnp.where(filled, first, 0), jnp.where(filled, second, 0)

    starts = jnp.arange(blocks, dtype=jnp.int32) * (per_block * page)
    first, second = (
        jnp.moveaxis(x, 0, 2).reshape(batch, kv_heads, blocks * per_block, -1)[:, :, :pages]
        for x in jax.lax.map(block, starts)
    )
    return first, second
