"""Attention of a few new tokens over keys and values of 8 and 4 bits, read as they are stored."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.attention.call import stored_attention
from pallas_kernels.attention.decode import attention_by_products, check_slots, check_used
from pallas_kernels.attention.forms import quantized_rows
from pallas_kernels.attention.rotation import Turn
from pallas_kernels.attention.tpu_forms import reads
from pallas_kernels.base.dispatch import choose_implementation
from pallas_kernels.formats.bits import Axis, Encoded, quantized_logits, quantized_mix


def quantized_attention(
    q: Float[Array, "B H G T D"],
    k: Encoded,
    v: Encoded,
    bias: Float[Array, "B H S"],
    query_position: Int[Array, "B T"],
    key_position: Int[Array, "B H S"],
    *,
    scale: float,
    key_axis: Axis = "token",
    window: int | None = None,
    soft_cap: float | None = None,
    turn: Turn | None = None,
    used: Int[Array, "B H"] | None = None,
    probabilities: bool = True,
    implementation: str | None = None,
) -> tuple[Float[Array, "B H G T D"], Float[Array, "B H G T"], Float[Array, "B H G T S"] | None]:
    """Computes `decode_attention` over encoded keys and values, without a decoded copy.

    The kernel decodes a tile at a time in registers. 8-bit numbers go into the products as they
    are, since bfloat16 holds them exactly, and the slots' scales multiply logits and probabilities.
    4-bit numbers are decoded to the dtype of q.

    Args:
      q: queries, grouped under their KV head.
      k, v: from `quantise_slots` (8 bits, float8) or `quantise_groups` (4 bits); values must have
        groups of channels.
      bias, query_position, key_position, scale, window, soft_cap, used, probabilities,
        implementation: as in `decode_attention`.
      key_axis: axis of the keys' groups.
      turn: rotation of keys when they are read; None: no rotation.

    Returns:
      Outputs in the dtype of `q` (0 for a row that sees nothing), float32 log-sum-exps, float32
      probabilities or None.

    Raises:
      ValueError: shapes that do not fit each other; an unknown implementation, one that the GPU is
        too old for, or `"pallas"` for `values` of 2 to 4 GiB (None then takes XLA).

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import Encoded, quantise_slots, quantized_attention
      >>> k = Encoded(*quantise_slots(jnp.zeros((1, 1, 3, 2))))
      >>> v = Encoded(*quantise_slots(jnp.array([[[[127.0, 2.0], [127.0, 6.0], [9.0, 9.0]]]])))
      >>> at = jnp.array([[[0, 1, 2]]])
      >>> out, _, _ = quantized_attention(jnp.zeros((1, 1, 1, 1, 2)), k, v, jnp.zeros((1, 1, 3)),
      ...                                 at[0, :, 1:2], at, scale=1.0)
      >>> out.tolist()
      [[[[[127.0, 4.0]]]]]
    """
    _check(q, k, v, bias, query_position, key_position)
    check_used(used, q)
    rows = quantized_rows(k, q.dtype, key_axis), quantized_rows(v, q.dtype)
    # The kernel for TPUs does not rotate keys.
    chosen = choose_implementation(implementation, *k, *v, for_tpu=turn is None and reads(*rows))
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    if chosen != "xla":
        return stored_attention(
            "quantized_attention", q, *rows, bias, query_position, key_position, end=used,
            turn=turn, probabilities=probabilities, chosen=chosen, dtype=q.dtype, **options,
        )  # fmt: skip
    product = None if turn is None else turn.product
    out, lse, p = attention_by_products(
        q, lambda rows: quantized_logits(rows, *k, axis=key_axis, product=product),
        lambda p, live: quantized_mix(p, *v, live=live), bias, query_position, key_position,
        dtype=q.dtype, **options,
    )  # fmt: skip
    return out, lse, p if probabilities else None


def _check(q, k: Encoded, v: Encoded, bias, query_position, key_position) -> None:
    if q.ndim != 5:
        raise ValueError(f"q must be [B, H, G, T, D], got {q.shape}")
    for name, x in (("k", k), ("v", v)):
        width = q.shape[4] if x.low is None else q.shape[4] // 2
        store = (*q.shape[:2], bias.shape[-1], width)
        if x.values.shape != store:
            raise ValueError(f"{name}.values must have shape {store}, got {x.values.shape}")
    check_slots(q, k.values.shape[1:3], bias, query_position, key_position, q.shape[1])
