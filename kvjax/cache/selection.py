"""Chooses which slots to keep: the choices that evicting methods share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from kvjax.cache.slots import KVCache, evict
from pallas_kernels.base.varying import varying


def evictable(cache: KVCache) -> Bool[Array, "B H S"]:
    """Marks the live slots that may be evicted; pinned ones stand outside the budget.

    Args:
      cache: the cache of one layer.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> cache = kvjax.init_cache(kvjax.Full(), batch=1, kv_heads=1, head_dim=4, max_prompt=3,
      ...                          max_new=0).kv
      >>> rows = jnp.ones((1, 1, 2, 4))
      >>> cache, _ = kvjax.kit.append(cache, rows, rows, jnp.arange(2)[None])
      >>> kvjax.kit.evictable(cache).tolist()
      [[[True, True, False]]]
    """
    return cache.live & ~cache.pinned


def newest(cache: KVCache, count: int | Int[Array, " B"]) -> Bool[Array, "B H S"]:
    """Marks the live slots of each row's newest `count` positions, from `length - count` on.

    There are fewer than `count` of them if positions have gaps.

    Args:
      cache: the cache of one layer.
      count: number of positions, of each row or of all rows.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> cache = kvjax.init_cache(kvjax.Full(), batch=1, kv_heads=1, head_dim=4, max_prompt=3,
      ...                          max_new=0).kv
      >>> rows = jnp.ones((1, 1, 3, 4))
      >>> cache, _ = kvjax.kit.append(cache, rows, rows, jnp.arange(3)[None])
      >>> kvjax.kit.newest(cache.replace(length=jnp.array([3])), 2).tolist()
      [[[False, True, True]]]
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
    """Marks the `count` candidates with the highest score, ties to the lower position.

    The score and the position of the last one that is kept are found by bisection, which streams
    scalars: on CPU that is thirty times faster than a sort.

    Args:
      score: score of each slot.
      candidates: whether each slot may be kept at all.
      position: token position of each slot.
      count: number of slots to keep, of each row, or of each row and KV head.
      unroll: whether the rounds of the bisections are compiled one after the other, and not as a
        loop. This is for a decode step on a GPU, which would wait for each round of a loop; it
        takes longer to compile.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> score, position = jnp.array([[[0.1, 0.5, 0.5]]]), jnp.array([[[0, 1, 2]]])
      >>> kvjax.kit.keep_best(score, position >= 0, position, jnp.array([1])).tolist()
      [[[False, True, False]]]
    """
    count = count.reshape(*count.shape, *(1,) * (3 - count.ndim))
    value = jnp.where(candidates, _ordered(score), 0)
    limit = _highest(value, count, unroll)
    above, tied = candidates & (value > limit), candidates & (value == limit)
    remaining = count - above.sum(-1, keepdims=True, dtype=jnp.int32)
    return (above & (count > 0)) | oldest(tied, position, remaining, unroll=unroll)


def oldest(
    candidates: Bool[Array, "B H S"],
    position: Int[Array, "B H S"],
    count: Int[Array, ...],
    *,
    unroll: bool = False,
) -> Bool[Array, "B H S"]:
    """Returns the `count` candidates at the lowest positions.

    Args:
      count: `[B, 1, 1]` or `[B, H, 1]`.
      unroll: as in `keep_best`.
    """
    # All bits inverted, a lower position is a higher number.
    age = jnp.where(candidates, ~position.astype(jnp.uint32), 0)
    return candidates & (age >= _highest(age, count, unroll)) & (count > 0)


def _ordered(x: Float[Array, "B H S"]) -> UInt32[Array, "B H S"]:
    """Returns integers in the order of `x`, equal where `x` is equal; NaN is at the ends."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    # -0 equals 0. This compares bits because XLA on CPU takes every subnormal float for 0.
    bits = jnp.where(bits == sign, 0, bits)
    # Floats are sign and magnitude: negative ones are in reverse order, and come before others.
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _highest(
    x: UInt32[Array, "B H S"], count: Int[Array, ...], unroll: bool
) -> UInt32[Array, "B H 1"]:
    """Returns the highest number that at least `count` of `x` reach; 0 if there are too few."""

    def set_bit(i: Array | int, limit: Array) -> Array:
        """Sets bit i of the limit, counted from the highest, if enough numbers still reach it."""
        raised = limit | (jnp.uint32(1 << 31) >> jnp.uint32(i))
        enough = (x >= raised).sum(-1, keepdims=True, dtype=jnp.int32) >= count
        return jnp.where(enough, raised, limit)

    limit = varying(jnp.zeros((*x.shape[:2], 1), jnp.uint32), x, count)
    if not unroll:
        return jax.lax.fori_loop(0, 32, set_bit, limit)
    for i in range(32):
        limit = set_bit(i, limit)
    return limit


def evict_worst(
    cache: KVCache,
    score: Float[Array, "B H S"],
    candidates: Bool[Array, "B H S"],
    budget: Int[Array, " B"],
) -> KVCache:
    """Frees the candidate with the lowest score if more than `budget` slots are evictable.

    Ties go to the lower position: of equal candidates, the newest is freed. Only scalars are
    streamed, for use in a decode step.
    """
    over = evictable(cache).sum(-1, dtype=jnp.int32) > budget[:, None]
    lowest = jnp.where(candidates, score, jnp.inf).min(-1, keepdims=True)
    worst = candidates & (score == lowest)
    place = jnp.where(worst, cache.position, -1).max(-1, keepdims=True)
    victim = worst & (cache.position == place) & over[..., None]
    return evict(cache, ~victim)
