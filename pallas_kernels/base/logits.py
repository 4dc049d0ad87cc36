"""Logits of attention: products of queries and keys, scaled, capped, biased and masked."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# `product(q, keys, start)` takes the place of `q · k` for a block of decoded keys `[B, H, N, D]`
# whose first slot is `start`. It is linear in the keys. None: `q · k` itself.
Product = Callable[[Array, Array, Array | int], Array]


def products(q: Float[Array, "B H R D"], k: Float[Array, "B H S D"]) -> Float[Array, "B H R S"]:
    """Returns `q · k` in float32."""
    # q is cast to the dtype of the keys: a bfloat16 cache would otherwise be widened in every step.
    return jnp.einsum("bhrd,bhsd->bhrs", q.astype(k.dtype), k, preferred_element_type=jnp.float32)


def mask_products(
    products: Float[Array, "B H R S"],
    bias: Float[Array, "B H S"],
    key_position: Int[Array, "B H S"],
    query_position: Int[Array, "B T"],
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "B H R S"]:
    """Returns float32 attention logits from products `q·k`, scaled, capped and masked."""
    logits = capped(products * scale, soft_cap)
    return masked(logits, bias, key_position, query_position, window)


def capped(logits: Float[Array, "*R"], soft_cap: float | None) -> Float[Array, "*R"]:
    """Returns logits between `-soft_cap` and `soft_cap`. None: as they are."""
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def masked(
    logits: Float[Array, "B H R S"],
    bias: Float[Array, "B H S"],
    key_position: Int[Array, "B H S"],
    query_position: Int[Array, "B T"],
    window: int | None,
) -> Float[Array, "B H R S"]:
    """Adds the bias to logits, and makes them `-inf` where a query does not see a slot.

    The R query rows of a KV head are its G query heads times the T tokens, tokens fastest. Masking
    uses `where`, so that the contents of a free slot's key never reach the result.
    """
    rows, tokens = logits.shape[2], query_position.shape[1]
    visible = visible_slots(bias, key_position, query_position, window)
    logits = logits + bias[:, :, None, :]
    grouped = logits.reshape(*logits.shape[:2], rows // tokens, tokens, -1)
    return jnp.where(visible[:, :, None], grouped, -jnp.inf).reshape(logits.shape)


def visible_slots(
    bias: Float[Array, "B H S"],
    key_position: Int[Array, "B H S"],
    query_position: Int[Array, "B T"],
    window: int | None,
) -> Bool[Array, "B H T S"]:
    """Returns whether a query sees a slot: live, not newer than the query, and in its window."""
    q_pos, k_pos = query_position[:, None, :, None], key_position[:, :, None, :]
    visible = (k_pos <= q_pos) & live_slots(bias, key_position)[:, :, None, :]
    return visible if window is None else visible & (k_pos > q_pos - window)


def live_slots(bias: Float[Array, "*S"], key_position: Int[Array, "*S"]) -> Bool[Array, "*S"]:
    """Returns which slots hold a token."""
    return (bias > -jnp.inf) & (key_position >= 0)


def finite_or_zero(top: Float[Array, "*R"]) -> Float[Array, "*R"]:
    """Returns what to subtract before exp: 0 for a row that sees nothing, as exp(-inf - 0) = 0."""
    return jnp.where(top == -jnp.inf, 0.0, top)


def or_one(total: Float[Array, "*R"]) -> Float[Array, "*R"]:
    """Returns what to divide weights by: 1 for a row that sees nothing, whose weights are 0."""
    return jnp.where(total == 0, 1.0, total)
