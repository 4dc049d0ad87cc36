"""Cosines of keys in float32, rounded so that equal cosines are equal numbers."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

EPSILON = 2.0**-23  # the rounding of float32
# Adding this to a number up to 2^22 leaves no bits for the fraction, so the sum is rounded, ties to
# even. A cosine is at most 2^21 steps.
TO_UNITS = np.float32(1.5 * 2**23)
ITS_BITS = TO_UNITS.view(np.int32)


def cosine_step(channels: int) -> float:
    """Returns the step of rounded cosines of D channels: the first power of two from `4ε √D` on.

    With ε = 2^-23, a float32 sum of D products is off by about `ε √D`, in any order of summation.
    Half a step is more than that.

    Example:
      >>> from pallas_kernels.grouping.cosine import cosine_step
      >>> [cosine_step(channels) for channels in (4, 128)] == [2**-20, 2**-17]
      True
    """
    return EPSILON * 2.0 ** math.ceil(math.log2(4 * math.sqrt(channels)))


def round_cosine(
    cosine: Float[Array, ...], channels: int, *, in_kernel: bool = False
) -> Float[Array, ...]:
    """Rounds cosines to the nearest multiple of `cosine_step(channels)`; float32.

    Args:
      cosine: cosines to round.
      channels: D.
      in_kernel: whether to round without `jnp.round`, which Triton does not have. Results are the
        same except for the sign of 0.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.grouping.cosine import round_cosine
      >>> round_cosine(jnp.array([0.9999998, 1.0000001, -3e-8]), 4).tolist()
      [1.0, 1.0, -0.0]
    """
    step = cosine_step(channels)  # a power of two: dividing and multiplying by it are exact
    if in_kernel:
        # The sum's bits count steps. Subtracting TO_UNITS as a float would be simplified away by
        # XLA.
        bits = jax.lax.bitcast_convert_type(cosine * np.float32(1 / step) + TO_UNITS, jnp.int32)
        rounded = (bits - ITS_BITS).astype(jnp.float32) * np.float32(step)
        return jnp.where(cosine == cosine, rounded, cosine)
    return jnp.round(cosine / step) * step


def above(cosine: Float[Array, ...], threshold: float, channels: int) -> Bool[Array, ...]:
    """Returns whether cosines of D channels, rounded by `round_cosine`, are above a threshold.

    A cosine must exceed the threshold by more than a step: one that is equal to it never counts.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.grouping.cosine import above, round_cosine
      >>> above(round_cosine(jnp.array([0.6, 0.60001]), 4), 0.6, 4).tolist()
      [False, True]
    """
    return cosine > threshold + cosine_step(channels)


def inverse_length(x: Float[Array, "*N D"]) -> Float[Array, "*N"]:
    """Returns `1 / |x|`, 0 for a zero vector; float32.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.grouping.cosine import inverse_length
      >>> inverse_length(jnp.array([[0.0, 4.0], [0.0, 0.0]])).tolist()
      [0.25, 0.0]
    """
    length = jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum(-1))
    return jnp.where(length > 0, 1 / jnp.where(length > 0, length, 1.0), 0.0)
