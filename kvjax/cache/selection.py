"""Which slots to keep: the choices that evicting methods share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from kvjax.cache.slots import KVCache, evict
from pallas_kernels.base.varying import varying


def evictable(cache: KVCache) -> Bool[Array, "B H S"]:
    """Live slots that an evictor may take; pinned ones stand outside its budget."""
    return cache.live & ~cache.pinned


def newest(cache: KVCache, count: int | Int[Array, " B"]) -> Bool[Array, "B H S"]:
    """Live slots of each row's newest `count` positions, those from `length - count` on.

    Where positions have gaps there are fewer of them than `count`.
    """
    first = cache.length - count
    return cache.live & (cache.position >= first[:, None, None])


def keep_best(
    score: Float[Array, "B H S"],
    candidates: Bool[Array, "B H S"],
    position: Int[Array, "B H S"],
    count: Int[Array, " B"] | Int[Array, "B H"],
    *,
    unroll: bool = False,
) -> Bool[Array, "B H S"]:
    """The `count` candidates with the highest score, ties to the lower position.

    `count` may differ from row to row, and from head to head. The score and the position of the
    last one that is kept are found by bisection, which streams scalars: on CPU that is thirty times
    faster than a sort.

    Args:
      unroll: write the rounds of the bisections one after the other, for a decode step on a GPU,
        which a loop would keep waiting. It takes longer to compile.
    """
    count = count.reshape(*count.shape, *(1,) * (3 - count.ndim))
    value = jnp.where(candidates, _ordered(score), 0)
    limit = _highest(value, count, unroll)
    above, tied = candidates & (value > limit), candidates & (value == limit)
    left = count - above.sum(-1, keepdims=True, dtype=jnp.int32)
    return (above & (count > 0)) | oldest(tied, position, left, unroll=unroll)


def oldest(
    candidates: Bool[Array, "B H S"],
    position: Int[Array, "B H S"],
    count: Int[Array, ...],
    *,
    unroll: bool = False,
) -> Bool[Array, "B H S"]:
    """The `count` candidates at the lowest positions; `count` is `[B, 1, 1]` or `[B, H, 1]`.

    `unroll` as in `keep_best`.
    """
    age = jnp.where(candidates, ~position.astype(jnp.uint32), 0)  # the lower is the higher
    return candidates & (age >= _highest(age, count, unroll)) & (count > 0)


def _ordered(x: Float[Array, "B H S"]) -> UInt32[Array, "B H S"]:
    """Whole numbers in the order of `x`, equal where it is equal; NaN at the ends."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    # -0 is 0. By its bits: XLA on CPU takes every subnormal number for 0 where it compares floats.
    bits = jnp.where(bits == sign, 0, bits)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _highest(
    x: UInt32[Array, "B H S"], count: Int[Array, ...], unroll: bool
) -> UInt32[Array, "B H 1"]:
    """The highest number that at least `count` of `x` reach; 0 if there are not as many."""

    def set_bit(i: Array | int, found: Array) -> Array:
        tried = found | (jnp.uint32(1 << 31) >> jnp.uint32(i))
        enough = (x >= tried).sum(-1, keepdims=True, dtype=jnp.int32) >= count
        return jnp.where(enough, tried, found)

    found = varying(jnp.zeros((*x.shape[:2], 1), jnp.uint32), x, count)
    if not unroll:
        return jax.lax.fori_loop(0, 32, set_bit, found)
    for i in range(32):
        found = set_bit(i, found)
    return found


def evict_worst(
    cache: KVCache,
    score: Float[Array, "B H S"],
    candidates: Bool[Array, "B H S"],
    budget: Int[Array, " B"],
) -> KVCache:
    """Where more than `budget` slots are evictable, frees the candidate with the lowest score.

    Ties go to the lower position: of equals, the newest is freed. It streams scalars only, for a
    step of a decode loop.
    """
    over = evictable(cache).sum(-1, dtype=jnp.int32) > budget[:, None]
    lowest = jnp.where(candidates, score, jnp.inf).min(-1, keepdims=True)
    worst = candidates & (score == lowest)
    place = jnp.where(worst, cache.position, -1).max(-1, keepdims=True)
    victim = worst & (cache.position == place) & over[..., None]
    return evict(cache, ~victim)
