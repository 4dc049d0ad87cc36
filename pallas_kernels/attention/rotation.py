"""Rotary position embedding of stored keys: by XLA, and tile by tile inside a kernel."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.base.logits import products

# Least squares over |r| <= 1/4 at Chebyshev's points, in float32 within 2e-7:
# sin(2 pi r) = r (s0 + s1 r^2 + ...), cos(2 pi r) = c0 + c1 r^2 + ...
_SIN = (6.2831854820251465, -41.34168243408203, 81.60247802734375, -76.58128356933594,
        39.76072311401367)  # fmt: skip
_COS = (1.0, -19.739208221435547, 64.93934631347656, -85.45356750488281, 60.143951416015625,
        -24.981836318969727)  # fmt: skip


def _in_parts(number: float) -> list[float]:
    """Four numbers of 12 bits each, whose sum is the given one."""
    parts = []
    for _ in range(4):
        unit = 2.0 ** (math.frexp(number)[1] - 12)
        parts.append(math.floor(number / unit) * unit)
        number -= parts[-1]
    return parts


_UNITS = _in_parts(2**32 / (2 * math.pi))  # per radian


class Turn(NamedTuple):
    """How stored keys are rotated when they are read (RoPE, arXiv 2104.09864).

    Channel pair i of slot s is turned by the angle `position[s] * inv_freq[i]`, the other channels
    pass through.

    Args:
      inv_freq: inverse frequencies of the R pairs, of each row or of all; below 2π.
      position: of each slot.
      interleaved: pairs are neighbours (0,1), (2,3), ... instead of halves (0,R), (1,R+1), ...
      factor: what rotated channels are multiplied by.
    """

    inv_freq: Float[Array, "#B R"]
    position: Int[Array, "B H S"]
    interleaved: bool = False
    factor: float = 1.0

    @property
    def channels(self) -> int:
        """Leading channels that are rotated."""
        return 2 * self.inv_freq.shape[-1]

    def product(
        self, q: Float[Array, "B H R D"], keys: Float[Array, "B H N D"], start: Array | int
    ) -> Float[Array, "B H R N"]:
        """Float32 `q · k` of a block of slots from `start` on, whose keys are turned."""
        position = jax.lax.dynamic_slice_in_dim(self.position, start, keys.shape[2], 2)
        angle = position[..., None].astype(jnp.float32) * self.inv_freq[:, None, None]
        cos, sin = jnp.cos(angle) * self.factor, jnp.sin(angle) * self.factor
        return products(q, turn(keys, cos, sin, self.interleaved))


def turn(
    x: Float[Array, "B H T D"],
    cos: Float[Array, "B H T R"],
    sin: Float[Array, "B H T R"],
    interleaved: bool,
) -> Float[Array, "B H T D"]:
    """Vectors turned by angles whose cosines and sines are given, in float32; x's dtype comes out.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.attention.rotation import turn
      >>> x = jnp.array([[[[1.0, 2.0, 3.0]]]])
      >>> turn(x, jnp.zeros((1, 1, 1, 1)), jnp.ones((1, 1, 1, 1)), interleaved=False).tolist()
      [[[[-2.0, 1.0, 3.0]]]]
    """
    pairs = cos.shape[-1]
    rotated, rest = x[..., : 2 * pairs].astype(jnp.float32), x[..., 2 * pairs :]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        turned = jnp.stack((a * cos - b * sin, b * cos + a * sin), axis=-1).reshape(rotated.shape)
    else:
        a, b = rotated[..., :pairs], rotated[..., pairs:]
        turned = jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)
    return jnp.concatenate((turned.astype(x.dtype), rest), axis=-1)


def fixed_point(inv_freq: Float[Array, "#B R"]) -> Int[Array, "#B R"]:
    """Frequencies below 2π as whole numbers of 2^-32 turns per position, modulo 2^32.

    Products with positions wrap around where turns do, so nothing is lost at large positions: a
    product in float32 is off by up to 0.004 radians at 131,072.

    Example:
      >>> import math
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.attention.rotation import fixed_point
      >>> fixed_point(jnp.array([[2 * math.pi / 2**20]])).tolist()  # not exactly so in float32
      [[4096]]
    """
    # Halves of 12 bits, whose products with those of 2^32 / 2π are exact in float32.
    inv_freq = inv_freq.astype(jnp.float32)
    mask = np.uint32(0xFFFFF000)
    bits = jax.lax.bitcast_convert_type(inv_freq, jnp.uint32) & mask
    high = jax.lax.bitcast_convert_type(bits, jnp.float32)
    whole, rest = jnp.zeros(inv_freq.shape, jnp.uint32), jnp.zeros(inv_freq.shape, jnp.float32)
    for half in (high, inv_freq - high):
        for part in _UNITS:
            product = half * np.float32(part)
            below = jnp.floor(product)
            whole += below.astype(jnp.uint32)
            rest += product - below
    whole += jnp.floor(rest + 0.5).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(whole, jnp.int32)


def turns_of(phase: Int[Array, "N W"]) -> Float[Array, "N W"]:
    """Products of positions and `fixed_point` frequencies as turns, from -1/2 to 1/2."""
    return phase.astype(jnp.float32) * np.float32(2.0**-32)


def cos_sin_of_turns(
    turns: Float[Array, "N W"], factor: float
) -> tuple[Float[Array, "N W"], Float[Array, "N W"]]:
    """Cosines and sines of `2 π turns` by polynomials, inside a kernel.

    The library's functions have a slow path for angles above 1e5, whose scratch memory every thread
    pays for, and their fast path has two or three times as many instructions.
    """
    half = jnp.floor(2.0 * turns + 0.5)
    rest = turns - 0.5 * half  # -1/4 to 1/4; exact
    sign = factor * (1.0 - 2.0 * (half - 2.0 * jnp.floor(0.5 * half)))
    square = rest * rest
    return sign * _polynomial(_COS, square), sign * rest * _polynomial(_SIN, square)


def _polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    *others, total = coefficients
    for c in reversed(others):
        total = total * x + np.float32(c)
    return total
