"""Stored forms of keys and values, and how a kernel reads tiles of their rows.

A form consists of its arrays, `[B, H or 1, ...]`, and of a reader. The reader is static. Inside a
kernel it gets references to the arrays of one row and head.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention import words
from pallas_kernels.base import route
from pallas_kernels.base.kernel_parts import leading_bits, zero
from pallas_kernels.base.logits import or_one
from pallas_kernels.base.tiles import SMALLEST, power_of_two
from pallas_kernels.formats.bits import Axis, Encoded
from pallas_kernels.formats.codebook import References

# The exponent biases of float16 and float8 differ by 8, so bits of float8 that are read as float16
# give a number that is too small by this factor.
FLOAT8_SHIFT = 2.0**8
LIMB = 254  # a limb's unit over that of the next
MOST_WHOLE = 512  # channels whose products with limbs are within 31 bits


class Part(NamedTuple):
    """Channels that a kernel holds as one array: `count` of them, `first`, `first + stride`, ..."""

    first: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]  # a field, no method of tuples
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

    def of_keys(self, interpret: bool) -> Reader:
        """Returns the reader of keys that are not rotated, in a kernel of this kind."""
        return self

    def of_values(self, interpret: bool) -> Reader:
        """Returns the reader of values, in a kernel that is interpreted or compiled."""
        return self

    @property
    def reads_free(self) -> bool:
        """Whether rows of free slots may be read, since they hold nothing but numbers."""
        return False

    def view(self, arrays: dict[str, Array]) -> dict[str, Array]:
        """Returns the arrays as a kernel reads them: the same bytes, maybe in other numbers."""
        return arrays

    @property
    def weights(self) -> jnp.dtype:
        """Dtype of the weights that values are multiplied with."""
        return self.dtype

    @property
    def parts(self) -> list[Part]:
        """Parts of all channels."""
        return split(0, self.channels, self.grain)

    @property
    def limbs(self) -> int:
        """Number of the limbs that `cut` cuts a query into."""
        return 1

    def cut(self, q: Float[Array, "B K R D"]) -> tuple[Array, Float[Array, "B K R"] | None]:
        """Cuts queries into limbs `[B, K, R, L, D]` that rows are multiplied with.

        Returns:
          The limbs and the scale of each query; None: it is 1.
        """
        return q.astype(self.dtype)[:, :, :, None], None

    def joined(self, products: list[Array]) -> Float[Array, "R N"]:
        """Returns the products of queries with rows from those of their limbs."""
        return functools.reduce(operator.add, products)

    def address(self, at: dict, slot: Int[Array, " N"], there: Bool[Array, " N"]) -> Array | None:
        """Loads the array rows that hold these slots, a tile ahead; None: the slots themselves."""
        return None

    def rows(
        self, at: dict, parts: list[Part], row: Int[Array, " N"], wanted: Array | None
    ) -> list[Array]:
        """Loads several parts: those of `parts`, or with rotated keys some of them."""
        return [self.load(at, part, row, wanted) for part in parts]

    def load(self, at: dict, part: Part, row: Int[Array, " N"], wanted: Array | None) -> Array:
        """Loads a part of the channels of rows at these addresses; 0 where not wanted.

        If `wanted` is None, all are.
        """
        raise NotImplementedError

    def factor(self, at: dict, slot: Array, row: Array, wanted: Array | None) -> Array | None:
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
        return _load(at["data"], row, part, wanted)


def dense_rows(data: Float[Array, "B H N D"]) -> Rows:
    """Returns dense rows with their reader."""
    channels = data.shape[3]
    reader = DenseReader(channels, channels, channels * data.dtype.itemsize, data.dtype)
    return Rows(reader, {"data": data})


# --- quantised ------------------------------------------------------------------------------------


class EightBitReader(Reader):
    """Reads int8 with a scale per slot; a matrix unit's dtype holds the numbers exactly."""

    @property
    def reads_free(self):
        """Every byte is a number."""
        return True

    def of_keys(self, interpret) -> Reader:
        """Returns the reader of keys that are not rotated."""
        return self if self.channels > MOST_WHOLE else WholeKeys(**vars(self))

    def of_values(self, interpret):
        """Returns the reader of values."""
        return self._paired("int8", interpret)

    def load(self, at, part, row, wanted):
        """Loads channels of a part, unscaled."""
        return _load(at["values"], row, part, wanted).astype(self.dtype)

    def factor(self, at, slot, row, wanted):
        """Returns the slots' scales."""
        return route.load(at["scale"].at[row], mask=wanted, other=_other(jnp.float32, wanted))

    def _paired(self, form: Literal["int8", "float8"], interpret: bool) -> Reader:
        if self.channels % 2:
            return self
        return PairedReader(**vars(self), form=form, interpret=interpret)


class Float8Reader(EightBitReader):
    """Reads the bytes of float8, with a scale per slot."""

    def of_keys(self, interpret):
        """Returns the reader of keys that are not rotated."""
        return self._paired("float8", interpret)

    def of_values(self, interpret):
        """Returns the reader of values."""
        return self._paired("float8", interpret)

    def load(self, at, part, row, wanted):
        """Loads channels of a part, unscaled and over `FLOAT8_SHIFT`."""
        bits = _load(at["values"], row, part, wanted).astype(jnp.uint16)
        sign, rest = (bits & np.uint16(x) for x in (0x80, 0x7F))
        bits = (sign << np.uint16(8)) | (rest << np.uint16(7))
        return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(self.dtype)

    def factor(self, at, slot, row, wanted):
        """Returns the slots' scales times `FLOAT8_SHIFT`."""
        return super().factor(at, slot, row, wanted) * FLOAT8_SHIFT


class WholeKeys(EightBitReader):
    """Reads keys that are whole numbers, which matrix units multiply as they are.

    A query becomes three such numbers for each channel: `q = scale · (a + b / 254 + c / 254²)`. The
    scale is its greatest number over 127, and a is rounded. b and c are what the ones before leave,
    within 127, too. All three hold 23 bits.
    """

    @property
    def limbs(self):
        """Three limbs."""
        return 3

    def cut(self, q):
        """Cuts queries into whole numbers."""
        q = q.astype(jnp.float32)
        scale = jnp.abs(q).max(-1) / 127
        rest, limbs = q / or_one(scale)[..., None], []
        for _ in range(self.limbs):
            limbs.append(jnp.round(rest))
            rest = (rest - limbs[-1]) * LIMB
        return jnp.stack(limbs, axis=3).astype(jnp.int8), scale / LIMB

    def joined(self, products):
        """Returns products with the query, in units of what `cut` returns: `scale / 254`."""
        a, b, c = products  # a is within 127² times the channels, and 254 · a + b within 31 bits
        return (a * LIMB + b).astype(jnp.float32) + c.astype(jnp.float32) * np.float32(1 / LIMB)

    def load(self, at, part, row, wanted):
        """Loads channels of a part, unscaled."""
        return _load(at["values"], row, part, wanted)


@dataclass(frozen=True)
class PairedReader(EightBitReader):
    """Reads 8-bit numbers two channels at a time, and makes them bfloat16.

    Matrix units take values by columns. One instruction brings many numbers of two bytes into
    columns, but no single bytes. Of float8, keys are read so, too.
    """

    form: Literal["int8", "float8"]
    interpret: bool

    @property
    def parts(self):
        """The even channels, and the odd ones."""
        return [Part(n, self.channels // 2, stride=2) for n in (0, 1)]

    @property
    def weights(self):
        """Weights that are not bfloat16 are cut as queries are, in the kernel."""
        return self.dtype if self.dtype == jnp.bfloat16 else jnp.dtype(jnp.float32)

    @property
    def limbs(self):
        """One limb in bfloat16, or three that hold all bits."""
        return 1 if self.dtype == jnp.bfloat16 else 3

    def cut(self, q):
        """Cuts queries into numbers of bfloat16."""
        rest, limbs = q.astype(jnp.float32), []
        for _ in range(self.limbs):
            limbs.append(leading_bits(rest))
            rest = rest - limbs[-1]
        return jnp.stack(limbs, axis=3).astype(jnp.bfloat16), None

    def view(self, arrays):
        """Returns the arrays with pairs of numbers in place of numbers."""
        values = arrays["values"]
        pairs = values.reshape(*values.shape[:-1], -1, 2)
        return {**arrays, "values": jax.lax.bitcast_convert_type(pairs, jnp.uint16)}

    def rows(self, at, parts, row, wanted):
        """Loads the even and the odd channels, unscaled."""
        pairs = _load(at["values"], row, parts[0]._replace(stride=1), wanted)
        return words.bytes_of(pairs, self.form, self.interpret)


@dataclass(frozen=True)
class FourBitReader(Reader):
    """Reads 4-bit numbers, two in a byte, with scale and low per group."""

    group: int
    axis: Axis
    scale_dtype: jnp.dtype

    def of_keys(self, interpret):
        """Returns the reader of keys that are not rotated."""
        return self.of_values(interpret)

    def of_values(self, interpret):
        """Returns the reader of values."""
        if {self.dtype, self.scale_dtype} != {jnp.dtype(jnp.bfloat16)} or self.channels % 4:
            return self
        return FourBitWords(**vars(self), interpret=interpret)

    def load(self, at, part, row, wanted: Array):  # pyright: ignore[reportIncompatibleMethodOverride]  # free rows are not read
        """Loads and decodes channels of a part."""
        half = self.channels // 2
        if part.first // half == part.last // half:
            # All numbers have the same shift, and finding their columns takes no division.
            column = part._replace(first=part.first % half).numbers
            shift = np.uint8(4 * (part.first // half))
        else:
            column = jax.lax.rem(part.numbers, jnp.full_like(part.numbers, half))
            shift = jnp.where(part.numbers < half, 0, 4).astype(jnp.uint8)[None, :]
        mask = wanted[:, None] & part.there[None, :]
        numbers = (_load_columns(at["values"], row, column, mask) >> shift) & np.uint8(15)
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
        return _load_columns(ref, row, column, mask).astype(jnp.float32)


@dataclass(frozen=True)
class FourBitWords(FourBitReader):
    """Reads 4-bit numbers two bytes at a time, and decodes them to bfloat16 in words."""

    interpret: bool

    @property
    def reads_free(self):
        """Whatever is not a number becomes one."""
        return True

    @property
    def parts(self):
        """Channels whose numbers stand in the same bits of two bytes, from the first bits on."""
        half = self.channels // 2
        firsts = 0, half, 1, half + 1
        return [Part(first, self.channels // 4, stride=2) for first in firsts]

    def view(self, arrays):
        """Returns the arrays with two bytes as a number, and two channels' scales as well."""
        two = {"values": jnp.uint16}
        if self.axis == "channel":
            two |= dict.fromkeys(("scale", "low"), jnp.uint32)
        return arrays | {
            name: jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), two[name])
            for name, x in arrays.items() if name in two
        }  # fmt: skip

    def rows(self, at, parts, row, wanted):
        """Loads and decodes all channels."""
        pairs = _load(at["values"], row, Part(0, self.channels // 4), wanted)
        decoded = []
        for number, part in enumerate(parts):
            scale, low = (self._of_part(at[name], part, row, wanted) for name in ("scale", "low"))
            decoded.append(words.four_bits(pairs, 4 * number, scale, low, self.interpret))
        return decoded

    def _of_part(self, ref, part: Part, row: Array, wanted: Array | None) -> Array:
        """Loads the scale or low of each number of a part, `[N, W]`."""
        if self.axis == "channel":
            row = jax.lax.div(row, jnp.full_like(row, self.group))
            both = _load(ref, row, Part(part.first // 2, part.count), wanted)
            one = (both >> np.uint32(16 * (part.first % 2))).astype(jnp.uint16)
            return jax.lax.bitcast_convert_type(one, jnp.bfloat16)
        column = jnp.arange(part.width, dtype=jnp.int32)[None, :]
        first, last = (x // self.group for x in (part.first, part.last))

        def of_all(group: int) -> Array:
            loaded = route.load(ref.at[row, group], mask=wanted, other=_other(ref.dtype, wanted))
            return jnp.broadcast_to(loaded[:, None], (row.size, part.width))

        of_part = of_all(first)
        for group in range(first + 1, last + 1):
            of_group = of_all(group)
            begin = -(-(group * self.group - part.first) // part.stride)
            of_part = jnp.where(column < begin, of_part, of_group)
        return of_part


def quantized_rows(encoded: Encoded, dtype: DTypeLike, axis: Axis = "token") -> Rows:
    """Returns 8-bit or 4-bit rows with a reader that decodes them to `dtype`."""
    values, scale, low = encoded
    bytes_of_row = values.shape[3]
    arrays = {"values": values, "scale": scale}
    if low is None:
        of_dtype = EightBitReader if values.dtype == jnp.int8 else Float8Reader
        reader = of_dtype(bytes_of_row, bytes_of_row, bytes_of_row, jnp.dtype(dtype))
        return Rows(reader, arrays)
    channels, row_bytes = 2 * bytes_of_row, bytes_of_row
    if axis == "token":
        group = grain = channels // scale.shape[3]
    else:
        group, grain = values.shape[2] // scale.shape[2], bytes_of_row
        row_bytes *= scale.dtype.itemsize  # scale and low of every number are loaded beside it
    dtypes = jnp.dtype(dtype), jnp.dtype(scale.dtype)
    reader = FourBitReader(channels, grain, row_bytes, dtypes[0], group, axis, dtypes[1])
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
        return _load(at["entries"], row, part, wanted)

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


def _load(ref, row: Array, part: Part, wanted: Array | None) -> Array:
    """Loads channels of a part of some rows; 0 for those that are not wanted, and for padding."""
    mask = None if part.count == part.width else part.there[None, :]
    if wanted is not None:
        mask = wanted[:, None] if mask is None else wanted[:, None] & mask
    if mask is not None:
        mask = jnp.broadcast_to(mask, (row.size, part.width))
    cells = ref.at[row[:, None], part.numbers[None, :]]
    return route.load(cells, mask=mask, other=_other(ref.dtype, mask))


def _other(dtype: DTypeLike, mask: Array | None) -> ArrayLike | None:
    """Returns 0, the result of a masked load where it loads nothing, if a load is masked."""
    return None if mask is None else zero(jnp.dtype(dtype))


def _load_columns(ref, row: Array, column: Array, mask: Array) -> Array:
    return route.load(ref.at[row[:, None], column[None, :]], mask=mask, other=zero(ref.dtype))
