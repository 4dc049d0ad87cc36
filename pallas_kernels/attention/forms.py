"""Stored forms of keys and values, and how a kernel reads tiles of their rows.

A form consists of its arrays, `[B, H or 1, ...]`, and of a reader. The reader is static. Inside a
kernel it gets references to the arrays of one row and head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.base import route
from pallas_kernels.base.kernel_parts import zero
from pallas_kernels.base.tiles import SMALLEST, power_of_two
from pallas_kernels.formats.bits import Axis, Encoded
from pallas_kernels.formats.codebook import References

# The exponent biases of float16 and float8 differ by 8, so bits of float8 that are read as float16
# give a number that is too small by this factor.
FLOAT8_SHIFT = 2.0**8


class Part(NamedTuple):
    """Channels that a kernel holds as one array: `count` of them, `first`, `first + stride`, ..."""

    first: int
    count: int
    stride: int = 1

    @property
    def width(self) -> int:
        """Length of the array: a power of two, and at least what a matrix unit takes."""
        return max(SMALLEST, power_of_two(self.count))

    @property
    def last(self) -> int:
        """Last channel."""
        return self.first + self.stride * (self.count - 1)

    @property
    def numbers(self) -> Int[Array, " W"]:
        """Numbers of the channels."""
        return self.first + self.stride * jnp.arange(self.width, dtype=jnp.int32)

    @property
    def there(self) -> Bool[Array, " W"]:
        """Mask of the entries that are channels; the others are padding."""
        return jnp.arange(self.width, dtype=jnp.int32) < self.count


def split(first: int, count: int, grain: int, stride: int = 1) -> list[Part]:
    """Cuts `count` channels into parts of `grain`; the last part has the rest."""
    return [
        Part(first + stride * at, min(grain, count - at), stride) for at in range(0, count, grain)
    ]


@dataclass(frozen=True)
class Reader:
    """Reads tiles of rows in a kernel.

    Args:
      channels: D.
      grain: most channels of a part; parts of this size split no group of channels.
      row_bytes: bytes of a row in a tile.
      dtype: dtype of rows once they are read.
    """

    channels: int
    grain: int
    row_bytes: int
    dtype: jnp.dtype

    def address(self, at: dict, slot: Int[Array, " N"], there: Bool[Array, " N"]) -> Array | None:
        """Loads the array rows that hold these slots, a tile ahead; None: the slots themselves."""
        return None

    def load(self, at: dict, part: Part, row: Int[Array, " N"], wanted: Array) -> Array:
        """Loads a part of the channels of rows at these addresses; 0 where not wanted."""
        raise NotImplementedError

    def factor(self, at: dict, slot: Array, row: Array, wanted: Array) -> Array | None:
        """Returns what loaded rows must still be multiplied by; None: nothing."""
        return None


class Rows(NamedTuple):
    """Keys or values of all slots in one stored form, with the reader that decodes them."""

    reader: Reader
    arrays: dict[str, Array]


# --- dense ----------------------------------------------------------------------------------------


class DenseReader(Reader):
    """Reads dense rows, which are stored as numbers."""

    def load(self, at, part, row, wanted):
        """Loads channels of a part."""
        return _load(at["data"], row, part.numbers, wanted[:, None] & part.there[None, :])


def dense_rows(data: Float[Array, "B H N D"]) -> Rows:
    """Returns dense rows with their reader."""
    channels = data.shape[3]
    reader = DenseReader(channels, channels, channels * data.dtype.itemsize, data.dtype)
    return Rows(reader, {"data": data})


# --- quantised ------------------------------------------------------------------------------------


class EightBitReader(Reader):
    """Reads 8-bit numbers, int8 or the bytes of float8, with a scale per slot."""

    def load(self, at, part, row, wanted):
        """Loads channels of a part, unscaled; a matrix unit's dtype holds them exactly."""
        mask = wanted[:, None] & part.there[None, :]
        numbers = _load(at["values"], row, part.numbers, mask)
        if numbers.dtype != jnp.uint8:
            return numbers.astype(self.dtype)
        bits = numbers.astype(jnp.uint16)
        bits = ((bits & np.uint16(0x80)) << np.uint16(8)) | (
            (bits & np.uint16(0x7F)) << np.uint16(7)
        )
        return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(self.dtype)

    def factor(self, at, slot, row, wanted):
        """Returns the slots' scales."""
        scale = route.load(at["scale"].at[row], mask=wanted, other=np.float32(0))
        return scale * FLOAT8_SHIFT if at["values"].dtype == jnp.uint8 else scale


@dataclass(frozen=True)
class FourBitReader(Reader):
    """Reads 4-bit numbers, two in a byte, with scale and low per group."""

    group: int
    axis: Axis

    def load(self, at, part, row, wanted):
        """Loads and decodes channels of a part."""
        mask = wanted[:, None] & part.there[None, :]
        half = self.channels // 2
        if part.first // half == part.last // half:
            # All numbers have the same shift, and finding their columns takes no division.
            column = part._replace(first=part.first % half).numbers
            shift = np.uint8(4 * (part.first // half))
        else:
            column = jax.lax.rem(part.numbers, jnp.full_like(part.numbers, half))
            shift = jnp.where(part.numbers < half, 0, 4).astype(jnp.uint8)[None, :]
        numbers = (_load(at["values"], row, column, mask) >> shift) & np.uint8(15)
        scale, low = (self._of_group(at[name], part, row, wanted) for name in ("scale", "low"))
        return (low + numbers.astype(jnp.float32) * scale).astype(self.dtype)

    def _of_group(self, ref, part: Part, row: Array, wanted: Array) -> Array:
        """Loads the scale or low of each number, `[N, 1]` or `[N, W]`."""
        first, last = (x // self.group for x in (part.first, part.last))
        if self.axis == "token" and first == last:
            cell = ref.at[row, first]
            return route.load(cell, mask=wanted, other=zero(ref.dtype)).astype(jnp.float32)[:, None]
        column = part.numbers
        if self.axis == "token":
            column = jax.lax.div(column, jnp.full_like(column, self.group))
        else:
            row = jax.lax.div(row, jnp.full_like(row, self.group))
        mask = wanted[:, None] & part.there[None, :]
        return _load(ref, row, column, mask).astype(jnp.float32)


def quantized_rows(encoded: Encoded, dtype: DTypeLike, axis: Axis = "token") -> Rows:
    """Returns 8-bit or 4-bit rows with a reader that decodes them to `dtype`."""
    values, scale, low = encoded
    bytes_of_row = values.shape[3]
    arrays = {"values": values, "scale": scale}
    if low is None:
        reader = EightBitReader(bytes_of_row, bytes_of_row, bytes_of_row, jnp.dtype(dtype))
        return Rows(reader, arrays)
    channels, row_bytes = 2 * bytes_of_row, bytes_of_row
    if axis == "token":
        group = grain = channels // scale.shape[3]
    else:
        group, grain = values.shape[2] // scale.shape[2], bytes_of_row
        row_bytes *= scale.dtype.itemsize  # scale and low of every number are loaded beside it
    reader = FourBitReader(channels, grain, row_bytes, jnp.dtype(dtype), group, axis)
    return Rows(reader, {**arrays, "low": low})


# --- codebook -------------------------------------------------------------------------------------


class CodebookReader(Reader):
    """Reads references to entries that all heads of a row share, and magnitudes of slots."""

    def address(self, at, slot, there):
        """Loads the entries of slots."""
        entry = route.load(at["index"].at[slot], mask=there, other=zero(at["index"].dtype))
        return entry.astype(jnp.int32)

    def load(self, at, part, row, wanted):
        """Loads channels of a part of the entries."""
        return _load(at["entries"], row, part.numbers, wanted[:, None] & part.there[None, :])

    def factor(self, at, slot, row, wanted):
        """Loads the slots' magnitudes."""
        if "magnitude" not in at:
            return None
        ref = at["magnitude"]
        magnitude = route.load(ref.at[slot], mask=wanted, other=zero(ref.dtype))
        return magnitude.astype(jnp.float32)


def codebook_rows(references: References) -> Rows:
    """Returns the rows `entries[index] · magnitude`, with their reader."""
    entries, index, magnitude = references
    channels, size = entries.shape[3], entries.dtype.itemsize
    arrays = {"entries": entries, "index": index}
    if magnitude is not None:
        arrays["magnitude"] = magnitude
    return Rows(CodebookReader(channels, channels, channels * size, entries.dtype), arrays)


def _load(ref, row: Array, column: Array, mask: Array) -> Array:
    return route.load(ref.at[row[:, None], column[None, :]], mask=mask, other=zero(ref.dtype))
