"""Weighted sums of values to which free slots add nothing, whatever stands in them.

A free slot has the weight 0, but 0 times NaN or infinity is NaN. To choose between values and zeros
before each product would take a pass over all values at every step. A sum that is finite shows
that nothing of the kind was in it, so that only others are computed again.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


@jax.jit
def mix_rows(
    weights: Float[Array, "B H R S"],
    values: Float[Array, "B H S D"],
    live: Bool[Array, "B H S"],
) -> Float[Array, "B H R D"]:
    """`Σ_s w_s v_s` over the live slots in float32. Weights of other slots are 0.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.base.mixing import mix_rows
      >>> values = jnp.array([[[[1.0], [jnp.nan], [5.0]]]])
      >>> live = jnp.array([[[True, False, True]]])
      >>> mix_rows(jnp.array([[[[0.5, 0.0, 0.5]]]]), values, live).tolist()
      [[[[3.0]]]]
    """
    weights = weights.astype(values.dtype)
    out = jnp.einsum("bhrs,bhsd->bhrd", weights, values, preferred_element_type=jnp.float32)

    def of_live() -> Array:
        # Products and their sum are one loop for XLA, which holds no second array of values.
        products = weights[..., None].astype(jnp.float32) * values[:, :, None].astype(jnp.float32)
        return jnp.where(live[:, :, None, :, None], products, 0.0).sum(3)

    return unless_finite(out, of_live)


def unless_finite(out: Float[Array, "..."], again: Callable[[], Array]) -> Float[Array, "..."]:
    """`out`, and what `again()` gives where it is not finite. `again` runs only if there is any."""

    def _again() -> Array:  # the name says to tests that this condition is one of attention
        finite = jnp.isfinite(out)
        return jax.lax.cond(finite.all(), lambda: out, lambda: jnp.where(finite, out, again()))

    return jax.jit(_again)()
