"""Units of neighbouring tokens: a cache by position, in blocks, chunks or pages."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.cache.payload import take_slots, write_slots
from kvjax.cache.slots import KVCache
from kvjax.devices import all_heads


class Units(NamedTuple):
    """The slots of a cache by position: unit u has the positions `u·size … (u + 1)·size − 1`.

    A unit is the same in all heads, whichever of its tokens they hold, and in whichever slots.
    Tokens beyond `count · size`, which only gaps between positions allow, are in none.

    Args:
      position: of each slot, counted from where the first unit begins.
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

    def slots_of_tokens(self, x: Bool[Array, "B H U size"]) -> Bool[Array, "B H S"]:
        """What holds of a unit's token, at its slot; False for tokens of no unit."""
        places = self.count * self.size
        inside = (self.position >= 0) & (self.position < places)
        flat = x.reshape(*x.shape[:2], places)
        return take_slots(flat, jnp.clip(self.position, 0, places - 1)) & inside

    def slots(self, x: Bool[Array, "B H U"]) -> Bool[Array, "B H S"]:
        """What holds of a unit, for each of its tokens."""
        unit = self.position // self.size
        inside = (unit >= 0) & (unit < self.count)
        return take_slots(x, jnp.clip(unit, 0, self.count - 1)) & inside

    def join(self, bits: Bool[Array, "B Q S"], heads: int | None = None) -> Bool[Array, "B U N"]:
        """The bits of all heads and of a unit's tokens, one token after the other: `N = size·Q`.

        `heads` as in `kvjax.devices.all_heads`.
        """
        grid = jnp.moveaxis(all_heads(self.grid_of_query_heads(bits), heads), 1, 3)
        return grid.reshape(*grid.shape[:2], -1)
