"""Payload in host memory; rows that are new since the last flush are on the device."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NoReturn

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.payload import Dense, Moves, OfPlaces, Payload, Slots, free_bytes
from kvjax.serialization import pytree_node
from kvjax.storage.recent import Recent
from pallas_kernels import Mask, Queries, Seen, host_rows

HOST_MEMORY = "pinned_host"


def memory_kinds() -> tuple[str, ...]:
    """Returns the kinds of memory that the default device can address."""
    return tuple(memory.kind for memory in jax.devices()[0].addressable_memories())


@custom_vmap
def not_mapped(store: Array) -> Array:
    """Returns the array; raises under `jax.vmap`, whose slices would be gathers in host memory."""
    return store


@not_mapped.def_vmap
def _refuse_vmap(axis_size: int, in_batched: list[bool], store: Array) -> NoReturn:
    raise ValueError(
        "a decode step or a flush of a cache with Offload cannot be mapped by jax.vmap, which "
        f"wants {axis_size} at once: give init_cache batch={axis_size}, and attend the rows as one "
        "batch"
    )


def to_host(x: Array) -> Array:
    """Moves an array to host memory."""
    return jax.device_put(x, jax.memory.Space.Host)


@pytree_node
@dataclass(frozen=True)
class Offloaded:
    """Rows in host memory; rows that are new since the last flush are on the device.

    New slots only come at the end of a row and head. So its recent rows are a range of slots, which
    a flush writes as one block.

    Args:
      store: rows of all slots except the recent ones, in host memory. The M rows at the end belong
        to no slot.
      recent: newest rows, at most M.
    """

    store: Float[Array, "B H S+M D"]
    recent: Recent

    @classmethod
    def zeros(cls, shape: tuple[int, int, int, int], size: int, dtype: DTypeLike) -> Offloaded:
        """Makes a payload of zeros that takes M = `size` new rows between two flushes."""
        recent = Recent.empty(shape, dtype, size)
        return cls(_in_host_memory(jnp.zeros(shape, dtype), size), recent)

    shape = property(lambda self: (*self.store.shape[:2], self.recent.nowhere, self.store.shape[3]))
    dtype = property(lambda self: self.store.dtype)
    at_rest = awake = property(lambda self: self)
    room = property(lambda self: self.recent.room)
    beside = property(lambda self: self.recent.size)
    beside_taken = property(lambda self: self.recent.count.max())

    def read(self, index: Int[Array, "B K N"] | None = None) -> Float[Array, "B K N D"]:
        """Reads rows to the device: all slots, which copies the store, or those of `index`."""
        if index is None:
            return self.recent.over(
                jax.device_put(self.store, jax.memory.Space.Device)[:, :, : self.shape[2]]
            )
        place = self.recent.places(index)
        store = not_mapped(self.store)
        return host_rows((store,), (self.recent.at(place, 0),), index, place < 0)[0]

    def write(self, slots: Int[Array, "B H T"] | None, rows: Float[Array, "B H T D"]) -> Offloaded:
        """Adds new rows, which stay on the device; if `slots` is None, replaces all slots."""
        if slots is None:
            return self._filled(rows.astype(self.dtype), jnp.ones(self.shape[0], bool))
        return dataclasses.replace(self, recent=self.recent.add(slots, rows))

    def flush(self, steps: int, moves: Moves | None = None) -> Offloaded:
        """Moves recent rows among slots, then makes room for `steps` new ones if there is less.

        Rows in host memory do not move.
        """
        recent = self.recent if moves is None else self.recent.moved(moves)
        if not steps:
            return dataclasses.replace(self, recent=recent)
        due, ordered = recent.due(steps), recent.by_slot()
        batch, heads, size, head_dim = ordered.rows.shape
        # Blocks that are not due are written too, to the rows at the end that belong to no slot:
        # every round of the loop does the same.
        starts = jnp.where(due[:, None], ordered.slots[:, :, 0], recent.nowhere).reshape(-1)

        def put_block(i: Int[Array, ""], store: Array) -> Array:
            i = jnp.int32(i)  # as slots are; with x64 loops count in int64
            zero = jnp.zeros_like(i)
            row_and_head = i // heads, i % heads
            block = jax.lax.dynamic_slice(
                ordered.rows, (*row_and_head, zero, zero), (1, 1, size, head_dim)
            )
            start = jax.lax.dynamic_index_in_dim(starts, i, keepdims=False)
            return jax.lax.dynamic_update_slice(store, to_host(block), (*row_and_head, start, zero))

        store = jax.lax.fori_loop(0, batch * heads, put_block, not_mapped(self.store))
        return Offloaded(store, recent.cleared(due))

    def encode(
        self,
        values: Offloaded,
        k: Float[Array, "B H S D"],
        v: Float[Array, "B H S D"],
        slots: Slots,
    ) -> tuple[Offloaded, Offloaded]:
        """Writes all rows to host memory; rows without a prompt keep their recent rows."""
        return self._filled(k, slots.rows), values._filled(v, slots.rows)

    def free_bytes(self, live: int) -> int:
        """Returns the bytes of free slots, of rows without a slot, and of free recent places."""
        places = math.prod(self.store.shape[:3])
        return free_bytes(self.store, live, places) + self.recent.free_bytes

    def resized(self, slots: int, beside: int) -> Offloaded:
        """Cuts or adds free slots and places; the device holds one row of the batch at a time."""
        batch, heads, _, head_dim = self.store.shape
        size = slots + beside

        def move(row: Int[Array, ""], store: Array) -> Array:
            rows = jax.lax.dynamic_slice_in_dim(self.store, row, 1)
            rows = to_host(jax.device_put(rows, jax.memory.Space.Device)[:, :, :size])
            return jax.lax.dynamic_update_slice_in_dim(store, rows, row, 0)

        empty = to_host(jnp.zeros((batch, heads, size, head_dim), self.dtype))
        store = jax.lax.fori_loop(0, batch, move, empty)
        return Offloaded(store, self.recent.resized(slots, beside))

    def map_slots(self, change: OfPlaces, slots: int) -> Offloaded:
        """Changes nothing: the rows are in host memory."""
        return self

    def _filled(self, rows: Float[Array, "B H S D"], cleared: Bool[Array, " B"]) -> Offloaded:
        """Replaces the rows in host memory; `cleared` rows of the batch lose their recent ones."""
        return Offloaded(_in_host_memory(rows, self.recent.size), self.recent.cleared(cleared))

    def attention(
        self, values: Payload, queries: Queries, seen: Seen, mask: Mask, **options
    ) -> tuple[Array, Array | None]:
        """Attends to all slots, which copies the stores to the device."""
        keys = Dense(self.read())
        return keys.attention(Dense(values.read()), queries, seen, mask, **options)


def _in_host_memory(rows: Float[Array, "B H S D"], padding: int) -> Float[Array, "B H S+M D"]:
    """Moves rows, with `padding` zeros behind them, to host memory."""
    return to_host(jnp.pad(rows, ((0, 0), (0, 0), (0, padding), (0, 0))))
