"""Weighted sums of values to which free slots add nothing, whatever stands in them.

A free slot has the weight 0, but 0 times NaN or infinity is NaN. To choose between values and zeros
before each product would take a pass over all values at every step. A sum that is finite shows
that nothing of the kind was in it, so that only others are computed again.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.base.rows import block_of, over_blocks

BLOCK = 64  # slots whose values are chosen at a time
SUM_AGAIN = "sum_again"  # the function that holds the condition: checks of steps skip it


def mix_rows(
    weights: Float[Array, "B H R S"],
    values: Float[Array, "B H S D"],
    again: Callable[[], Float[Array, "B H R S"]] | None = None,
) -> Float[Array, "B H R D"]:
    """`Σ_s w_s v_s` in float32, to which values add nothing where all weights of a slot are 0.

    Args:
      weights: of the slots, 0 where one is free.
      values: of the slots, anything where one is free.
      again: computes the weights anew, from arrays that are there anyway. XLA on CPU would else
        compute the same weights twice in every call, once for each of two sums. None: `weights`,
        where they are few.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.base.mixing import mix_rows
      >>> values = jnp.array([[[[1.0], [jnp.nan], [5.0]]]])
      >>> mix_rows(jnp.array([[[[0.5, 0.0, 0.5]]]]), values).tolist()
      [[[[3.0]]]]
    """

    def of_some() -> Array:
        own = weights if again is None else again()

        def add(start: Array | int, count: int, total: Array) -> Array:
            part = block_of(own, start, count, 3)
            counts = (part != 0).any(2)[..., None]
            return total + _mix(part, jnp.where(counts, block_of(values, start, count, 2), 0))

        # Two blocks at least, so that there is never a second array of all values.
        slots, total = values.shape[2], jnp.zeros((*weights.shape[:3], values.shape[3]))
        return over_blocks(slots, max(min(BLOCK, slots // 2), 1), add, total)

    return unless_finite(_mix(weights, values), of_some)


def unless_finite(
    out: Float[Array, "B H R D"], again: Callable[[], Float[Array, "B H R D"]]
) -> Float[Array, "B H R D"]:
    """`out`, and what `again()` gives where it is not finite. `again` runs only if there is any."""

    def sum_again() -> Array:
        # The sum is finite only if all are. To look at each one takes twice the time.
        finite = jnp.isfinite(out.sum())
        return jax.lax.cond(finite, lambda: out, lambda: jnp.where(jnp.isfinite(out), out, again()))

    return jax.jit(sum_again)()


def _mix(weights: Float[Array, "B H R S"], values: Float[Array, "B H S D"]) -> Array:
    weights = weights.astype(values.dtype)
    return jnp.einsum("bhrs,bhsd->bhrd", weights, values, preferred_element_type=jnp.float32)
