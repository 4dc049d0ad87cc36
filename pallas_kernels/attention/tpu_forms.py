"""Readers of stored forms in the TPU kernel: tiles of keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.attention.forms import DenseReader, EightBitReader, FourBitReader, Rows
from pallas_kernels.formats.bits import Axis

LANES, SUBLANES = 128, 8  # sizes of a register, and of the pieces that arrays are stored in
DTYPES = (jnp.bfloat16, jnp.float32)  # dtypes that a matrix unit multiplies


class Stored(NamedTuple):
    """A stored array with the layout of its slots.

    Args:
      array: `[B, H, X, Y]`.
      axis: axis of the slots, 2 or 3.
      group: slots that share an entry of that axis.
    """

    array: Array | jax.ShapeDtypeStruct
    axis: int
    group: int = 1


@dataclass(frozen=True)
class DenseTiles:
    """Reads dense rows, which are stored as numbers.

    Args:
      dtype: dtype of the queries that are multiplied with them.
    """

    dtype: jnp.dtype

    def products(
        self, at: dict, q: Float[Array, "R D"], visible: Bool[Array, "1 N"]
    ) -> Float[Array, "R N"]:
        """Multiplies queries with the keys of a tile; undefined for slots that no query sees."""
        return times(q, at["data"][...], 1)

    def mix(
        self, at: dict, weights: Float[Array, "R N"], visible: Bool[Array, "1 N"]
    ) -> Float[Array, "R D"]:
        """Sums the values of a tile by weights; values of slots that no query sees count as 0."""
        tile = at["data"][...]
        tile = jnp.where(visible.T, tile, jnp.zeros((), tile.dtype))
        return times(weights.astype(tile.dtype), tile, 0)


@dataclass(frozen=True)
class EightBitTiles:
    """Reads 8-bit integers with a scale per slot; they are multiplied without decoding.

    Args:
      dtype: dtype of the queries that are multiplied with them.
    """

    dtype: jnp.dtype

    def products(self, at: dict, q: Array, visible: Array) -> Float[Array, "R N"]:
        """Multiplies queries with the keys of a tile."""
        return times(q, at["values"][...].astype(self.dtype), 1) * at["scale"][...]

    def mix(self, at: dict, weights: Float[Array, "R N"], visible: Array) -> Float[Array, "R D"]:
        """Sums the values of a tile by weights."""
        weights = jnp.where(visible, weights * at["scale"][...], 0.0)
        return times(weights.astype(self.dtype), at["values"][...].astype(self.dtype), 0)


@dataclass(frozen=True)
class FourBitTiles:
    """Reads 4-bit numbers, two in a byte, with scale and low per group of channels.

    Numbers are multiplied without decoding, group by group, so that scales and lows apply to slots.

    Args:
      dtype: dtype of the queries that are multiplied with them.
      group: channels of a group.
    """

    dtype: jnp.dtype
    group: int

    def products(self, at: dict, q: Array, visible: Array) -> Float[Array, "R N"]:
        """Multiplies queries with the keys of a tile."""
        total = 0.0
        for number, in_group, numbers, channels in self._groups(at):
            q_group = jnp.where(in_group, q[:, channels], jnp.zeros((), q.dtype))
            scale, low = (_of_group(at[name], number) for name in ("scale", "low"))
            total += times(q_group, numbers, 1) * scale
            total += q_group.astype(jnp.float32).sum(1, keepdims=True) * low
        return total  # pyright: ignore[reportReturnType]  # there is at least one group

    def mix(self, at: dict, weights: Float[Array, "R N"], visible: Array) -> Float[Array, "R D"]:
        """Sums the values of a tile by weights."""
        halves = [jnp.zeros((), jnp.float32)] * 2
        for number, in_group, numbers, channels in self._groups(at):
            scale, low = (
                jnp.where(visible, weights * _of_group(at[name], number), 0.0)
                for name in ("scale", "low")
            )
            sums = times(scale.astype(self.dtype), numbers, 0) + low.sum(1, keepdims=True)
            halves[1 if channels.start else 0] += jnp.where(in_group, sums, 0.0)
        return jnp.concatenate(halves, axis=1)

    def _groups(self, at: dict) -> Iterator[tuple[int, Array, Array, slice]]:
        """Yields each group's number, its channels in a half, the half's numbers and channels."""
        for half, numbers in enumerate(_halves(at["values"])):
            width = numbers.shape[1]
            begin, stop = half * width, (half + 1) * width
            channel = begin + jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)
            numbers = numbers.astype(self.dtype)
            for number in range(begin // self.group, -(-stop // self.group)):
                first = number * self.group
                in_group = (channel >= first) & (channel < first + self.group)
                yield number, in_group, numbers, slice(begin, stop)


@dataclass(frozen=True)
class FourBitColumns:
    """Reads and decodes 4-bit numbers with slots in the lanes.

    XLA stores bytes that do not fill the lanes in this layout as long as none is written, as for
    keys that are encoded in groups of slots.

    Args:
      dtype: dtype of decoded numbers.
      group: values of a group.
      axis: axis that groups run along.
    """

    dtype: jnp.dtype
    group: int
    axis: Axis

    def products(self, at: dict, q: Array, visible: Array) -> Float[Array, "R N"]:
        """Multiplies queries with the keys of a tile."""
        low, high = self._decoded(at, visible)
        half = low.shape[0]
        return times(q[:, :half], low, 0) + times(q[:, half:], high, 0)

    def mix(self, at: dict, weights: Float[Array, "R N"], visible: Array) -> Float[Array, "R D"]:
        """Sums the values of a tile by weights."""
        weights = weights.astype(self.dtype)
        return jnp.concatenate([times(weights, x, 1) for x in self._decoded(at, visible)], axis=1)

    def _decoded(self, at: dict, visible: Array) -> list[Float[Array, "D/2 N"]]:
        """Decodes both halves of the channels; 0 for slots that no query sees."""
        scale, low = (self._of_numbers(at[name][...], visible) for name in ("scale", "low"))
        half = scale.shape[0] // 2
        parts = zip(_halves(at["values"]), (slice(half), slice(half, None)), strict=True)
        return [
            jnp.where(visible, low[rows] + x * scale[rows], 0.0).astype(self.dtype)
            for x, rows in parts
        ]

    def _of_numbers(self, x: Array, visible: Array) -> Float[Array, "D N"]:
        """Returns the scale or low of each number, in float32."""
        if self.axis == "token":
            groups, slots = x.shape
            repeated = jnp.broadcast_to(x.astype(jnp.float32)[:, None], (groups, self.group, slots))
            return repeated.reshape(-1, slots)
        # A product with ones and zeros, which is exact, is the only way to repeat lanes.
        shape = x.shape[0], visible.shape[1]
        group = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        slot = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        in_group = jax.lax.div(slot, jnp.full_like(slot, self.group)) == group
        any_visible = jnp.where(in_group & visible, 1.0, 0.0).max(1, keepdims=True) > 0
        x = jnp.where(any_visible, x, jnp.zeros((), x.dtype))
        return times(x.T, in_group.astype(x.dtype), 0)


def _halves(values) -> tuple[Float[Array, "X Y"], Float[Array, "X Y"]]:
    """Returns the numbers in the low bits of bytes, and those in the high bits."""
    both = values[...].astype(jnp.int32)
    return (both & 15).astype(jnp.float32), (both >> 4).astype(jnp.float32)


def _of_group(ref, number: int) -> Float[Array, "1 N"]:
    return ref[...].astype(jnp.float32)[number : number + 1]


class TPURows(NamedTuple):
    """Keys or values of all slots in one stored form, with the reader that decodes them."""

    reader: DenseTiles | EightBitTiles | FourBitTiles | FourBitColumns
    arrays: dict[str, Stored]

    @property
    def slots(self) -> int:
        """Number of stored slots."""
        array, axis, group = next(iter(self.arrays.values()))
        return array.shape[axis] * group


def tpu_rows(k: Rows, v: Rows) -> tuple[TPURows, TPURows] | None:
    """Returns keys and values as the TPU kernel reads them; None if it cannot read them."""
    columns = isinstance(k.reader, FourBitReader) and k.reader.axis == "channel"
    keys, values = _tpu_rows(k, columns), _tpu_rows(v, columns)
    return None if keys is None or values is None else (keys, values)


def _tpu_rows(rows: Rows, columns: bool) -> TPURows | None:
    reader, arrays = rows
    dtype = reader.dtype
    if dtype not in DTYPES:
        return None
    if isinstance(reader, DenseReader):
        return TPURows(DenseTiles(dtype), {"data": Stored(arrays["data"], 2)})
    if isinstance(reader, EightBitReader) and arrays["values"].dtype == jnp.int8:
        values, scale = Stored(arrays["values"], 2), Stored(arrays["scale"][:, :, None], 3)
        return TPURows(EightBitTiles(dtype), {"values": values, "scale": scale})
    if isinstance(reader, FourBitReader):
        stored = {name: Stored(x.swapaxes(2, 3), 3) for name, x in arrays.items()}
        if not columns:
            stored["values"] = Stored(arrays["values"], 2)
            return TPURows(FourBitTiles(dtype, reader.group), stored)
        if reader.axis == "channel":
            stored |= {name: Stored(arrays[name], 2, reader.group) for name in ("scale", "low")}
        return TPURows(FourBitColumns(dtype, reader.group, reader.axis), stored)
    return None


def reads(k: Rows, v: Rows) -> bool:
    """Returns whether the TPU kernel reads these keys and values where XLA stores them."""
    rows = tpu_rows(k, v)
    return rows is not None and all(_in_place(stored) for stored in rows)


def _in_place(rows: TPURows) -> bool:
    # The first array holds the numbers, which are most of the bytes.
    array, axis, _ = next(iter(rows.arrays.values()))
    return in_rows(array) if axis == 2 else array.shape[2] % LANES != 0


def in_rows(array: Float[Array, "B H S D"] | jax.ShapeDtypeStruct) -> bool:
    """Returns whether XLA by default stores 8 slots of a head in a piece, as a kernel reads them.

    XLA stores 8 heads of a slot in a piece where that fills the pieces better. A kernel would then
    have the array copied at every step.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.attention.tpu_forms import in_rows
      >>> [in_rows(jnp.zeros((1, heads, 7065, 128))) for heads in (2, 8)]
      [True, False]
    """
    heads, slots = array.shape[1:3]
    by_slots, by_heads = (-(-n // SUBLANES) * SUBLANES / n for n in (slots, heads))
    return by_slots <= by_heads


def times(a: Float[Array, "R X"], b: Array, axis: int) -> Float[Array, "R Y"]:
    """Multiplies along the last axis of a and an axis of b; sums are float32."""
    # Without the precision, a TPU would round float32 to bfloat16.
    precision = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
