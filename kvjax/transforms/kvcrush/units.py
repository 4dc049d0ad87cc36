"""Evicting whole chunks or pages of neighbouring tokens."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.cache.selection import keep_best
from kvjax.cache.slots import KVCache
from kvjax.cache.units import Units
from kvjax.checks import check_choice, check_count
from kvjax.decisions import group_scores
from kvjax.protocol import GroupReduce

Granularity = int | Literal["token", "chunk", "page"]
GRANULARITIES = {"token": 1, "chunk": 8, "page": 32}


def unit_size(granularity: Granularity) -> int:
    """Tokens per unit, of a name or a number; raises for anything else."""
    if not isinstance(granularity, str):
        check_count("granularity", granularity, 1)
        return granularity
    check_choice("granularity", granularity, tuple(GRANULARITIES))
    return GRANULARITIES[granularity]


def whole_units(
    cache: KVCache,
    kept: Bool[Array, "B H S"],
    size: int,
    score: Float[Array, "B Q S"],
    always: Bool[Array, "B H S"],
    group_reduce: GroupReduce,
) -> Bool[Array, "B H S"]:
    """What an evictor would keep if it took whole units, by the sum of their tokens' scores.

    What it `always` keeps stays; for the others there is room for as many tokens as it `kept` of
    them, and what is no whole unit of that is left over. Where it evicted nothing, everything
    stays. `group_reduce` says how the sums of a KV head's query heads become one.
    """
    units, others = Units.of(cache, size), cache.live & ~always
    of_query_heads = jnp.repeat(others, cache.group, axis=1)
    total = units.grid_of_query_heads(jnp.where(of_query_heads, score, 0.0)).sum(3)
    total = jnp.moveaxis(total, 3, 2).reshape(*score.shape[:2], -1)
    total = group_scores(total, cache, group_reduce)
    number = jnp.broadcast_to(jnp.arange(units.count, dtype=jnp.int32), total.shape)
    room = (others & kept).sum(-1, dtype=jnp.int32)
    best = keep_best(total, units.any(others), number, room // size)
    evicts = (cache.live & ~kept).any(-1, keepdims=True)
    return jnp.where(evicts, always | (others & units.slots(best)), kept)
