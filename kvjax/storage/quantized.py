"""Payloads of 8 and 4 bits: how rows are encoded, read, written, moved and multiplied with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.payload import Dense, OpenRows, take_slots, write_slots
from kvjax.rope import Rotation
from kvjax.storage.encoded_attention import Piece, Seen
from pallas_kernels import (
    dequantise_groups,
    dequantise_slots,
    quantise_groups,
    quantise_slots,
    quantized_logits,
    quantized_mix,
)
from pallas_kernels.attention.forms import dense_rows, quantized_rows
from pallas_kernels.base.logits import Product
from pallas_kernels.formats.bits import Encoded

Bits = Literal[8, 4, "float8"]
Axis = Literal["token", "channel"]
OPERATION = "quantized_attention"
EIGHT_BITS = {8: "int8", "float8": "float8_e4m3fn"}  # dtypes of numbers with a scale per slot


@dataclass(frozen=True)
class Form:
    """How the rows of a payload are encoded, and how many newest ones are not.

    Args:
      bits: 8, 4 or "float8".
      group, axis: of 4 bits, as in `pallas_kernels.quantise_groups`.
      tail: rows of the tail that are kept as they are; 0: none.
    """

    bits: Bits
    group: int = 1
    axis: Axis = "token"
    tail: int = 0

    def encode(self, rows: Float[Array, "B H S D"]) -> Encoded:
        """Dense rows in this form."""
        if self.bits == 4:
            return Encoded(*quantise_groups(rows, self.group, self.axis))
        return Encoded(*quantise_slots(rows, jnp.dtype(EIGHT_BITS[self.bits])))

    def decode(self, encoded: Encoded) -> Float[Array, "B H S D"]:
        """Float32 rows."""
        if self.bits == 4:
            return dequantise_groups(*encoded, self.axis)
        return dequantise_slots(encoded.values, encoded.scale)

    def close(self, rows: Float[Array, "B H S D"], tail: Int[Array, ""]):
        """The payload of these rows, whose tail begins at slot `tail`."""
        if self.tail:
            return ResidualQuantized.encode(rows, tail, self)
        return Quantized(self.encode(rows), self, rows.dtype)

    def empty(self, shape: tuple[int, int, int, int], dtype: DTypeLike):
        """A payload of zeros: all that is stored of them is 0."""
        # Not encoded here: in a compiled prompt pass XLA would do so at compile time, row by row.
        made = jax.eval_shape(lambda: self.close(jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32)))
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)

    def channels(self, encoded: Encoded) -> int:
        """D of encoded rows."""
        return encoded.values.shape[3] * (2 if self.bits == 4 else 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """Rows of 8 bits, or of 4 in groups within each slot: every slot is encoded by itself.

    Bytes of a slot: D + 4 with 8 bits; D / 2 + 2 · D / group · itemsize with 4. A row that is
    filled in again as it was read stays exactly as it is.

    Args:
      encoded: `[B, H, S, ...]`.
      form: how (static).
      dtype: of dense rows (static).
    """

    encoded: Encoded
    form: Form = field(metadata={"static": True})
    dtype: jnp.dtype = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, H, S, D."""
        return (*self.encoded.values.shape[:3], self.form.channels(self.encoded))

    def _each(self, change: Callable[..., Array], *others: Encoded) -> Quantized:
        return dataclasses.replace(self, encoded=jax.tree.map(change, self.encoded, *others))

    def read(self, index: Int[Array, "B K N"] | None = None) -> Float[Array, "B K N D"]:
        """Dense rows: all slots, or those of `index`."""
        part = self if index is None else self._each(lambda x: take_slots(x, index))
        return self.form.decode(part.encoded).astype(self.dtype)

    def take(self, index: Int[Array, "B H N"]) -> Quantized:
        """The payload whose slot n is this one's slot `index[..., n]`; N may differ from S."""
        return self._each(lambda x: take_slots(x, index))

    def write(self, slots: Int[Array, "B H T"], rows: Float[Array, "B H T D"]) -> Quantized:
        """Replaces a few slots; slot number S writes nothing."""
        new = self.form.encode(rows.astype(self.dtype))
        return self._each(lambda x, new: write_slots(x, slots, new), new)

    def fill(self, rows: Float[Array, "B H S D"]) -> Quantized:
        """Replaces all slots whose rows are not what they were."""
        rows = rows.astype(self.dtype)
        same = (rows == self.read()).all(-1)

        def choose(old: Array, new: Array) -> Array:
            return jnp.where(same.reshape(same.shape + (1,) * (old.ndim - 3)), old, new)

        return self._each(choose, self.form.encode(rows))

    def open(self) -> OpenedQuantized:
        """Dense rows, for the time that a prompt is read."""
        return OpenedQuantized(Dense(self.read()), self.form)

    def close(self, tail: Int[Array, ""]) -> Quantized:
        """Itself: it is not open."""
        return self

    def span(self, start: Int[Array, ""], size: int) -> Float[Array, "B H N D"]:
        """Dense rows of `size` slots from `start` on."""
        part = self._each(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, 2))
        return part.read()

    def settle(self, start: Int[Array, ""], index: Int[Array, "B H N"]) -> Quantized:
        """Sorts N slots from `start` on by `index`."""

        def sort(x: Array) -> Array:
            rows = jax.lax.dynamic_slice_in_dim(x, start, index.shape[2], 2)
            return jax.lax.dynamic_update_slice_in_dim(x, take_slots(rows, index), start, 2)

        return self._each(sort)

    def logits(
        self, q: Float[Array, "B H R D"], rotate: Rotation | None = None
    ) -> Float[Array, "B H R S"]:
        """Products of all keys, rotated or not, with q in float32."""

        def compute(product: Product | None) -> Array:
            return quantized_logits(q, *self.encoded, product=product)

        return compute(None) if rotate is None else rotate.logits(compute)

    def mix(self, weights: Float[Array, "B H R S"]) -> Float[Array, "B H R D"]:
        """Weighted sums of all values in float32."""
        return quantized_mix(weights, *self.encoded)

    def pieces(self, values: Quantized, seen: Seen) -> list[Piece]:
        """What a kernel attends to: all slots, these being the keys."""
        k, v = (quantized_rows(x.encoded, x.dtype) for x in (self, values))
        return [Piece(OPERATION, k, v, seen.bias, seen.position, seen.turn, end=seen.used)]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OpenedQuantized(OpenRows):
    """A quantised payload while a prompt is read: dense rows.

    Args:
      rows: of all slots.
      form: in which they are closed (static).
    """

    form: Form = field(metadata={"static": True})

    def close(self, tail: Int[Array, ""]) -> Quantized | ResidualQuantized:
        """All rows encoded; the tail then begins at slot `tail`."""
        return self.form.close(self.rows.read(), tail)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ResidualQuantized:
    """Rows of 4 bits in groups, all but those of the tail, which is where new ones go.

    Groups of slots are counted from where the tail begins, in both directions: what is encoded
    after a prompt does not depend on how much longer other rows are. The first group may begin
    before slot 0, so the encoded rows are up to two groups more than there are slots.

    Args:
      encoded: slot s is row `s + lead`.
      tail: slots `start` to `start + M`, dense.
      start: first slot of the tail.
      form: how (static).
      slots: S (static).
    """

    encoded: Encoded
    tail: Float[Array, "B H M D"]
    start: Int[Array, ""]
    form: Form = field(metadata={"static": True})
    slots: int = field(metadata={"static": True})

    @classmethod
    def encode(
        cls, rows: Float[Array, "B H S D"], start: Int[Array, ""], form: Form
    ) -> ResidualQuantized:
        """Encodes all rows, and keeps those from slot `start` on, too."""
        slots, group = rows.shape[2], form.group
        size = -(-(slots + group - 1) // group) * group
        # What is no slot repeats the one beside it, and so changes no group's extremes. Neither do
        # free slots in front of a row: `compact` has put its first token into them.
        wide = jnp.pad(rows, ((0, 0), (0, 0), (group, size - slots), (0, 0)), mode="edge")
        lead = _lead(start, group)
        body = jax.lax.dynamic_slice_in_dim(wide, group - lead, size, 2)
        after = jnp.pad(rows, ((0, 0), (0, 0), (0, form.tail), (0, 0)))
        tail = jax.lax.dynamic_slice_in_dim(after, start, form.tail, 2)
        return cls(form.encode(body), tail, start + 0, form, slots)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, H, S, D."""
        return (*self.tail.shape[:2], self.slots, self.tail.shape[3])

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of dense rows."""
        return self.tail.dtype

    @property
    def lead(self) -> Int[Array, ""]:
        """Encoded rows before slot 0."""
        return _lead(self.start, self.form.group)

    def _place(self, row: Array, x: Array) -> Array:
        """Where the numbers of an encoded row stand in an array of `Encoded`."""
        return row // (self.encoded.values.shape[2] // x.shape[2])

    def in_tail(self, index: Int[Array, "B K N"]) -> Bool[Array, "B K N"]:
        """Which slots are the tail's."""
        return (index >= self.start) & (index < self.start + self.tail.shape[2])

    def read(self, index: Int[Array, "B K N"] | None = None) -> Float[Array, "B K N D"]:
        """Dense rows: all slots, or those of `index`."""
        if index is None:
            return self.open().read()
        row = index + self.lead
        part = jax.tree.map(lambda x: take_slots(x, self._place(row, x)), self.encoded)
        rows = self.form.decode(part).astype(self.dtype)
        new = take_slots(self.tail, jnp.clip(index - self.start, 0, self.tail.shape[2] - 1))
        return jnp.where(self.in_tail(index)[..., None], new, rows)

    def take(self, index: Int[Array, "B H N"]) -> ResidualQuantized:
        """The payload whose slot n is this one's slot `index[..., n]`; encodes anew."""
        return self.open().take(index).close(self.start)

    def write(self, slots: Int[Array, "B H T"], rows: Float[Array, "B H T D"]) -> ResidualQuantized:
        """Replaces a few slots of the tail; slots outside it are not written."""
        # The tail may reach beyond the last slot, and slot number S writes nothing there either.
        there = self.in_tail(slots) & (slots < self.slots)
        place = jnp.where(there, slots - self.start, self.tail.shape[2])
        return dataclasses.replace(self, tail=write_slots(self.tail, place, rows))

    def fill(self, rows: Float[Array, "B H S D"]) -> ResidualQuantized:
        """Replaces all slots; encodes anew."""
        return self.open().fill(rows).close(self.start)

    def open(self) -> OpenedQuantized:
        """Dense rows, for the time that a prompt is read."""
        body = self.form.decode(self.encoded).astype(self.dtype)
        rows = self._from_rows(body, self.tail, 2)
        return OpenedQuantized(Dense(rows), self.form)

    def close(self, tail: Int[Array, ""]) -> ResidualQuantized:
        """Itself: it is not open."""
        return self

    def span(self, start: Int[Array, ""], size: int) -> Float[Array, "B H N D"]:
        """Rows of `size` slots of the tail from slot `start` on."""
        return jax.lax.dynamic_slice_in_dim(self.tail, start - self.start, size, 2)

    def settle(self, start: Int[Array, ""], index: Int[Array, "B H N"]) -> ResidualQuantized:
        """Encodes the tail, sorted by `index`: whole groups of slots."""
        new = self.form.encode(take_slots(self.tail, index))
        row = start + self.lead

        def put(old: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(old, new, self._place(row, old), 2)

        encoded = jax.tree.map(put, self.encoded, new)
        return dataclasses.replace(self, encoded=encoded, start=start + index.shape[2])

    def logits(
        self, q: Float[Array, "B H R D"], rotate: Rotation | None = None
    ) -> Float[Array, "B H R S"]:
        """Products of all keys, rotated or not, with q in float32."""
        keys = self.tail.astype(jnp.float32)

        def compute(product: Product | None) -> Array:
            return quantized_logits(q, *self.encoded, axis=self.form.axis, product=product)

        if rotate is None:
            body = compute(None)
        else:
            places, fresh = self._to_rows(rotate.position, 2)
            keys = rotate.rope.rotate(keys, fresh)
            body = dataclasses.replace(rotate, position=places).logits(compute)
        fresh = jnp.einsum(
            "bhrd,bhsd->bhrs", q.astype(jnp.float32), keys, precision=jax.lax.Precision.HIGHEST
        )
        return self._from_rows(body, fresh, 3)

    def mix(self, weights: Float[Array, "B H R S"]) -> Float[Array, "B H R D"]:
        """Weighted sums of all values in float32."""
        body, fresh = self._to_rows(weights, 3)
        new = jnp.einsum(
            "bhrs,bhsd->bhrd", fresh, self.tail.astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )  # fmt: skip
        return new + quantized_mix(body, *self.encoded, axis=self.form.axis)

    def pieces(self, values: ResidualQuantized, seen: Seen) -> list[Piece]:
        """What a kernel attends to: the slots before the tail, and those of the tail."""
        slots = seen.bias, seen.position, seen.turn
        start = jnp.broadcast_to(self.start, seen.used.shape)
        k, v = (
            quantized_rows(x.encoded, x.dtype, x.form.axis, offset=x.lead) for x in (self, values)
        )
        old = Piece(OPERATION, k, v, *slots, end=jnp.minimum(seen.used, start))
        k, v = (dense_rows(x.tail, offset=-x.start) for x in (self, values))
        return [old, Piece(OPERATION, k, v, *slots, first=start, end=seen.used)]

    def _from_rows(self, body: Array, tail: Array, axis: int) -> Array:
        """What encoded rows have and what the tail has, per slot."""
        wide = _widen(body, tail.shape[axis], axis)
        wide = jax.lax.dynamic_update_slice_in_dim(wide, tail, self.start + self.lead, axis)
        return jax.lax.dynamic_slice_in_dim(wide, self.lead, self.slots, axis)

    def _to_rows(self, x: Array, axis: int) -> tuple[Array, Array]:
        """What slots have, for the encoded rows (0 for those that are the tail's) and the tail."""
        size, new = self.encoded.values.shape[2], self.tail.shape[2]
        wide = _widen(x, new, axis)
        fresh = jax.lax.dynamic_slice_in_dim(wide, self.start, new, axis)
        wide = jax.lax.dynamic_update_slice_in_dim(wide, jnp.zeros_like(fresh), self.start, axis)
        body = jnp.zeros_like(_widen(x, size + new - x.shape[axis], axis))
        body = jax.lax.dynamic_update_slice_in_dim(body, wide, self.lead, axis)
        return jax.lax.slice_in_dim(body, 0, size, axis=axis), fresh


def _lead(start: Int[Array, ""], group: int) -> Int[Array, ""]:
    return (-start) % group


def _widen(x: Array, more: int, axis: int) -> Array:
    """With `more` zeros at the end of an axis."""
    return jnp.pad(x, [(0, more if n == axis else 0) for n in range(x.ndim)])
