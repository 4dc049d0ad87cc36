"""Weighted sums of values: weights in 16 bits, and free slots that add nothing.

A free slot has the weight 0, but 0 times NaN or infinity is NaN. Replacing such values by zeros
before each product would take a pass over all values at every step. A finite sum shows that it
contained neither, so only sums that are not finite are computed again.
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

# Weights of at most 1 are multiplied by this before they become float16, which has all its digits
# only from 2^-14 on and nothing below 2^-25. Beside a token that takes nearly all attention, and
# whose value may be 0, all other weights may be smaller than that. Multiplied, weights keep all
# digits from 2^-29 on. Smaller weights lose 2^-40 at most.
FLOAT16_UNIT = 2.0**15

BLOCK = 16  # most slots that a second sum adds at a time: few, so that one kernel adds them
SUM_AGAIN = "sum_again"  # the function that holds the condition: checks of steps skip it


def as_weights(weights: Float[Array, "*N"], dtype: DTypeLike) -> Float[Array, "*N"]:
    """Converts float32 weights of at most 1 to a dtype, scaled for float16; see `unscaled`.

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
    """Removes the scale of `as_weights` from sums of values by its weights."""
    return sums / FLOAT16_UNIT if dtype == jnp.float16 else sums


def mix_rows(
    weights: Float[Array, "B H R S"], values: Float[Array, "B H S D"]
) -> Float[Array, "B H R D"]:
    """Returns `Σ_s w_s v_s` in float32; a value adds nothing where its weight is 0.

    Args:
      weights: weights of the slots, at most 1; 0 for a free slot.
      values: values of the slots; anything in a free slot.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.base.mixing import mix_rows
      >>> values = jnp.array([[[[1.0], [jnp.nan], [5.0]]]])
      >>> mix_rows(jnp.array([[[[0.5, 0.0, 0.5]]]]), values).tolist()
      [[[[3.0]]]]
    """
    slots, scaled = values.shape[2], as_weights(weights, values.dtype)
    out = jnp.einsum("bhrs,bhsd->bhrd", scaled, values, preferred_element_type=jnp.float32)

    def sum_without_free() -> Array:
        block = math.gcd(slots, BLOCK)

        def add(i: Array, total: Array) -> Array:
            part = block_of(scaled, i * block, block, 3)[..., None].astype(jnp.float32)
            rows = block_of(values, i * block, block, 2)[:, :, None].astype(jnp.float32)
            return total + jnp.where(part != 0, part * rows, 0).sum(3)

        start = varying(jnp.zeros_like(out), scaled, values)
        return jax.lax.fori_loop(0, slots // block, add, start)

    return unscaled(unless_finite(out, sum_without_free), values.dtype)


def unless_finite(
    out: Float[Array, "B H R D"], again: Callable[[], Float[Array, "B H R D"]]
) -> Float[Array, "B H R D"]:
    """Returns `out`, or `again()` where `out` is not finite. `again` runs only if it is needed."""

    def sum_again() -> Array:
        # The sum is finite only if all elements are. Looking at each takes twice the time.
        finite = jnp.isfinite(out.sum())
        return jax.lax.cond(finite, lambda: out, lambda: jnp.where(jnp.isfinite(out), out, again()))

    return jax.jit(sum_again)()
