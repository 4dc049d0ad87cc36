"""Units of neighbouring tokens: a cache by position, in chunks or pages."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.budgets.budgets import check_count
from kvjax.cache.payload import take_slots, write_slots
from kvjax.cache.slots import KVCache
from kvjax.protocol import GroupReduce, group_scores
from kvjax.transforms.selection import keep_best

Granularity = int | Literal["token", "chunk", "page"]
GRANULARITIES = {"token": 1, "chunk": 8, "page": 32}


def unit_size(granularity: Granularity) -> int:
    """Tokens per unit, of a name or a number; raises for anything else."""
    if not isinstance(granularity, str):
        check_count("granularity", granularity, 1)
        return granularity
    if granularity not in GRANULARITIES:
        raise ValueError(
            f"granularity must be a number of tokens or one of {tuple(GRANULARITIES)}, "
            f"got {granularity!r}"
        )
    return GRANULARITIES[granularity]


class Units(NamedTuple):
    """The slots of a cache by position: unit u has the positions `u·size … (u + 1)·size − 1`.

    A unit is the same in all heads, whichever of its tokens they hold, and in whichever slots.
    Tokens beyond `count · size`, which only gaps between positions allow, are in none.

    Args:
      position: of the cache.
      count: number of units.
      size: tokens of a unit.
    """

    position: Int[Array, "B H S"]
    count: int
    size: int

    @classmethod
    def of(cls, cache: KVCache, size: int) -> Units:
        """As many as the tokens that the cache was made for."""
        return cls(cache.position, -(-cache.max_tokens // size), size)

    def grid(self, x: Array) -> Array:
        """`[B, H, S, ...]` to `[B, H, U, size, ...]`; 0 where a head has no such token."""
        places = self.count * self.size
        index = jnp.where(self.position >= 0, jnp.minimum(self.position, places), places)
        grid = write_slots(jnp.zeros((*x.shape[:2], places, *x.shape[3:]), x.dtype), index, x)
        return grid.reshape(*x.shape[:2], self.count, self.size, *x.shape[3:])

    def grid_of_query_heads(self, x: Array) -> Array:
        """`[B, Q, S]` to `[B, H, U, size, G]`."""
        batch, kv_heads, slots = self.position.shape
        return self.grid(jnp.moveaxis(x.reshape(batch, kv_heads, -1, slots), 2, 3))

    def any(self, x: Bool[Array, "B H S"]) -> Bool[Array, "B H U"]:
        """Whether it holds of some token of a unit."""
        return self.grid(x).any(-1)

    def slots(self, x: Bool[Array, "B H U"]) -> Bool[Array, "B H S"]:
        """What holds of a unit, for each of its tokens."""
        unit = self.position // self.size
        inside = (unit >= 0) & (unit < self.count)
        return take_slots(x, jnp.clip(unit, 0, self.count - 1)) & inside

    def join(self, bits: Bool[Array, "B Q S"]) -> Bool[Array, "B U N"]:
        """The bits of all heads and of a unit's tokens, one token after the other: `N = size·Q`."""
        grid = jnp.moveaxis(self.grid_of_query_heads(bits), 1, 3)
        return grid.reshape(*grid.shape[:2], -1)


def whole_units(
    before: KVCache,
    after: KVCache,
    size: int,
    score: Float[Array, "B Q S"],
    always: Bool[Array, "B H S"],
    group_reduce: GroupReduce,
) -> Bool[Array, "B H S"]:
    """What an evictor would keep if it took whole units, by the sum of their tokens' scores.

    What it always keeps stays; for the others there is room for as many tokens as it kept of them,
    and what is no whole unit of that is left over. Where it evicted nothing, everything stays.

    Args:
      before, after: around the evictor's update.
      size: tokens of a unit.
      score: of every token, per query head.
      always: live tokens that the evictor always keeps.
      group_reduce: how the sums of a KV head's query heads become one.
    """
    units, others = Units.of(before, size), before.live & ~always
    of_query_heads = jnp.repeat(others, before.group, axis=1)
    total = units.grid_of_query_heads(jnp.where(of_query_heads, score, 0.0)).sum(3)
    total = jnp.moveaxis(total, 3, 2).reshape(*score.shape[:2], -1)
    total = group_scores(total, before, group_reduce)
    number = jnp.broadcast_to(jnp.arange(units.count, dtype=jnp.int32), total.shape)
    room = (others & after.live).sum(-1, dtype=jnp.int32)
    best = keep_best(total, units.any(others), number, room // size)
    evicts = (before.live & ~after.live).any(-1, keepdims=True)
    return jnp.where(evicts, always | (others & units.slots(best)), after.live)
