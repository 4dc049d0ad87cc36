"""Vectors of bits in 32-bit words, and the Hamming distance between them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

WORD = 32  # bits


def pack_bits(bits: Bool[Array, "... N"]) -> UInt32[Array, "... W"]:
    """Packs vectors of N bits into `W = ceil(N / 32)` words; unused bits of the last are 0.

    Bit n becomes bit `n % 32` of word `n // 32`, the lowest first.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import pack_bits
      >>> pack_bits(jnp.array([[True, False, True], [False, True, True]])).tolist()
      [[5], [6]]
    """
    size = bits.shape[-1]
    words = -(-size // WORD)
    bits = jnp.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, words * WORD - size)])
    bits = bits.reshape(*bits.shape[:-1], words, WORD).astype(jnp.uint32)
    place = jnp.arange(WORD, dtype=jnp.uint32).reshape((1,) * (bits.ndim - 1) + (WORD,))
    return (bits << place).sum(-1, dtype=jnp.uint32)


def hamming_distance(
    a: UInt32[Array, "... W"],
    b: UInt32[Array, "... W"],
) -> Int[Array, ...]:
    """Counts the bits in which two packed vectors differ: `Σ_w popcount(a_w xor b_w)`.

    Args:
      a, b: from `pack_bits`, of shapes that broadcast.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import hamming_distance
      >>> words = jnp.array([[0b101], [0b110]], jnp.uint32)
      >>> hamming_distance(words, jnp.array([[0b111]], jnp.uint32)).tolist()
      [1, 1]
    """
    return jax.lax.population_count(a ^ b).sum(-1, dtype=jnp.int32)
