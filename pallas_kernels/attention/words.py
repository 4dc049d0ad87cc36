"""Stored bytes to numbers of matrix units, two at a time in a word of 32 bits.

A compiler treats numbers of 16 bits one by one, and packs them afterwards. The PTX of this
file takes the words as they come. Interpreted kernels take JAX's operations, which compute the
same.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, UInt16

from pallas_kernels.base import route

# $0 gets the first and the third of the four bytes of each word $1, or the second and the fourth.
PTX = {
    # bfloat16 has room for 7 digits below the first one, 128, which is then subtracted. The sign,
    # which is worth -128, turns the 128 that is subtracted into 256.
    "int8": """{{
.reg .b32 bytes, digits, sign, minus;
mov.b32 minus, 0xBF80BF80;
shr.u32 bytes, $1, {shift};
and.b32 digits, bytes, 0x007F007F;
or.b32 digits, digits, 0x43004300;
and.b32 sign, bytes, 0x00800080;
or.b32 sign, sign, 0x43004300;
fma.rn.bf16x2 $0, sign, minus, digits;
}}""",
    # The bits of float8 are those of bfloat16 with a smaller exponent: 2^120 is missing.
    "float8": """{{
.reg .b32 bytes, sign, rest, power, none;
mov.b32 power, 0x7B807B80;
mov.b32 none, 0x80008000;
shr.u32 bytes, $1, {shift};
and.b32 sign, bytes, 0x00800080;
shl.b32 sign, sign, 8;
and.b32 rest, bytes, 0x007F007F;
shl.b32 rest, rest, 4;
or.b32 rest, rest, sign;
fma.rn.bf16x2 $0, rest, power, none;
}}""",
}
# The number of 4 bits from {shift} on in each half of $1, times that of $2, and that of $3 added.
# NaN becomes -2^60, which a weight of 0 makes 0: free slots may hold such scales.
FOUR_BITS = """{{
.reg .b32 digits, one, least;
mov.b32 one, 0x3F803F80;
mov.b32 least, 0xC300C300;
shr.u32 digits, $1, {shift};
and.b32 digits, digits, 0x000F000F;
or.b32 digits, digits, 0x43004300;
fma.rn.bf16x2 digits, digits, one, least;
fma.rn.bf16x2 digits, digits, $2, $3;
mov.b32 least, 0xDD80DD80;
max.bf16x2 $0, digits, least;
}}"""
LEAST = -(2.0**60)
DTYPES = {"int8": jnp.int8, "float8": jnp.float8_e4m3fn}


def bytes_of(
    pairs: UInt16[Array, "N W"], form: Literal["int8", "float8"], interpret: bool
) -> list[BFloat16[Array, "N W"]]:
    """Returns the low and the high byte of each pair as a number.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.attention.words import bytes_of
      >>> low, high = bytes_of(jnp.array([0x80FF, 0x7F01], jnp.uint16), "int8", True)
      >>> low.tolist(), high.tolist()
      ([-1.0, 1.0], [-128.0, 127.0])
    """

    def half(shift: int) -> Array:
        if not interpret:
            return route.by_words(PTX[form].format(shift=shift), [pairs], jnp.bfloat16)
        number = (pairs >> np.uint16(shift)).astype(jnp.uint8)
        return jax.lax.bitcast_convert_type(number, DTYPES[form]).astype(jnp.bfloat16)

    return [half(0), half(8)]


def four_bits(
    pairs: UInt16[Array, "N W"], shift: int, scale: Array, low: Array, interpret: bool
) -> BFloat16[Array, "N W"]:
    """Returns `low + number · scale` of the numbers of 4 bits that begin at bit `shift`.

    Args:
      pairs: two bytes each, with four numbers.
      scale, low: in bfloat16, `[N, W]`; what is not a number gives -2^60.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.attention.words import four_bits
      >>> pairs, scale = jnp.array([0x4321], jnp.uint16), jnp.array([2.0], jnp.bfloat16)
      >>> [four_bits(pairs, shift, scale, scale, True).item() for shift in (0, 4, 8, 12)]
      [4.0, 6.0, 8.0, 10.0]
    """
    if not interpret:
        return route.by_words(FOUR_BITS.format(shift=shift), [pairs, scale, low], jnp.bfloat16)
    number = ((pairs >> np.uint16(shift)) & np.uint16(15)).astype(jnp.float32)
    decoded = low.astype(jnp.float32) + number * scale.astype(jnp.float32)
    return jnp.where(jnp.isnan(decoded), LEAST, decoded).astype(jnp.bfloat16)
