"""Upper bounds of `q·k` for the keys of each page."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.common import check_implementation


def page_scores(
    q: Float[Array, "B H G D"],
    low: Float[Array, "B H P D"],
    high: Float[Array, "B H P D"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B H G P"]:
    """`Σ_c max(q_c low_c, q_c high_c)` in float32: what no `q·k` of the page exceeds.

    The products are those of the dtype of `low`.

    Args:
      low, high: the least and the greatest value of each channel among the keys of a page; finite,
        even where there is no page.
      implementation: `None` or `"xla"`.

    Raises:
      ValueError: an unknown implementation.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import page_scores
      >>> low, high = jnp.array([[[[-1.0, 0.0]]]]), jnp.array([[[[2.0, 3.0]]]])
      >>> page_scores(jnp.array([[[[1.0, 1.0], [-1.0, -1.0]]]]), low, high).tolist()
      [[[[5.0], [1.0]]]]
    """
    check_implementation(implementation)
    # In the dtype of the bounds: the other way round, they would be widened every step.
    q = q.astype(low.dtype)

    def dot(q: Float[Array, "B H G D"], bound: Float[Array, "B H P D"]) -> Float[Array, "B H G P"]:
        return jnp.einsum(
            "bhgd,bhpd->bhgp", q, bound,
            precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
        )  # fmt: skip

    # The greater product is that with `high` where q is positive, with `low` where it is negative.
    return dot(jnp.maximum(q, 0), high) + dot(jnp.minimum(q, 0), low)
