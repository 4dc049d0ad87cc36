"""Payloads of 8, 4, 3 and 2 bits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.payload import (
    Moves,
    OfPlaces,
    Slots,
    equal_rows,
    free_bytes,
    of_rows,
    take_slots,
    to_places,
    write_slots,
)
from kvjax.serialization import pytree_node, static_value
from kvjax.storage.encoded_attention import EncodedPayload
from kvjax.storage.quantize.channels import Channels
from kvjax.storage.recent import Recent
from pallas_kernels import (
    dequantise_groups,
    dequantise_slots,
    hadamard_transform,
    quantise_groups,
    quantise_slots,
    quantized_logits,
    quantized_mix,
)
from pallas_kernels.attention.forms import Rows, quantized_rows
from pallas_kernels.base.rotation import Turn
from pallas_kernels.formats.bits import Encoded, narrowed, widened

Bits = Literal[8, 4, 3, 2, "float8"]
Axis = Literal["token", "channel"]
IN_GROUPS = (4, 3, 2)  # bits of numbers that share the scale of a group
EIGHT_BITS = {8: "int8", "float8": "float8_e4m3fn"}  # dtypes that have one scale per slot
pytree_node(Encoded)  # `pallas_kernels` depends on JAX alone


@static_value
@dataclass(frozen=True)
class Form:
    """Encoding of the rows of a payload.

    Args:
      bits: 8, 4, 3, 2 or "float8".
      group, axis: groups of values of 4 bits or fewer, as in `pallas_kernels.quantise_groups`.
      recent: R, the number of new rows that are kept as they came until whole groups of slots can
        be encoded; 0: every row is encoded by itself when it comes.
      hadamard: apply `pallas_kernels.hadamard_transform` to rows before they are encoded.
      relative: encode (and transform) rows relative to the `Channels` of their head; only if
        `recent` is 0.
    """

    bits: Bits
    group: int = 1
    axis: Axis = "token"
    recent: int = 0
    hadamard: bool = False
    relative: bool = False

    in_groups = property(lambda self: self.bits in IN_GROUPS)
    # Number of slots that are encoded together.
    together = property(lambda self: self.group if self.recent else 1)

    def encode(self, rows: Float[Array, "B H S D"], channels: Channels | None = None) -> Encoded:
        """Encodes dense rows."""
        x = self.basis(rows if channels is None else channels.inside(rows))
        if self.in_groups:  # scales of groups get the dtype of the rows
            x = x.astype(rows.dtype)
            return Encoded(*quantise_groups(x, self.group, self.axis, self.bits))  # pyright: ignore[reportArgumentType]  # not 8, as they are `in_groups`
        return Encoded(*quantise_slots(x, jnp.dtype(EIGHT_BITS[self.bits])))

    def decode(self, encoded: Encoded, channels: Channels | None = None) -> Float[Array, "B K N D"]:
        """Decodes rows to float32."""
        rows = self.basis(self.dequantise(encoded))
        return rows if channels is None else channels.outside(rows)

    def basis(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Brings rows or queries into the basis in which rows are encoded, or back from there."""
        return hadamard_transform(x) if self.hadamard else x

    def dequantise(self, encoded: Encoded) -> Float[Array, "B H S D"]:
        """Decodes rows to float32, in the basis in which they are encoded."""
        if self.in_groups:
            return dequantise_groups(*encoded, self.axis)
        return dequantise_slots(encoded.values, encoded.scale)

    def empty(self, shape: tuple[int, int, int, int], dtype: DTypeLike) -> Quantized:
        """Makes a payload of zeros."""
        batch, lists, slots, head_dim = shape
        body = batch, lists, -(-slots // self.together) * self.together, head_dim
        # Only shapes are evaluated: in a compiled prompt pass XLA would encode the zeros at compile
        # time, row by row.
        shapes = jax.eval_shape(lambda: self.encode(jnp.zeros(body, dtype)))
        encoded = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        recent = Recent.empty(shape, dtype, self.recent) if self.recent else None
        channels = Channels.neutral(batch, lists, head_dim) if self.relative else None
        return Quantized(encoded, recent, channels, self, slots, jnp.dtype(dtype))


@pytree_node
@dataclass(frozen=True)
class Quantized(EncodedPayload):
    """Rows of 8 bits, or of 4, 3 or 2 bits in groups of channels or of slots.

    A slot takes D + 4 bytes with 8 bits, and D / 2 + 2 · D / group · itemsize with 4. Numbers of 3
    and 2 bits take 4 bits each, and at rest 3 and 2. Groups of slots are counted from slot 0; the
    last group of a (row, KV head) is kept unencoded until it is complete. Encoded rows stay exactly
    as they are, also when they move to another slot, unless their slot is merged. In a group of
    slots, that holds while all of the group stay together.

    Args:
      encoded: encoded rows, `[B, H, S, ...]`; S is rounded up to whole groups of slots.
      recent: new rows that are not encoded yet; None where every row is encoded by itself.
      channels: means and scales of each (row, KV head), from the earliest prompt of which anything
        remains. None: rows are encoded as they are.
      form: encoding of the rows (static).
      slots: S (static).
      dtype: dtype of dense rows (static).
    """

    operation: ClassVar[str] = "quantized_attention"

    encoded: Encoded
    recent: Recent | None  # pyright: ignore[reportIncompatibleMethodOverride]  # a field
    channels: Channels | None
    form: Form = field(metadata={"static": True})
    slots: int = field(metadata={"static": True})
    dtype: jnp.dtype = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the dense rows, `(B, H, S, D)`."""
        batch, heads, _, channels = self.encoded.values.shape
        if self.form.in_groups:
            channels = self.encoded.scale.shape[3]
            channels *= self.form.group if self.form.axis == "token" else 1
        return batch, heads, self.slots, channels

    @property
    def at_rest(self) -> Quantized:
        """The payload with 3 or 2 bits packed densely."""
        return self._repacked(narrowed)

    @property
    def awake(self) -> Quantized:
        """The payload that was at rest."""
        return self._repacked(widened)

    def _repacked(self, repack: Callable[[Array, Any], Array]) -> Quantized:
        bits = self.form.bits
        if bits not in (3, 2):
            return self
        values = repack(self.encoded.values, bits)
        return dataclasses.replace(self, encoded=self.encoded._replace(values=values))

    def read(self, index: Int[Array, "B K N"] | None = None) -> Float[Array, "B K N D"]:
        """Decodes rows: all slots, or those of `index`."""
        if index is None:
            rows = self.form.decode(self.encoded, self.channels)[:, :, : self.slots]
        else:
            rows = self.form.decode(self._at(index), self.channels)
        rows = rows.astype(self.dtype)
        return rows if self.recent is None else self.recent.over(rows, index)

    def _selected(self, index: Int[Array, "B K N"]) -> Float[Array, "B K N D"]:
        rows = self.form.dequantise(self._at(index)).astype(self.dtype)
        if self.recent is None:
            return rows
        recent_rows = self.form.basis(self.recent.rows).astype(self.dtype)
        return dataclasses.replace(self.recent, rows=recent_rows).over(rows, index)

    def _basis(self, x: Float[Array, "B K *G D"]) -> Float[Array, "B K *G D"]:
        return self.form.basis(x if self.channels is None else self.channels.of_queries(x))

    def _offset(self, q: Float[Array, "B K *G D"]) -> Float[Array, "B K *G"] | None:
        return None if self.channels is None else self.channels.at_mean(q)

    def _at(self, index: Int[Array, "B K N"]) -> Encoded:
        """Takes the encoded rows of slots `index`, each with the scales of its group."""
        size = self.encoded.values.shape[2]
        return jax.tree.map(lambda x: take_slots(x, index // (size // x.shape[2])), self.encoded)

    def write(self, slots: Int[Array, "B H T"] | None, rows: Float[Array, "B H T D"]) -> Quantized:
        """Writes a few slots (slot number S writes nothing); None: all slots whose rows differ."""
        rows = rows.astype(self.dtype)
        if slots is None:
            return self._fill(rows)
        if self.recent is not None:
            return dataclasses.replace(self, recent=self.recent.add(slots, rows))
        return self._each(lambda x, new: write_slots(x, slots, new), self._encoded(rows))

    def flush(self, steps: int, moves: Moves | None = None) -> Quantized:
        """Moves rows among slots, then encodes whole groups of new rows if room is needed.

        Where slots are encoded together, only new rows can move.
        """
        if self.recent is None:
            if moves is None:
                return self
            source, slots = moves
            return self._each(lambda x: write_slots(x, slots, take_slots(x, source)))
        recent = self.recent if moves is None else self.recent.moved(moves)
        if not steps:
            return dataclasses.replace(self, recent=recent)
        recent = recent.by_slot()
        # Recent slots are consecutive and begin with a group: a group is complete if the last of
        # its places is taken.
        group = self.form.together
        complete = recent.there[:, :, group - 1 :: group] & recent.due(steps)[:, None, None]
        most = complete.shape[2] * group
        new_groups = self._encoded(recent.rows[:, :, :most])
        number = recent.slots[:, :, :most:group] // group
        number = jnp.where(complete, number, self._grouped(self.encoded.values).shape[2])

        def put(body: Array, new: Array) -> Array:
            new = new.reshape(*number.shape, -1, *new.shape[3:])
            return write_slots(self._grouped(body), number, new).reshape(body.shape)

        encoded = complete.sum(2, dtype=jnp.int32) * group
        recent = recent.without_first(encoded)
        return dataclasses.replace(self._each(put, new_groups), recent=recent)

    def encode(
        self, values: Quantized, k: Array, v: Array, slots: Slots
    ) -> tuple[Quantized, Quantized]:
        """Encodes keys and values in the forms of this payload and of `values`, in `slots.rows`."""
        return self._encode_all(k, slots), values._encode_all(v, slots)

    def free_bytes(self, live: int) -> int:
        """Returns the bytes of free slots, those that fill the last group too, and waiting rows.

        Numbers of 3 and 2 bits leave bits free while the payload is awake.
        """
        slots = math.prod(self.encoded.values.shape[:3])
        waiting = 0 if self.recent is None else self.recent.free_bytes
        unused = 0
        if self.form.in_groups:
            bits = 8 * self.encoded.values.shape[3]
            unused = live * (bits - self.form.bits * self.shape[3]) // 8  # pyright: ignore[reportOperatorIssue]  # a number, as they are `in_groups`
        return free_bytes(self.encoded, live, slots) + unused + waiting

    def resized(self, slots: int, beside: int) -> Quantized:
        """Cuts or adds free slots at the end, in whole groups, and free places of recent rows."""
        recent = None if self.recent is None else self.recent.resized(slots, beside)
        return dataclasses.replace(self.map_slots(to_places, slots), recent=recent, slots=slots)

    def map_slots(self, change: OfPlaces, slots: int) -> Quantized:
        """Applies `change` to the encoded rows, in whole groups, and to their scales."""
        groups = -(-slots // self.form.together)
        # Scales of groups are fewer than slots.
        group = jax.ShapeDtypeStruct((1, 1, self.form.together, self.shape[3]), self.dtype)
        of_group = jax.eval_shape(self.form.encode, group)
        return self._each(
            lambda x, like: change(x, self.form.together // like.shape[2], groups * like.shape[2]),
            of_group,
        )

    def _encode_all(self, rows: Float[Array, "B H S D"], slots: Slots) -> Quantized:
        """Encodes all rows at a prompt's end; rows that were encoded before stay as they are."""
        kept = self._unchanged(rows, slots)
        if self.recent is not None:  # recent rows have no encoded form that could stay
            kept = jnp.where(self.recent.places(kept) < 0, kept, -1)
        payload = self
        if self.channels is not None:
            # Means and scales change only where nothing remains that was encoded with them.
            in_use = (kept >= 0).any(2)
            channels = Channels.of(rows, slots.live, slots.rope)
            payload = dataclasses.replace(self, channels=of_rows(in_use, self.channels, channels))
        # A group stays as encoded if its slots were a group before, in the same order.
        source = self._grouped(self._pad_to_groups(kept))
        first, group = source[..., 0], self.form.together
        place = jax.lax.broadcasted_iota(jnp.int32, source.shape, 3)
        stays = (source == first[..., None] + place).all(-1) & (first >= 0) & (first % group == 0)

        def choose(old: Array, new: Array) -> Array:
            old = take_slots(self._grouped(old), jnp.maximum(first, 0) // group)
            return of_rows(stays, old, self._grouped(new)).reshape(new.shape)

        payload = payload._each(choose, payload._encoded(self._pad_to_groups(rows)))
        if self.recent is not None:
            # The tokens behind the last complete group become recent rows.
            count, group = slots.live.sum(-1, keepdims=True, dtype=jnp.int32), self.form.together
            place = jnp.arange(group - 1, dtype=jnp.int32)[None, None]
            last = count // group * group + place
            empty = Recent.empty(self.shape, self.dtype, self.recent.size)
            last_rows = take_slots(rows, jnp.minimum(last, self.slots - 1))
            empty = dataclasses.replace(empty, heads=self.recent.heads)
            recent = empty.add(jnp.where(last < count, last, self.slots), last_rows)
            payload = dataclasses.replace(payload, recent=recent)
        return of_rows(slots.rows, payload, self)

    def _fill(self, rows: Float[Array, "B H S D"]) -> Quantized:
        """Writes all rows; groups in which none has changed stay exactly as they are."""
        same = self._pad_to_groups(equal_rows(rows, self.read(), self.dtype))
        same = same.reshape(*same.shape[:2], -1, self.form.together).all(-1)

        def choose(old: Array, new: Array) -> Array:
            return of_rows(same, self._grouped(old), self._grouped(new)).reshape(new.shape)

        filled = self._each(choose, self._encoded(self._pad_to_groups(rows)))
        if self.recent is None:
            return filled
        recent = dataclasses.replace(self.recent, rows=self.recent.of_slots(rows))
        return dataclasses.replace(filled, recent=recent)

    def _encoded(self, rows: Float[Array, "B H N D"]) -> Encoded:
        """Encodes rows with this payload's form and channels."""
        return self.form.encode(rows, self.channels)

    def _each(self, change: Callable[..., Array], *arguments: Encoded) -> Quantized:
        """Applies `change` to each array of `encoded`, with the same arrays of `arguments`."""
        return dataclasses.replace(self, encoded=jax.tree.map(change, self.encoded, *arguments))

    def _grouped(self, x: Array) -> Array:
        """Splits the slots in an array of `Encoded` into groups that belong together."""
        groups = self.encoded.values.shape[2] // self.form.together
        return x.reshape(*x.shape[:2], groups, -1, *x.shape[3:])

    def _pad_to_groups(self, x: Array) -> Array:
        """Pads the last group by repeating the last slot."""
        padding = self.encoded.values.shape[2] - self.slots
        return jnp.pad(x, [(0, padding * (n == 2)) for n in range(x.ndim)], mode="edge")

    def _rows(self) -> Rows:
        return quantized_rows(self.encoded, self.dtype, self.form.axis)

    def _logits(self, q: Float[Array, "B H R D"], turn: Turn | None) -> Float[Array, "B H R S"]:
        product = None if turn is None else turn.at(self._pad_to_groups(turn.position)).product
        logits = quantized_logits(q, *self.encoded, axis=self.form.axis, product=product)
        return logits[..., : self.slots]

    def _mix(
        self, weights: Float[Array, "B H R S"], live: Bool[Array, "B H S"]
    ) -> Float[Array, "B H R D"]:
        padding = self.encoded.values.shape[2] - self.slots
        weights = jnp.pad(weights, ((0, 0), (0, 0), (0, 0), (0, padding)))
        live = jnp.pad(live, ((0, 0), (0, 0), (0, padding)))
        return quantized_mix(weights, *self.encoded, axis=self.form.axis, live=live)
