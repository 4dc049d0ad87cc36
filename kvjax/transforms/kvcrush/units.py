"""Eviction of whole chunks or pages of neighbouring tokens."""

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
    """Returns the tokens per unit, given by name or number; raises for anything else."""
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
    """Returns the tokens that an evictor would keep if it evicted whole units.

    Units are ranked by the sum of their tokens' scores.

    Args:
      kept: tokens that the evictor keeps one by one. Units get as many slots as it keeps beside
        `always`; a remainder smaller than a unit stays free. Where it evicts nothing, everything
        stays.
      size: tokens per unit.
      always: tokens that stay in any case.
      group_reduce: combines the sums of a KV head's query heads.
    """
    units, candidates = Units.of(cache, size), cache.live & ~always
    of_query_heads = jnp.repeat(candidates, cache.group, axis=1)
    total = units.grid_of_query_heads(jnp.where(of_query_heads, score, 0.0)).sum(3)
    total = jnp.moveaxis(total, 3, 2).reshape(*score.shape[:2], -1)
    total = group_scores(total, cache, group_reduce)
    number = jnp.broadcast_to(jnp.arange(units.count, dtype=jnp.int32), total.shape)
    room = (candidates & kept).sum(-1, dtype=jnp.int32)
    best = keep_best(total, units.any(candidates), number, room // size)
    evicts = (cache.live & ~kept).any(-1, keepdims=True)
    return jnp.where(evicts, always | (candidates & units.slots(best)), kept)
