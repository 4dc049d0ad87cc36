"""Products of queries with keys."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

# `product(q, keys, start)` takes the place of `q · k` for a block of decoded keys `[B, H, N, D]`
# whose first slot is `start`. It is linear in the keys. None: `q · k` itself.
Product = Callable[[Array, Array, Array | int], Array]


def products(q: Float[Array, "B H R D"], k: Float[Array, "B H S D"]) -> Float[Array, "B H R S"]:
    """Returns `q · k` in float32."""
    # q is cast to the dtype of the keys: a bfloat16 cache would otherwise be widened in every step.
    return jnp.einsum("bhrd,bhsd->bhrs", q.astype(k.dtype), k, preferred_element_type=jnp.float32)
