"""Shared by kernels: the part of an array that a program is given, its rows, and products."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.base import route
from pallas_kernels.base.tiles import power_of_two


def program_part(x: Array | jax.ShapeDtypeStruct, axes: tuple[int, ...]) -> pl.BlockSpec:
    """Returns the block of `x` at a program's ids on `axes` of the grid; the rest of `x` is whole.

    All ids share an axis of length 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.base.kernel_parts import program_part
      >>> part = program_part(jnp.zeros((2, 1, 50)), (0, 1))
      >>> part.block_shape, part.index_map(1, 3, 7)
      ((None, None, 50), (1, 0, 0))
    """
    rest = x.ndim - len(axes)
    is_shared = [length == 1 for length in x.shape]

    def pick(*ids):
        leading = (0 if is_shared[place] else ids[axis] for place, axis in enumerate(axes))
        return (*leading, *(0,) * rest)

    return pl.BlockSpec((None,) * len(axes) + x.shape[len(axes) :], pick)


def head_part(x: Array, lists: int) -> pl.BlockSpec:
    """Returns the block of `x [B, H, ...]` that list k of K reads: head `k // (K / H)`.

    B is 1 for an array that all rows share.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.base.kernel_parts import head_part
      >>> part = head_part(jnp.zeros((2, 4, 50)), 4)
      >>> part.block_shape, part.index_map(1, 3, 7)
      ((None, None, 50), (1, 3, 0))
    """
    rows, per_head = x.shape[0], np.int32(lists // x.shape[1])

    def pick(*ids):
        head = ids[1] if per_head == 1 else jax.lax.div(ids[1], per_head)
        return (ids[0] if rows > 1 else 0, head, *(0,) * (x.ndim - 2))

    return pl.BlockSpec((None, None, *x.shape[2:]), pick)


def load_rows(
    ref: Any, number: Int[Array, "*N"], wanted: Bool[Array, "*N"], least: int = 1
) -> Float[Array, "*N P"]:
    """Reads rows of a ref `[S, D]` in a kernel; 0 in unwanted rows and in channels from D on.

    Args:
      ref: reference to the rows.
      number: number of each row.
      wanted: which of the rows are read.
      least: lower bound of P, the power of two that D is padded to. The rows of a product need
        what a matrix unit takes at least (`SMALLEST`).
    """
    cells, mask = _cells(ref, number, wanted, max(least, power_of_two(ref.shape[1])))
    return route.load(ref.at[cells], mask=mask, other=zero(ref.dtype))


def store_rows(
    ref: Any, number: Int[Array, "*N"], wanted: Bool[Array, "*N"], rows: Float[Array, "*N P"]
) -> None:
    """Writes, in a kernel, the rows that `load_rows` would read."""
    cells, mask = _cells(ref, number, wanted, rows.shape[-1])
    route.store(ref.at[cells], rows, mask=mask)


def _cells(ref: Any, number: Array, wanted: Array, width: int) -> tuple[tuple, Bool[Array, ...]]:
    """Returns row and channel of every element of some rows, and which elements exist."""
    channel = jnp.arange(width, dtype=jnp.int32).reshape((1,) * number.ndim + (-1,))
    return (number[..., None], channel), wanted[..., None] & (channel < ref.shape[1])


def dot(a: Float[Array, "M K"], b: Float[Array, "K N"]) -> Float[Array, "M N"]:
    """Returns the product of two tiles of one dtype, summed in float32; of int8, in int32.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.base.kernel_parts import dot
      >>> dot(jnp.ones((1, 2), jnp.bfloat16), jnp.ones((2, 1), jnp.bfloat16)).dtype
      dtype('float32')
    """
    # Without the precision, a GPU would round float32 to the 10 bits of TF32.
    precision = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    dtype = jnp.int32 if b.dtype == jnp.int8 else jnp.float32
    return jnp.dot(a, b, precision=precision, preferred_element_type=dtype)


def dot_mixed(a: Float[Array, "M K"], b: Float[Array, "K N"]) -> Float[Array, "M N"]:
    """Returns the product of two tiles, summed in float32, of which one may be bfloat16.

    If the other is float32, each of its numbers is split into three bfloat16 numbers, whose
    products matrix units compute: nothing is rounded. They have no product for float32, and
    registers do not suffice for large tiles of float32.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.base.kernel_parts import dot_mixed
      >>> dot_mixed(jnp.array([[3.0]], jnp.bfloat16), jnp.array([[1 + 2.0**-20]])).tolist()
      [[3.000002861022949]]
    """
    if a.dtype == b.dtype:
        return dot(a, b)
    total = jnp.zeros((a.shape[0], b.shape[1]), jnp.float32)
    wide = a if a.dtype == jnp.float32 else b
    for _ in range(3):
        first = leading_bits(wide)
        tile = first.astype(jnp.bfloat16)
        total += dot(tile, b) if a.dtype == jnp.float32 else dot(a, tile)
        wide = wide - first
    return total


def leading_bits(x: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """Returns float32 numbers cut to the first 8 bits, which bfloat16 holds.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.base.kernel_parts import leading_bits
      >>> leading_bits(jnp.array([1 + 2.0**-7 + 2.0**-8])).tolist()
      [1.0078125]
    """
    # By a mask: XLA removes a conversion to bfloat16 and back.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def zero(dtype: DTypeLike) -> ArrayLike:
    """Returns 0 as a scalar of a dtype: the result of a masked load where it loads nothing.

    Example:
      >>> from pallas_kernels.base.kernel_parts import zero
      >>> int(zero("int32"))
      0
    """
    return np.zeros((), dtype)[()]
