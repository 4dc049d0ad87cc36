"""New rows that a payload keeps as they came until they are written into its body."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.payload import Moves, take_slots, write_slots
from kvjax.devices import all_heads


def places(
    held: Int[Array, "B H N"], index: Int[Array, "B K M"], slots: int
) -> Int[Array, "B K M"]:
    """Where each slot of `index` is among those of `held` (S = none); -1 where it is not."""
    place = jax.lax.broadcasted_iota(jnp.int32, held.shape, 2)
    table = write_slots(jnp.full((*held.shape[:2], slots), -1, jnp.int32), held, place)
    return jnp.where(index >= 0, take_slots(table, jnp.maximum(index, 0)), -1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Recent:
    """The newest rows of every (row, KV head), dense, in the order in which they came.

    Args:
      rows: R places, of which the first `count` hold a row.
      slots: the slot of each place; `nowhere` where it has none.
      count: places that are taken.
      nowhere: the slot number that is none: S (static).
      heads: as of `KVCache` (static).

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
        """R = `size` free places beside a body of `shape`."""
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
        """T rows more; a token that no KV head of a row stores takes no place.

        What a slot held before is no longer that slot's.
        """
        # Slot number S means none, so that it is no harm where both are S.
        again = (self.slots[..., None] == slots[:, :, None]).any(-1)
        stored = (slots < self.nowhere).any(1, keepdims=True)
        place = self.count[..., None] + jnp.cumsum(stored, axis=2, dtype=jnp.int32) - 1
        place = jnp.where(stored, place, self.size)
        # Compared and not scattered: for one token this is one small kernel.
        at = place[..., None] == jax.lax.broadcasted_iota(jnp.int32, (1, 1, 1, self.size), 3)
        own = jnp.where(at, slots[..., None], -1).max(2)
        left = jnp.where(again, self.nowhere, self.slots)
        return dataclasses.replace(
            self,
            rows=write_slots(self.rows, place, rows),
            slots=jnp.where(own >= 0, own, left),
            count=self.count + stored.sum(2, dtype=jnp.int32),
        )

    def places(self, index: Int[Array, "B K N"]) -> Int[Array, "B K N"]:
        """The place of each slot of `index`, -1 where its row is not among these."""
        return places(self.slots, index, self.nowhere)

    def at(self, place: Int[Array, "B K N"], rows: Array | float) -> Float[Array, "B K N D"]:
        """The rows at these places, and `rows` where a place is -1."""
        own = take_slots(self.rows, jnp.maximum(place, 0))
        return jnp.where(place[..., None] >= 0, own, rows)

    def over(
        self, rows: Float[Array, "B K N D"], index: Int[Array, "B K N"] | None = None
    ) -> Float[Array, "B K N D"]:
        """Rows of slots `index` (None: all) from the body, those that are here in their place."""
        if index is None:
            return write_slots(rows, self.slots, self.rows)
        return self.at(self.places(index), rows)

    def of_slots(self, x: Array) -> Array:
        """What `x [B, H, S, ...]` has for the slot of each place; anything where it has none."""
        return take_slots(x, jnp.minimum(self.slots, self.nowhere - 1))

    def moved(self, moves: Moves) -> Recent:
        """The same rows under the slot numbers that they have after `moves`."""
        source, slots = moves
        table = jax.lax.broadcasted_iota(jnp.int32, (*self.count.shape, self.nowhere), 2)
        # Where a move has no target, the slot keeps its number.
        source = jnp.where(slots < self.nowhere, source, self.nowhere)
        table = write_slots(table, source, slots)
        return dataclasses.replace(
            self, slots=jnp.where(self.there, self.of_slots(table), self.nowhere)
        )

    def by_slot(self) -> Recent:
        """The same rows in the order of their slots, and no places taken without one."""
        ordered = self._take(jnp.argsort(self.slots, axis=2))
        return dataclasses.replace(ordered, count=ordered.there.sum(2, dtype=jnp.int32))

    def without_first(self, number: Int[Array, "B H"]) -> Recent:
        """Without the rows of the first places; those of the others move up."""
        place = jax.lax.broadcasted_iota(jnp.int32, self.slots.shape, 2)
        left = self.count - number
        moved = self._take(jnp.minimum(place + number[..., None], self.size - 1))
        slots = jnp.where(place < left[..., None], moved.slots, self.nowhere)
        return dataclasses.replace(moved, slots=slots, count=left)

    def _take(self, places: Int[Array, "B H R"]) -> Recent:
        rows, slots = take_slots(self.rows, places), take_slots(self.slots, places)
        return dataclasses.replace(self, rows=rows, slots=slots)

    def due(self, steps: int) -> Bool[Array, " B"]:
        """The rows that have no room for `steps` more."""
        return self.size - all_heads(self.count, self.heads).max(1) < steps

    def cleared(self, mask: Bool[Array, " B"]) -> Recent:
        """Without the rows of the batch that are chosen."""
        chosen = mask[:, None]
        return dataclasses.replace(
            self,
            slots=jnp.where(chosen[..., None], self.nowhere, self.slots),
            count=jnp.where(chosen, 0, self.count),
        )
