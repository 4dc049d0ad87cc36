"""Weighted sums of values to which free slots add nothing, whatever stands in them.

A free slot has the weight 0, but 0 times NaN or infinity is NaN. To choose between values and zeros
before each product would take a pass over all values at every step. A sum that is finite shows
that nothing of the kind was in it, so that only others are computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.base.rows import block_of

BLOCK = 16  # slots that a second sum adds at a time, at most: few, so that one kernel adds them
SUM_AGAIN = "sum_again"  # the function that holds the condition: checks of steps skip it


def mix_rows(
    weights: Float[Array, "B H R S"], values: Float[Array, "B H S D"]
) -> Float[Array, "B H R D"]:
    """`Σ_s w_s v_s` in float32, to which a value adds nothing where its weight is 0.

    Args:
      weights: of the slots, 0 where one is free.
      values: of the slots, anything where one is free.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.base.mixing import mix_rows
      >>> values = jnp.array([[[[1.0], [jnp.nan], [5.0]]]])
      >>> mix_rows(jnp.array([[[[0.5, 0.0, 0.5]]]]), values).tolist()
      [[[[3.0]]]]
    """
    slots, own = values.shape[2], weights.astype(values.dtype)
    out = jnp.einsum("bhrs,bhsd->bhrd", own, values, preferred_element_type=jnp.float32)

    def of_some() -> Array:
        block = math.gcd(slots, BLOCK)

        def add(i: Array, total: Array) -> Array:
            part = block_of(own, i * block, block, 3)[..., None].astype(jnp.float32)
            rows = block_of(values, i * block, block, 2)[:, :, None].astype(jnp.float32)
            return total + jnp.where(part != 0, part * rows, 0).sum(3)

        return jax.lax.fori_loop(0, slots // block, add, jnp.zeros_like(out))

    return unless_finite(out, of_some)


def unless_finite(
    out: Float[Array, "B H R D"], again: Callable[[], Float[Array, "B H R D"]]
) -> Float[Array, "B H R D"]:
    """`out`, and what `again()` gives where it is not finite. `again` runs only if there is any."""

    def sum_again() -> Array:
        # The sum is finite only if all are. To look at each one takes twice the time.
        finite = jnp.isfinite(out.sum())
        return jax.lax.cond(finite, lambda: out, lambda: jnp.where(jnp.isfinite(out), out, again()))

    return jax.jit(sum_again)()
