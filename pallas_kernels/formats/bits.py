"""Keys and values in 8, 4, 3 and 2 bits: their encoding, and attention's products with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int8, UInt8

from pallas_kernels.base.annotations import NoneElsewhere
from pallas_kernels.base.products import Product
from pallas_kernels.base.rows import BLOCK, block_of, over_blocks
from pallas_kernels.base.varying import varying

FITTING = 3  # rounds in which scales of 3 and 2 bits are fitted; the fourth changes little

Axis = Literal["token", "channel"]


class Encoded(NamedTuple):
    """Keys or values of all slots in 8 bits or fewer, as `quantized_attention` takes them.

    Args:
      values: 8-bit numbers with a scale per slot, or numbers of 4 bits and fewer, two in a byte,
        with a scale and a low per group.
      scale: `[B, H, S]`, or of groups `[B, H, S, D / group]` or `[B, H, S / group, D]`.
      low: least value of each group, in the shape of `scale`; None: each slot has only a scale.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import Encoded, quantise_groups, quantise_slots
      >>> keys = jnp.ones((1, 2, 64, 16))
      >>> in_8_bits = Encoded(*quantise_slots(keys))
      >>> in_4_bits = Encoded(*quantise_groups(keys, group=16))
      >>> in_8_bits.values.nbytes, in_4_bits.values.nbytes, keys.nbytes
      (2048, 1024, 8192)
    """

    values: Int8[Array, "B H S D"] | UInt8[Array, "B H S D"] | UInt8[Array, "B H S D/2"]
    scale: Array
    low: Array | NoneElsewhere = None


# --- one scale per slot ---------------------------------------------------------------------------


def quantise_slots(
    x: Float[Array, "... S D"], dtype: DTypeLike = jnp.int8
) -> tuple[Array, Float[Array, "... S"]]:
    """Quantises to symmetric 8-bit numbers with one scale per slot: `scale = max |x| / most`.

    `q = x / scale`, rounded half to even; 0 where a whole slot is 0.

    Args:
      dtype: `int8` (most = 127) or `float8_e4m3fn` (most = 448).

    Returns:
      q as int8, or as bytes (uint8) that are the bits of float8, since XLA on CPU would keep a
      loop's float8 array in a wider dtype; and float32 scales.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import quantise_slots
      >>> q, scale = quantise_slots(jnp.array([[-254.0, 2.0, 0.0], [0.0, 0.0, 0.0]]))
      >>> q.tolist(), scale.tolist()
      ([[-127, 1, 0], [0, 0, 0]], [2.0, 0.0])
    """
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    most = float((jnp.iinfo if is_integer else jnp.finfo)(dtype).max)
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(-1) / most
    q = jnp.clip(_over(x, scale[..., None]), -most, most)
    if is_integer:
        return jnp.round(q).astype(dtype), scale
    return jax.lax.bitcast_convert_type(q.astype(dtype), jnp.uint8), scale


def dequantise_slots(q: Array, scale: Float[Array, "... S"]) -> Float[Array, "... S D"]:
    """Returns `q · scale` in float32.

    Args:
      q, scale: from `quantise_slots`; numbers of the dtype uint8 are the bits of float8.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import dequantise_slots, quantise_slots
      >>> dequantise_slots(*quantise_slots(jnp.array([[-254.0, 3.0, 0.5]]))).tolist()
      [[-254.0, 4.0, 0.0]]
    """
    return _numbers(q) * scale[..., None]


def _numbers(q: Array) -> Float[Array, "... D"]:
    """Returns 8-bit numbers as float32."""
    if q.dtype == jnp.uint8:
        q = jax.lax.bitcast_convert_type(q, jnp.float8_e4m3fn)
    return q.astype(jnp.float32)


def _over(x: Array, scale: Array) -> Array:
    """Returns x / scale; 0 where the scale is 0."""
    return jnp.where(scale > 0, x / jnp.where(scale > 0, scale, 1.0), 0.0)


# --- groups of values -----------------------------------------------------------------------------


def quantise_groups(
    x: Float[Array, "... S D"], group: int, axis: Axis = "token", bits: Literal[4, 3, 2] = 4
) -> tuple[UInt8[Array, "... S D/2"], Array, Array]:
    """Quantises to numbers of 4 bits or fewer, two in a byte, with scale and low per group.

    `low = min`, `scale = (max - min) / (2**bits - 1)`, both rounded to the dtype of x;
    `q = (x - low) / scale`, rounded half to even, from 0 to `2**bits - 1`; 0 where the scale is 0.
    With 3 and 2 bits the extremes of a group would take most of the numbers. Before they are
    rounded, `low` and `scale` are therefore fitted in three rounds: each computes q, and then the
    `low` and `scale` for which `Σ (low + q · scale - x)²` is least.

    Args:
      group: values of a group; it divides D (axis "token") or S ("channel").
      axis: `"token"`: groups are consecutive channels of a slot. `"channel"`: consecutive slots of
        a channel.
      bits: 4, 3 or 2. A number takes half a byte in any case; `narrowed` packs those of 3 and 2.

    Returns:
      q packed (see `pack_int4`); scale and low, `[..., S, D / group]` or `[..., S / group, D]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import dequantise_groups, quantise_groups
      >>> packed, scale, low = quantise_groups(jnp.array([[1.0, 31.0, 5.0, 4.0]]), group=4)
      >>> dequantise_groups(packed, scale, low).tolist()
      [[1.0, 31.0, 5.0, 5.0]]
    """
    dtype, wide = x.dtype, _grouped(x.astype(jnp.float32), group, axis)
    along, most = _along(axis), 2**bits - 1

    def numbers(scale: Array, low: Array) -> Array:
        by, least = (jnp.expand_dims(part.astype(jnp.float32), along) for part in (scale, low))
        return jnp.clip(jnp.round(_over(wide - least, by)), 0, most)

    low, high = wide.min(along), wide.max(along)
    scale = (high - low) / most
    mean = wide.mean(along)
    for _ in range(FITTING if bits < 4 else 0):
        q = numbers(scale, low)
        middle = q.mean(along, keepdims=True)
        apart = q - middle
        scale = _over((apart * wide).sum(along), (apart**2).sum(along))
        low = mean - scale * middle.squeeze(along)
    scale, low = scale.astype(dtype), low.astype(dtype)
    return pack_int4(numbers(scale, low).astype(jnp.uint8).reshape(x.shape)), scale, low


def dequantise_groups(
    packed: UInt8[Array, "... S D/2"], scale: Array, low: Array, axis: Axis = "token"
) -> Float[Array, "... S D"]:
    """Returns `low + q · scale` in float32.

    Args:
      packed, scale, low: from `quantise_groups`.
      axis: the axis of the groups that it was given.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import dequantise_groups, quantise_groups
      >>> channels = jnp.array([[0.0, 100.0], [15.0, 130.0]])  # 2 slots, each channel a group
      >>> encoded = quantise_groups(channels, group=2, axis="channel")
      >>> dequantise_groups(*encoded, axis="channel").tolist()
      [[0.0, 100.0], [15.0, 130.0]]
    """
    return _scaled(unpack_int4(packed), scale, low, axis)


def _scaled(q: Array, scale: Array, low: Array, axis: Axis) -> Float[Array, "... S D"]:
    size = q.shape[_along(axis)] // scale.shape[_along(axis)]
    by, least = (jnp.expand_dims(part.astype(jnp.float32), _along(axis)) for part in (scale, low))
    return (least + _grouped(q.astype(jnp.float32), size, axis) * by).reshape(q.shape)


def pack_int4(q: UInt8[Array, "... D"]) -> UInt8[Array, "... D/2"]:
    """Packs two numbers of 0 to 15 in a byte: channel i in the low bits, i + D / 2 in the high.

    Unpacking gives each half of the channels at once, without interleaving.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.formats.bits import pack_int4, unpack_int4
      >>> packed = pack_int4(jnp.array([3, 15, 0, 1], jnp.uint8))
      >>> packed.tolist(), unpack_int4(packed).tolist()
      ([3, 31], [3, 15, 0, 1])
    """
    low, high = jnp.split(q, 2, axis=-1)
    return low | (high << jnp.uint8(4))


def unpack_int4(packed: UInt8[Array, "... D/2"]) -> UInt8[Array, "... D"]:
    """Unpacks the numbers that `pack_int4` has packed."""
    return jnp.concatenate(_halves(packed), axis=-1)


def narrowed(packed: UInt8[Array, "... D/2"], bits: Literal[3, 2]) -> UInt8[Array, "... N"]:
    """Packs numbers of 3 or 2 bits, of which `pack_int4` packed two in a byte, in fewer bytes.

    A byte gets four numbers of 2 bits. Three bytes get eight numbers of 3 bits: with 6 bits from
    each of four bytes, the fourth is divided among the other three. D is a multiple of 8.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.formats.bits import narrowed, pack_int4, unpack_int4, widened
      >>> numbers = jnp.array([7, 0, 1, 2, 3, 4, 5, 6], jnp.uint8)
      >>> narrow = narrowed(pack_int4(numbers), 3)
      >>> narrow.shape, unpack_int4(widened(narrow, 3)).tolist()
      ((3,), [7, 0, 1, 2, 3, 4, 5, 6])
    """
    if bits == 2:
        first, second = jnp.split(packed, 2, axis=-1)
        return first | (second << 2)
    low, high = _halves(packed)
    *bodies, divided = jnp.split(low | (high << 3), 4, axis=-1)
    parts = (body | ((divided >> (2 * n)) << 6) for n, body in enumerate(bodies))
    return jnp.concatenate(list(parts), axis=-1)


def widened(narrow: UInt8[Array, "... N"], bits: Literal[3, 2]) -> UInt8[Array, "... D/2"]:
    """Returns what `narrowed` has packed as it was, two numbers in a byte."""
    if bits == 2:
        twos = 0b00110011
        return jnp.concatenate((narrow & twos, (narrow >> 2) & twos), axis=-1)
    thirds = jnp.split(narrow, 3, axis=-1)
    divided = sum((third >> 6) << (2 * n) for n, third in enumerate(thirds))
    pairs = jnp.concatenate([*(third & 63 for third in thirds), divided], axis=-1)
    return (pairs & 7) | ((pairs >> 3) << 4)


def _halves(packed: UInt8[Array, "... D/2"]) -> tuple[Array, Array]:
    return packed & jnp.uint8(15), packed >> jnp.uint8(4)


def _along(axis: Axis) -> int:
    """Returns the dimension that groups run along, in `[..., S, D]` and in `_grouped` arrays."""
    return {"token": -1, "channel": -2}[axis]


def _grouped(x: Array, size: int, axis: Axis) -> Array:
    """Reshapes `[..., S, D]` to `[..., S, D / size, size]` or `[..., S / size, size, D]`."""
    *rest, slots, channels = x.shape
    shape = (slots, channels // size, size) if axis == "token" else (slots // size, size, channels)
    return x.reshape(*rest, *shape)


# --- attention ------------------------------------------------------------------------------------


def quantized_logits(
    q: Float[Array, "B H R D"],
    values: Int8[Array, "B H S D"] | UInt8[Array, "B H S D/2"],
    scale: Array,
    low: Array | None = None,
    *,
    axis: Axis = "token",
    product: Product | None = None,
) -> Float[Array, "B H R S"]:
    """Returns `q · k` of encoded keys in float32, without a decoded copy of all keys.

    Args:
      values, scale, low: from `quantise_slots` (low = None) or `quantise_groups`.
      axis: axis of the groups.
      product: takes the place of `q · k` where keys are rotated when they are read; see
        `base.products.Product`.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import quantise_slots, quantized_logits
      >>> keys = jnp.array([[[[127.0, 1.0], [0.0, 254.0]]]])
      >>> quantized_logits(jnp.ones((1, 1, 1, 2)), *quantise_slots(keys)).tolist()
      [[[[128.0, 254.0]]]]
    """
    q = q.astype(jnp.float32)

    def add(start: Array | int, count: int, out: Array) -> Array:
        parts, by = _decoded(values, scale, low, axis, start, count)
        if product is not None:
            logits = product(q, _joined(parts), start)
        else:
            q_parts = jnp.split(q, len(parts), axis=-1)
            pairs = zip(q_parts, parts, strict=True)
            logits = sum(_einsum("bhrd,bhsd->bhrs", *pair) for pair in pairs)
        logits = logits if by is None else logits * by[:, :, None]
        return jax.lax.dynamic_update_slice_in_dim(out, logits, start, 3)

    out = jnp.zeros((*q.shape[:3], values.shape[2]), jnp.float32)
    return _over_blocks(values, scale, axis, add, varying(out, q, values))


def quantized_mix(
    weights: Float[Array, "B H R S"],
    values: Int8[Array, "B H S D"] | UInt8[Array, "B H S D/2"],
    scale: Array,
    low: Array | None = None,
    *,
    axis: Axis = "token",
    live: Bool[Array, "B H S"] | None = None,
) -> Float[Array, "B H R D"]:
    """Returns `Σ_s w_s v_s` of encoded values in float32, without a decoded copy of all values.

    Args:
      values, scale, low, axis: as in `quantized_logits`.
      live: the slots whose values count; others have weight 0, and may hold NaN. None: all.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import quantise_slots, quantized_mix
      >>> values = jnp.array([[[[127.0, 1.0], [0.0, 254.0]]]])
      >>> quantized_mix(jnp.array([[[[1.0, 0.5]]]]), *quantise_slots(values)).tolist()
      [[[[127.0, 128.0]]]]
    """
    weights = weights.astype(jnp.float32)

    def add(start: Array | int, count: int, total: Array) -> Array:
        part = block_of(weights, start, count, 3)
        parts, by = _decoded(values, scale, low, axis, start, count, live)
        part = part if by is None else part * by[:, :, None]
        return total + _joined([_einsum("bhrs,bhsd->bhrd", part, rows) for rows in parts])

    channels = values.shape[3] * (1 if low is None else 2)
    total = jnp.zeros((*weights.shape[:3], channels), jnp.float32)
    return _over_blocks(values, scale, axis, add, varying(total, weights, values))


def _einsum(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, precision=jax.lax.Precision.HIGHEST)


def _over_blocks(values: Array, scale: Array, axis: Axis, add: Callable, carry: Array) -> Array:
    """Calls `over_blocks` with blocks of whole groups."""
    size, block = values.shape[2], BLOCK
    if axis == "channel":
        group = size // scale.shape[2]
        block = max(BLOCK // group, 1) * group
    return over_blocks(size, block, add, carry)


def _decoded(values, scale, low, axis: Axis, start: Array | int, count: int, live=None):
    """Decodes the rows of a block to float32: one array, or one per half of the channels.

    Returns the arrays and a factor per slot, by which its row must still be multiplied (None
    without factors). With `live`, rows without a live slot are finite; else rows are as stored.
    """
    slots = values.shape[2]

    def part(x: Array) -> Array:
        group = slots // x.shape[2]  # slots that share an entry of x
        return block_of(x, start // group, count // group, 2)

    def number(x: Array) -> Array:
        return x if live is None else _of_live(x, block_of(live, start, count, 2))

    if low is None:
        rows = part(values)
        # Every byte is a number as int8, but may be NaN as float8.
        return [_numbers(number(rows) if rows.dtype == jnp.uint8 else rows)], number(part(scale))
    values, scale, low = part(values), number(part(scale)), number(part(low))
    if scale.shape[3] % 2:  # a group has channels of both halves
        return [dequantise_groups(values, scale, low, axis)], None
    halves = _halves(values), jnp.split(scale, 2, axis=-1), jnp.split(low, 2, axis=-1)
    return [_scaled(*half, axis) for half in zip(*halves, strict=True)], None


def _of_live(x: Array, live: Bool[Array, "B H S"]) -> Array:
    """Puts zeros into `x [B, H, S or groups, ...]` where no slot is live."""
    any_live = live.reshape(*x.shape[:3], -1).any(-1)
    return jnp.where(
        any_live.reshape(*any_live.shape, *(1,) * (x.ndim - 3)), x, jnp.zeros((), x.dtype)
    )


def _joined(parts: list[Array]) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
