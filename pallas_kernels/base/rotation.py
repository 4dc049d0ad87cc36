"""Rotary position embedding of stored keys, for a block of slots in XLA or a tile in a kernel."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.base.products import products
from pallas_kernels.base.rows import block_of

# Least-squares polynomials over |r| <= 1/4 at Chebyshev points, exact within 2e-7 in float32:
# sin(2 pi r) = r (s0 + s1 r^2 + ...), cos(2 pi r) = c0 + c1 r^2 + ...
_SIN = (6.2831854820251465, -41.34168243408203, 81.60247802734375, -76.58128356933594,
        39.76072311401367)  # fmt: skip
_COS = (1.0, -19.739208221435547, 64.93934631347656, -85.45356750488281, 60.143951416015625,
        -24.981836318969727)  # fmt: skip


def _in_parts(number: float) -> list[float]:
    """Splits a number into four numbers of 12 bits, of which it is the sum."""
    parts = []
    for _ in range(4):
        unit = 2.0 ** (math.frexp(number)[1] - 12)
        parts.append(math.floor(number / unit) * unit)
        number -= parts[-1]
    return parts


_UNITS = _in_parts(2**32 / (2 * math.pi))  # units of 2^-32 turns per radian


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Turn:
    """Rotation of stored keys when they are read (RoPE, arXiv 2104.09864).

    Channel pair i of slot s is rotated by the angle `position[s] * inv_freq[i]`. Other channels
    pass through.

    Args:
      inv_freq: inverse frequencies of the R pairs, for each row or for all; below 2π.
      position: position of each slot.
      interleaved: whether pairs are neighbours (0,1), (2,3), ... instead of halves (0,R),
        (1,R+1), ... (static).
      factor: multiplies rotated channels (static).

    Example:
      >>> import math
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import Turn
      >>> turn = Turn(jnp.array([[math.pi / 2]]), position=jnp.array([[[0, 1]]]))
      >>> keys = jnp.array([[[[1.0, 2.0, 5.0], [1.0, 2.0, 5.0]]]])  # the third channel has no pair
      >>> turn.rotate(keys).round(3).tolist()
      [[[[1.0, 2.0, 5.0], [-2.0, 1.0, 5.0]]]]
    """

    inv_freq: Float[Array, "#B R"]
    position: Int[Array, "B H S"]
    interleaved: bool = field(default=False, metadata={"static": True})
    factor: float = field(default=1.0, metadata={"static": True})

    @property
    def channels(self) -> int:
        """Number of leading channels that are rotated."""
        return 2 * self.inv_freq.shape[-1]

    def at(self, position: Int[Array, "B H N"]) -> Turn:
        """Returns this rotation for slots at other positions."""
        return dataclasses.replace(self, position=position)

    def rotate(self, x: Float[Array, "B H S D"]) -> Float[Array, "B H S D"]:
        """Rotates the vectors of all slots."""
        return rotate_pairs(x, *self._cos_sin(self.position), self.interleaved)

    def product(
        self, q: Float[Array, "B H R D"], keys: Float[Array, "B H N D"], start: Array | int
    ) -> Float[Array, "B H R N"]:
        """Returns float32 `q · k` with the rotated keys of the slots from `start` on."""
        position = block_of(self.position, start, keys.shape[2], 2)
        cos, sin = self._cos_sin(position)
        if self.interleaved:
            return products(q, rotate_pairs(keys, cos, sin, interleaved=True))
        # Multiplies the halves separately: joining the rotated halves first would copy them.
        pairs = self.inv_freq.shape[-1]
        a, b, rest = jnp.split(keys, (pairs, 2 * pairs), axis=-1)
        q_a, q_b, q_rest = jnp.split(q, (pairs, 2 * pairs), axis=-1)
        a, b = _turned(a, b, cos, sin)
        out = products(q_a, a.astype(keys.dtype)) + products(q_b, b.astype(keys.dtype))
        return out + products(q_rest, rest) if rest.shape[-1] else out

    def _cos_sin(self, position: Int[Array, "B H N"]) -> tuple[Array, Array]:
        phase = position[..., None] * fixed_point(self.inv_freq)[:, None, None]
        return cos_sin_of_turns(turns_of(phase), self.factor)


def rotate_pairs(
    x: Float[Array, "B H T D"],
    cos: Float[Array, "B H T R"],
    sin: Float[Array, "B H T R"],
    interleaved: bool,
) -> Float[Array, "B H T D"]:
    """Rotates vectors in float32, by angles with these cosines and sines; keeps the dtype of x.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.base.rotation import rotate_pairs
      >>> x, ones = jnp.array([[[[1.0, 2.0, 3.0]]]]), jnp.ones((1, 1, 1, 1))
      >>> rotate_pairs(x, 0 * ones, ones, interleaved=False).tolist()
      [[[[-2.0, 1.0, 3.0]]]]
    """
    pairs = cos.shape[-1]
    rotated, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if interleaved:
        a, b = _turned(rotated[..., 0::2], rotated[..., 1::2], cos, sin)
        turned = jnp.stack((a, b), axis=-1).reshape(rotated.shape)
    else:
        a, b = jnp.split(rotated, 2, axis=-1)
        turned = jnp.concatenate(_turned(a, b, cos, sin), axis=-1)
    return jnp.concatenate((turned.astype(x.dtype), rest), axis=-1)


def _turned(a: Array, b: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    """Rotates both channels of each pair, in float32."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return a * cos - b * sin, b * cos + a * sin


def fixed_point(inv_freq: Float[Array, "#B R"]) -> Int[Array, "#B R"]:
    """Converts frequencies below 2π to whole numbers of 2^-32 turns per position, modulo 2^32.

    Products with positions wrap around where turns do, so nothing is lost at large positions. A
    float32 product would be off by up to 0.004 radians at position 131,072.

    Example:
      >>> import math
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.base.rotation import fixed_point
      >>> fixed_point(jnp.array([[2 * math.pi / 2**20]])).tolist()  # not exactly so in float32
      [[4096]]
    """
    # Splits frequencies into halves of 12 bits, whose products with `_UNITS` are exact in float32.
    inv_freq = inv_freq.astype(jnp.float32)
    mask = np.uint32(0xFFFFF000)
    bits = jax.lax.bitcast_convert_type(inv_freq, jnp.uint32) & mask
    high = jax.lax.bitcast_convert_type(bits, jnp.float32)
    units, rest = jnp.zeros(inv_freq.shape, jnp.uint32), jnp.zeros(inv_freq.shape, jnp.float32)
    for half in (high, inv_freq - high):
        for part in _UNITS:
            product = half * np.float32(part)
            below = jnp.floor(product)
            units += below.astype(jnp.uint32)
            rest += product - below
    units += jnp.floor(rest + 0.5).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(units, jnp.int32)


def turns_of(phase: Int[Array, "*N"]) -> Float[Array, "*N"]:
    """Converts products of positions and `fixed_point` frequencies to turns, -1/2 to 1/2."""
    return phase.astype(jnp.float32) * np.float32(2.0**-32)


def cos_sin_of_turns(
    turns: Float[Array, "*N"], factor: float
) -> tuple[Float[Array, "*N"], Float[Array, "*N"]]:
    """Returns cosines and sines of `2 π turns`, by polynomials.

    CUDA's functions have a slow path for angles above 1e5, whose scratch memory every thread pays
    for, and their fast path has two or three times as many instructions. XLA's own functions on CPU
    compute one number at a time.
    """
    half = jnp.floor(2.0 * turns + 0.5)
    rest = turns - 0.5 * half  # -1/4 to 1/4; exact
    sign = factor * (1.0 - 2.0 * (half - 2.0 * jnp.floor(0.5 * half)))
    square = rest * rest
    return sign * _polynomial(_COS, square), sign * rest * _polynomial(_SIN, square)


def _polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    *lower, second, highest = coefficients
    total = highest * x + np.float32(second)
    for c in reversed(lower):
        total = total * x + np.float32(c)
    return total
