"""Recent rows: new rows that a payload keeps unencoded until they are written into its body."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.payload import Moves, free_bytes, resized, take_slots, write_slots
from kvjax.devices import all_heads
from kvjax.serialization import pytree_node


def places(
    held: Int[Array, "B H N"], index: Int[Array, "B K M"], slots: int
) -> Int[Array, "B K M"]:
    """Returns the place of each slot of `index` in the list `held` (S = none); -1 if not there."""
    place = jax.lax.broadcasted_iota(jnp.int32, held.shape, 2)
    table = write_slots(jnp.full((*held.shape[:2], slots), -1, jnp.int32), held, place)
    return jnp.where(index >= 0, take_slots(table, jnp.maximum(index, 0)), -1)


@pytree_node
@dataclass(frozen=True)
class Recent:
    """Newest rows of every (row, KV head), dense, in the order in which they came.

    Args:
      rows: R places, of which the first `count` hold a row.
      slots: slot of each place; `nowhere` where it has none.
      count: number of places that are taken.
      nowhere: slot number S, which means no slot (static).
      heads: as in `KVCache` (static).

    Example:
      >>> import jax.numpy as jnp
      >>> from kvjax.storage.recent import Recent
      >>> recent = Recent.empty((1, 1, 8, 2), jnp.float32, size=4)
      >>> recent = recent.add(jnp.array([[[5, 8, 6]]]), jnp.ones((1, 1, 3, 2)))
      >>> recent.slots.tolist(), recent.room.tolist()
      ([[[5, 6, 8, 8]]], [2])
      >>> recent.places(jnp.array([[[4, 5, 6]]])).tolist()
      [[[-1, 0, 1]]]
    """

    rows: Float[Array, "B H R D"]
    slots: Int[Array, "B H R"]
    count: Int[Array, "B H"]
    nowhere: int = field(metadata={"static": True})
    heads: int = field(metadata={"static": True})

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int], dtype: DTypeLike, size: int) -> Recent:
        """Makes R = `size` free places beside a body of `shape`."""
        batch, lists, slots, head_dim = shape
        return cls(
            jnp.zeros((batch, lists, size, head_dim), dtype),
            jnp.full((batch, lists, size), slots, jnp.int32),
            jnp.zeros((batch, lists), jnp.int32),
            slots,
            lists,
        )

    size = property(lambda self: self.slots.shape[2])  # R
    room = property(lambda self: self.size - self.count.max(1))  # of each row, in every KV head
    there = property(lambda self: self.slots < self.nowhere)  # places whose row is that of a slot

    def add(self, slots: Int[Array, "B H T"], rows: Float[Array, "B H T D"]) -> Recent:
        """Adds T rows; a token that no KV head of a row stores takes no place.

        An earlier row of the same slot loses its slot.
        """
        # Both may be S, which means no slot: the result is S then too.
        overwritten = (self.slots[..., None] == slots[:, :, None]).any(-1)
        stored = (slots < self.nowhere).any(1, keepdims=True)
        place = self.count[..., None] + jnp.cumsum(stored, axis=2, dtype=jnp.int32) - 1
        place = jnp.where(stored, place, self.size)
        # Comparison instead of a scatter: for one token this is one small kernel.
        at_place = place[..., None] == jax.lax.broadcasted_iota(jnp.int32, (1, 1, 1, self.size), 3)
        new_slots = jnp.where(at_place, slots[..., None], -1).max(2)
        earlier_slots = jnp.where(overwritten, self.nowhere, self.slots)
        return dataclasses.replace(
            self,
            rows=write_slots(self.rows, place, rows),
            slots=jnp.where(new_slots >= 0, new_slots, earlier_slots),
            count=self.count + stored.sum(2, dtype=jnp.int32),
        )

    @property
    def free_bytes(self) -> int:
        """Returns the bytes of empty places; of all places where arrays are shapes."""
        is_shape = isinstance(self.slots, jax.ShapeDtypeStruct)
        taken = 0 if is_shape else int(self.there.sum())
        return free_bytes((self.rows, self.slots), taken, math.prod(self.slots.shape))

    def resized(self, slots: int, size: int) -> Recent:
        """Cuts or adds free places at the end, up to `size`, beside a body of `slots` slots."""
        numbers = jnp.where(self.there, self.slots, slots)
        return dataclasses.replace(
            self,
            rows=resized(self.rows, size),
            slots=resized(numbers, size, fill=slots),
            nowhere=slots,
        )

    def places(self, index: Int[Array, "B K N"]) -> Int[Array, "B K N"]:
        """Returns the place of each slot of `index`; -1 where its row is not recent."""
        return places(self.slots, index, self.nowhere)

    def at(self, place: Int[Array, "B K N"], rows: Array | float) -> Float[Array, "B K N D"]:
        """Returns the rows at these places, and `rows` where a place is -1."""
        recent = take_slots(self.rows, jnp.maximum(place, 0))
        return jnp.where(place[..., None] >= 0, recent, rows)

    def over(
        self, rows: Float[Array, "B K N D"], index: Int[Array, "B K N"] | None = None
    ) -> Float[Array, "B K N D"]:
        """Replaces rows of the body by the recent rows of the same slots `index` (None: all)."""
        if index is None:
            return write_slots(rows, self.slots, self.rows)
        return self.at(self.places(index), rows)

    def of_slots(self, x: Array) -> Array:
        """Takes `x [B, H, S, ...]` at the slot of each place; anything where it has no slot."""
        return take_slots(x, jnp.minimum(self.slots, self.nowhere - 1))

    def moved(self, moves: Moves) -> Recent:
        """Renumbers the slots of the rows as `moves` says."""
        source, slots = moves
        table = jax.lax.broadcasted_iota(jnp.int32, (*self.count.shape, self.nowhere), 2)
        # A slot keeps its number where its move has no target.
        source = jnp.where(slots < self.nowhere, source, self.nowhere)
        table = write_slots(table, source, slots)
        return dataclasses.replace(
            self, slots=jnp.where(self.there, self.of_slots(table), self.nowhere)
        )

    def by_slot(self) -> Recent:
        """Orders the rows by slot, and frees the places that have no slot."""
        ordered = self._take(jnp.argsort(self.slots, axis=2))
        return dataclasses.replace(ordered, count=ordered.there.sum(2, dtype=jnp.int32))

    def without_first(self, number: Int[Array, "B H"]) -> Recent:
        """Removes the rows of the first `number` places; the other rows move up."""
        place = jax.lax.broadcasted_iota(jnp.int32, self.slots.shape, 2)
        remaining = self.count - number
        moved = self._take(jnp.minimum(place + number[..., None], self.size - 1))
        slots = jnp.where(place < remaining[..., None], moved.slots, self.nowhere)
        return dataclasses.replace(moved, slots=slots, count=remaining)

    def _take(self, places: Int[Array, "B H R"]) -> Recent:
        """Puts the rows and slots of `places` into places 0, 1, …"""
        rows, slots = take_slots(self.rows, places), take_slots(self.slots, places)
        return dataclasses.replace(self, rows=rows, slots=slots)

    def due(self, steps: int) -> Bool[Array, " B"]:
        """Marks the rows of the batch that have no room for `steps` more tokens."""
        return self.size - all_heads(self.count, self.heads).max(1) < steps

    def cleared(self, mask: Bool[Array, " B"]) -> Recent:
        """Frees all places of the chosen rows of the batch."""
        chosen = mask[:, None]
        return dataclasses.replace(
            self,
            slots=jnp.where(chosen[..., None], self.nowhere, self.slots),
            count=jnp.where(chosen, 0, self.count),
        )
