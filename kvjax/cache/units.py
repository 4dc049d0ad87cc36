"""Arranges a cache by position, in units of neighbouring tokens: blocks, chunks or pages."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.cache.payload import take_slots, write_slots
from kvjax.cache.slots import KVCache
from kvjax.devices import all_heads


class Units(NamedTuple):
    """The slots of a cache by position: unit u has the positions `u·size … (u + 1)·size − 1`.

    A unit has the same positions in all heads, whichever of its tokens each head holds, and in
    whichever slots. Tokens beyond `count · size` are in no unit; they occur only if positions have
    gaps.

    Args:
      position: position of each slot, counted from where the first unit begins.
      count: number of units.
      size: tokens of a unit.
    """

    position: Int[Array, "B H S"]
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]  # a field, no method of tuples
    size: int

    @classmethod
    def of(cls, cache: KVCache, size: int) -> Units:
        """Makes as many units of this size as the cache's `max_tokens` take."""
        return cls(cache.position, -(-cache.max_tokens // size), size)

    def grid(self, x: Array) -> Array:
        """Arranges `[B, H, S, ...]` as `[B, H, U, size, ...]`; 0 where a head lacks the token."""
        places = self.count * self.size
        # Tokens of no unit go to the place after the last one, which drops them.
        index = jnp.where(self.position >= 0, jnp.minimum(self.position, places), places)
        grid = write_slots(jnp.zeros((*x.shape[:2], places, *x.shape[3:]), x.dtype), index, x)
        return grid.reshape(*x.shape[:2], self.count, self.size, *x.shape[3:])

    def grid_of_query_heads(self, x: Array) -> Array:
        """Arranges an array `[B, Q, S]` of query heads as `[B, H, U, size, G]`."""
        batch, kv_heads, slots = self.position.shape
        return self.grid(jnp.moveaxis(x.reshape(batch, kv_heads, -1, slots), 2, 3))

    def any(self, x: Bool[Array, "B H S"]) -> Bool[Array, "B H U"]:
        """Returns, for each unit, whether `x` is true for any of its tokens."""
        return self.grid(x).any(-1)

    def slots_of_tokens(self, x: Bool[Array, "B H U size"]) -> Bool[Array, "B H S"]:
        """Puts the mark of each token of the units at its slot; False outside of units."""
        places = self.count * self.size
        inside = (self.position >= 0) & (self.position < places)
        flat = x.reshape(*x.shape[:2], places)
        return take_slots(flat, jnp.clip(self.position, 0, places - 1)) & inside

    def slots(self, x: Bool[Array, "B H U"]) -> Bool[Array, "B H S"]:
        """Puts the mark of each unit at the slots of its tokens; False outside of units."""
        return self.slots_of_tokens(jnp.repeat(x[..., None], self.size, axis=-1))

    def join(self, bits: Bool[Array, "B Q S"], heads: int | None = None) -> Bool[Array, "B U N"]:
        """Joins the bits that all heads have of a unit's tokens, token by token: `N = size·Q`.

        Args:
          heads: as in `kvjax.devices.all_heads`.
        """
        grid = jnp.moveaxis(all_heads(self.grid_of_query_heads(bits), heads), 1, 3)
        return grid.reshape(*grid.shape[:2], -1)
