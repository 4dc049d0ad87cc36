"""Which slots to keep: the choices that evicting methods share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.budgets import Budget, most_slots, rows_budget
from kvjax.cache import KVCache, evict
from kvjax.payloads import take_slots
from kvjax.transform import Extent

_LAST = jnp.iinfo(jnp.int32).max


def evictable(cache: KVCache) -> Bool[Array, "B H S"]:
    """Live slots that an evictor may take; pinned ones stand outside its budget."""
    return cache.live & ~cache.pinned


def newest(cache: KVCache, count: int | Int[Array, " B"]) -> Bool[Array, "B H S"]:
    """Live slots of each row's newest `count` positions."""
    first = cache.length - count
    return cache.live & (cache.position >= first[:, None, None])


def keep_best(
    score: Float[Array, "B H S"],
    candidates: Bool[Array, "B H S"],
    position: Int[Array, "B H S"],
    count: Int[Array, " B"],
) -> Bool[Array, "B H S"]:
    """The `count` candidates with the highest score, ties to the lower position.

    One sort of (score, position) finds the last one that is kept; everything is then compared with
    it, so that `count` may differ from row to row.
    """
    cost = jnp.where(candidates, -score, jnp.inf)
    place = jnp.where(candidates, position, _LAST)
    costs, places = jax.lax.sort((cost, place), dimension=-1, num_keys=2)
    last = jnp.clip(count - 1, 0, score.shape[-1] - 1)[:, None, None]
    last = jnp.broadcast_to(last, (*score.shape[:2], 1))
    limit, limit_place = take_slots(costs, last), take_slots(places, last)
    kept = (cost < limit) | ((cost == limit) & (place <= limit_place))
    return candidates & kept & (count > 0)[:, None, None]


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
    over = evictable(cache).sum(-1) > budget[:, None]
    lowest = jnp.where(candidates, score, jnp.inf).min(-1, keepdims=True)
    worst = candidates & (score == lowest)
    place = jnp.where(worst, cache.position, -1).max(-1, keepdims=True)
    victim = worst & (cache.position == place) & over[..., None]
    return evict(cache, ~victim)


def decoding_budget(budget: Budget, cache: KVCache, minimum: int) -> Int[Array, " B"]:
    """What a method that compresses while decoding holds per row, from its tokens so far.

    A prompt shorter than the smallest workable budget may still grow to that budget. No row gets
    more than a prompt of `max_prompt` tokens would.
    """
    return jnp.maximum(rows_budget(budget, cache.length, cache.max_prompt, minimum), minimum)


def decoding_extent(extent: Extent, budget: Budget, minimum: int) -> Extent:
    """Slots of a method that holds its budget while decoding: one more during a step."""
    most = max(most_slots(budget, extent.longest_prompt, minimum), minimum)
    return extent.keep(most).hold(most + 1)
