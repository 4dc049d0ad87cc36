"""Payload in host memory; rows that are new since the last flush are on the device."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NoReturn

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.cache.payload import Dense, Moves, OfPlaces, Payload, Slots, free_bytes
from kvjax.serialization import pytree_node
from kvjax.storage.offload.row_codec import RowCodec
from kvjax.storage.quantize.payload import Quantized
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

    Rows of fewer bits are held as W bytes each, in both memories (`RowCodec`).

    Args:
      store: rows of all slots except the recent ones, in host memory. The M rows at the end belong
        to no slot.
      recent: newest rows, at most M.
      codec: encodes each row as W bytes; None: rows are held as they are, and W = D.
    """

    store: Shaped[Array, "B H S+M W"]
    recent: Recent
    codec: RowCodec | None

    @classmethod
    def zeros(cls, payload: Dense | Quantized, size: int) -> Offloaded:
        """Makes a payload of zeros, in the form of an empty one on the device.

        Args:
          size: M, the new rows that it takes between two flushes.
        """
        codec = RowCodec.of(payload) if isinstance(payload, Quantized) else None
        batch, heads, slots, head_dim = payload.shape
        shape = (batch, heads, slots, head_dim if codec is None else codec.width)
        dtype = payload.dtype if codec is None else jnp.uint8
        recent = Recent.empty(shape, dtype, size)
        return cls(_in_host_memory(jnp.zeros(shape, dtype), size), recent, codec)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the dense rows, `(B, H, S, D)`."""
        batch, heads, _, width = self.store.shape
        head_dim = width if self.codec is None else self.codec.head_dim
        return batch, heads, self.recent.nowhere, head_dim

    dtype = property(lambda self: (self.codec or self.store).dtype)
    at_rest = awake = property(lambda self: self)
    room = property(lambda self: self.recent.room)
    beside = property(lambda self: self.recent.size)
    beside_taken = property(lambda self: self.recent.count.max())

    def read(self, index: Int[Array, "B K N"] | None = None) -> Float[Array, "B K N D"]:
        """Reads rows to the device: all slots, which copies the store, or those of `index`."""
        if index is None:
            return self.dense(self._on_device())
        place = self.recent.places(index)
        store = not_mapped(self.store)
        return self.dense(host_rows((store,), (self.recent.at(place, 0),), index, place < 0)[0])

    def dense(self, rows: Shaped[Array, "B K N W"]) -> Float[Array, "B K N D"]:
        """Decodes rows that are on the device."""
        return rows if self.codec is None else self.codec.decode(rows)

    def _on_device(self) -> Shaped[Array, "B H S W"]:
        """Copies the rows of all slots to the device."""
        store = jax.device_put(self.store, jax.memory.Space.Device)
        return self.recent.over(store[:, :, : self.recent.nowhere])

    def write(self, slots: Int[Array, "B H T"] | None, rows: Float[Array, "B H T D"]) -> Offloaded:
        """Adds new rows, which stay on the device; if `slots` is None, replaces all slots."""
        if slots is None:
            every = jnp.ones(self.shape[0], bool)
            if self.codec is None:
                return self._filled(rows.astype(self.dtype), every)
            return self._taken(self.codec.payload(self._on_device()).write(None, rows), every)
        new = rows if self.codec is None else self.codec.encode(rows)
        return dataclasses.replace(self, recent=self.recent.add(slots, new))

    def flush(self, steps: int, moves: Moves | None = None) -> Offloaded:
        """Moves recent rows among slots, then makes room for `steps` new ones if there is less.

        Rows in host memory do not move.
        """
        recent = self.recent if moves is None else self.recent.moved(moves)
        if not steps:
            return dataclasses.replace(self, recent=recent)
        due, ordered = recent.due(steps), recent.by_slot()
        batch, heads, size, width = ordered.rows.shape
        # Blocks that are not due are written too, to the rows at the end that belong to no slot:
        # every round of the loop does the same.
        starts = jnp.where(due[:, None], ordered.slots[:, :, 0], recent.nowhere).reshape(-1)

        def put_block(i: Int[Array, ""], store: Array) -> Array:
            i = jnp.int32(i)  # as slots are; with x64 loops count in int64
            zero = jnp.zeros_like(i)
            row_and_head = i // heads, i % heads
            block = jax.lax.dynamic_slice(
                ordered.rows, (*row_and_head, zero, zero), (1, 1, size, width)
            )
            start = jax.lax.dynamic_index_in_dim(starts, i, keepdims=False)
            return jax.lax.dynamic_update_slice(store, to_host(block), (*row_and_head, start, zero))

        store = jax.lax.fori_loop(0, batch * heads, put_block, not_mapped(self.store))
        return dataclasses.replace(self, store=store, recent=recent.cleared(due))

    def encode(
        self,
        values: Offloaded,
        k: Float[Array, "B H S D"],
        v: Float[Array, "B H S D"],
        slots: Slots,
    ) -> tuple[Offloaded, Offloaded]:
        """Writes all rows to host memory; rows without a prompt keep their recent rows.

        To keep what was encoded before as it is, rows of fewer bits are copied to the device.
        """
        if self.codec is None or values.codec is None:  # both are: `Quantize` encodes both
            return self._filled(k, slots.rows), values._filled(v, slots.rows)
        stored_k = self.codec.payload(self._on_device())
        stored_v = values.codec.payload(values._on_device())
        new_k, new_v = stored_k.encode(stored_v, k, v, slots)
        return self._taken(new_k, slots.rows), values._taken(new_v, slots.rows)

    def _taken(self, payload: Quantized, cleared: Bool[Array, " B"]) -> Offloaded:
        """Holds the encoded rows of a payload on the device."""
        codec = RowCodec.of(payload)
        return dataclasses.replace(self, codec=codec)._filled(codec.held(payload.encoded), cleared)

    def free_bytes(self, live: int) -> int:
        """Returns the bytes of free slots, of rows without a slot, and of free recent places."""
        places = math.prod(self.store.shape[:3])
        return free_bytes(self.store, live, places) + self.recent.free_bytes

    def resized(self, slots: int, beside: int) -> Offloaded:
        """Cuts or adds free slots and places; the device holds one row of the batch at a time."""
        batch, heads, _, width = self.store.shape
        size = slots + beside

        def move(row: Int[Array, ""], store: Array) -> Array:
            rows = jax.lax.dynamic_slice_in_dim(self.store, row, 1)
            rows = to_host(jax.device_put(rows, jax.memory.Space.Device)[:, :, :size])
            return jax.lax.dynamic_update_slice_in_dim(store, rows, row, 0)

        empty = to_host(jnp.zeros((batch, heads, size, width), self.store.dtype))
        store = jax.lax.fori_loop(0, batch, move, empty)
        return dataclasses.replace(self, store=store, recent=self.recent.resized(slots, beside))

    def map_slots(self, change: OfPlaces, slots: int) -> Offloaded:
        """Changes nothing: the rows are in host memory."""
        return self

    def _filled(self, rows: Shaped[Array, "B H S W"], cleared: Bool[Array, " B"]) -> Offloaded:
        """Replaces the rows in host memory; `cleared` rows of the batch lose their recent ones."""
        store = _in_host_memory(rows, self.recent.size)
        return dataclasses.replace(self, store=store, recent=self.recent.cleared(cleared))

    def attention(
        self, values: Payload, queries: Queries, seen: Seen, mask: Mask, **options
    ) -> tuple[Array, Array | None]:
        """Attends to all slots, which copies the stores to the device."""
        keys = Dense(self.read())
        return keys.attention(Dense(values.read()), queries, seen, mask, **options)


def _in_host_memory(rows: Shaped[Array, "B H S W"], padding: int) -> Shaped[Array, "B H S+M W"]:
    """Moves rows, with `padding` zeros behind them, to host memory."""
    return to_host(jnp.pad(rows, ((0, 0), (0, 0), (0, padding), (0, 0))))
