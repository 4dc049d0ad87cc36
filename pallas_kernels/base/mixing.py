"""Weighted sums of values: weights in 16 bits, and free slots that add nothing.

A free slot has the weight 0, but 0 times NaN or infinity is NaN. To choose between values and zeros
before each product would take a pass over all values at every step. A sum that is finite shows
that nothing of the kind was in it, so that only others are computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.base.rows import block_of
from pallas_kernels.base.varying import varying

# What weights of at most 1 are multiplied by before they become float16, which has all its digits
# from 2^-14 on alone and nothing below 2^-25. Beside a token that takes nearly all attention, and
# whose value may be 0, the weights of all others may be smaller than that. Multiplied, they have
# all digits from 2^-29 on. What is lost of smaller ones is 2^-40 at most.
FLOAT16_UNIT = 2.0**15

BLOCK = 16  # slots that a second sum adds at a time, at most: few, so that one kernel adds them
SUM_AGAIN = "sum_again"  # the function that holds the condition: checks of steps skip it


def as_weights(weights: Float[Array, "*N"], dtype: DTypeLike) -> Float[Array, "*N"]:
    """Float32 weights of at most 1 in a dtype, in units of which `unscaled` frees their sums.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.base.mixing import as_weights
      >>> as_weights(jnp.float32([1.0, 1e-7]), jnp.float16).tolist()
      [32768.0, 0.003276824951171875]
    """
    if dtype == jnp.float16:
        weights = weights * FLOAT16_UNIT
    return weights.astype(dtype)


def unscaled(sums: Float[Array, "*N"], dtype: DTypeLike) -> Float[Array, "*N"]:
    """Sums of values by weights that `as_weights` has given a dtype, without their unit."""
    return sums / FLOAT16_UNIT if dtype == jnp.float16 else sums


def mix_rows(
    weights: Float[Array, "B H R S"], values: Float[Array, "B H S D"]
) -> Float[Array, "B H R D"]:
    """`Σ_s w_s v_s` in float32, to which a value adds nothing where its weight is 0.

    Args:
      weights: of the slots, at most 1, 0 where one is free.
      values: of the slots, anything where one is free.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.base.mixing import mix_rows
      >>> values = jnp.array([[[[1.0], [jnp.nan], [5.0]]]])
      >>> mix_rows(jnp.array([[[[0.5, 0.0, 0.5]]]]), values).tolist()
      [[[[3.0]]]]
    """
    slots, own = values.shape[2], as_weights(weights, values.dtype)
    out = jnp.einsum("bhrs,bhsd->bhrd", own, values, preferred_element_type=jnp.float32)

    def of_some() -> Array:
        block = math.gcd(slots, BLOCK)

        def add(i: Array, total: Array) -> Array:
            part = block_of(own, i * block, block, 3)[..., None].astype(jnp.float32)
            rows = block_of(values, i * block, block, 2)[:, :, None].astype(jnp.float32)
            return total + jnp.where(part != 0, part * rows, 0).sum(3)

        start = varying(jnp.zeros_like(out), own, values)
        return jax.lax.fori_loop(0, slots // block, add, start)

    return unscaled(unless_finite(out, of_some), values.dtype)


def unless_finite(
    out: Float[Array, "B H R D"], again: Callable[[], Float[Array, "B H R D"]]
) -> Float[Array, "B H R D"]:
    """`out`, and what `again()` gives where it is not finite. `again` runs only if there is any."""

    def sum_again() -> Array:
        # The sum is finite only if all are. To look at each one takes twice the time.
        finite = jnp.isfinite(out.sum())
        return jax.lax.cond(finite, lambda: out, lambda: jnp.where(jnp.isfinite(out), out, again()))

    return jax.jit(sum_again)()
