"""Attention of one or a few new tokens over a cache."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common import NEG_INF, check_implementation, mask_products, masked_logits


def decode_attention(
    q: Float[Array, "B H G T D"],
    k: Float[Array, "B H S D"],
    v: Float[Array, "B H S D"],
    bias: Float[Array, "B H S"],
    query_position: Int[Array, "B T"],
    key_position: Int[Array, "B H S"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B H G T D"], Float[Array, "B H G T"], Float[Array, "B H G T S"]]:
    """Softmax attention of a few queries over the slots they see, with its probabilities.

    The same function of the same arguments as `prompt_attention`, for a number of queries so small
    that their logits over all slots may exist at once.

    Returns:
      Outputs in the dtype of `v` (0 for a row that sees nothing), float32 log-sum-exps (`-inf` for
      such a row), float32 probabilities that each slot received from each query.
    """
    check_implementation(implementation)
    batch, kv_heads, group, tokens, head_dim = q.shape
    rows = q.reshape(batch, kv_heads, group * tokens, head_dim)
    logits = masked_logits(
        rows, k, bias, key_position, query_position,
        scale=scale, window=window, soft_cap=soft_cap,
    )  # fmt: skip
    probabilities, lse = _softmax(logits)
    out = jnp.einsum(
        "bhqk,bhkd->bhqd", probabilities.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    per_query = (batch, kv_heads, group, tokens)
    return (
        out.astype(v.dtype).reshape(*per_query, head_dim),
        lse.reshape(per_query),
        probabilities.reshape(*per_query, -1),
    )


def decode_probabilities(
    products: Float[Array, "B H R S"],
    bias: Float[Array, "B H S"],
    query_position: Int[Array, "B T"],
    key_position: Int[Array, "B H S"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "B H R S"]:
    """The probabilities of `decode_attention`, from the products `q·k` of stored keys.

    The R rows of a KV head are its G query heads times the T tokens, tokens fastest.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import decode_probabilities
      >>> products, at = jnp.zeros((1, 1, 1, 4)), jnp.array([[[0, 1, 2, 3]]])
      >>> decode_probabilities(products, products[:, :, 0], at[0, :, 1:2], at, scale=1.0).tolist()
      [[[[0.5, 0.5, 0.0, 0.0]]]]
    """
    kind = {"scale": scale, "window": window, "soft_cap": soft_cap}
    return _softmax(mask_products(products, bias, key_position, query_position, **kind))[0]


def _softmax(
    logits: Float[Array, "B H R S"],
) -> tuple[Float[Array, "B H R S"], Float[Array, "B H R 1"]]:
    """Probabilities, all 0 for a row that sees nothing, and log-sum-exps."""
    top = logits.max(-1, keepdims=True)
    weights = jnp.exp(logits - jnp.where(top == NEG_INF, 0.0, top))
    total = weights.sum(-1, keepdims=True)
    return weights / jnp.where(total == 0, 1.0, total), top + jnp.log(total)
