"""Attention of a few new tokens over keys and values of 8 and 4 bits, read as they are stored."""

from __future__ import annotations

from jaxtyping import Array, Float

from pallas_kernels.attention.call import stored_attention
from pallas_kernels.attention.decode import attention_by_products, check_slots
from pallas_kernels.attention.forms import quantized_rows
from pallas_kernels.attention.tpu_forms import reads
from pallas_kernels.base.dispatch import choose_implementation
from pallas_kernels.base.logits import Mask, Queries, Seen
from pallas_kernels.base.tiles import launch_of
from pallas_kernels.formats.bits import Axis, Encoded, quantized_logits, quantized_mix


def quantized_attention(
    queries: Queries,
    k: Encoded,
    v: Encoded,
    seen: Seen,
    mask: Mask,
    *,
    key_axis: Axis = "token",
    probabilities: bool = True,
    implementation: str | None = None,
) -> tuple[Float[Array, "B H G T D"], Float[Array, "B H G T"], Float[Array, "B H G T S"] | None]:
    """Computes `decode_attention` over encoded keys and values, without a decoded copy.

    The kernel converts a tile at a time in registers, and keys of int8 not at all: queries are cut
    into whole numbers of 8 bits, which together hold 23. bfloat16 holds all 8-bit numbers exactly,
    and the slots' scales multiply logits and probabilities. 4-bit numbers are decoded to the dtype
    of the queries.

    Args:
      k, v: from `quantise_slots` (8 bits, float8) or `quantise_groups` (4 bits); values must have
        groups of channels.
      queries, seen, mask, probabilities, implementation: as in `decode_attention`.
      key_axis: axis of the keys' groups.

    Returns:
      Outputs in the dtype of the queries (0 for a row that sees nothing), float32 log-sum-exps,
      float32 probabilities or None.

    Raises:
      ValueError: shapes that do not fit each other; an unknown implementation, one that the GPU is
        too old for, or `"pallas"` for `values` of 2 to 4 GiB (None then takes XLA).

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import Encoded, Mask, Queries, Seen
      >>> from pallas_kernels import quantise_slots, quantized_attention
      >>> k = Encoded(*quantise_slots(jnp.zeros((1, 1, 3, 2))))
      >>> v = Encoded(*quantise_slots(jnp.array([[[[127.0, 2.0], [127.0, 6.0], [9.0, 9.0]]]])))
      >>> queries = Queries(jnp.zeros((1, 1, 1, 1, 2)), jnp.array([[1]]))
      >>> seen = Seen(jnp.zeros((1, 1, 3)), jnp.array([[[0, 1, 2]]]))
      >>> out, _, _ = quantized_attention(queries, k, v, seen, Mask(1.0))
      >>> out.tolist()
      [[[[[127.0, 4.0]]]]]
    """
    _check(queries, k, v, seen)
    dtype, turn = queries.q.dtype, seen.turn
    rows = quantized_rows(k, dtype, key_axis), quantized_rows(v, dtype)
    # The kernel for TPUs does not rotate keys.
    chosen = choose_implementation(implementation, *k, *v, for_tpu=turn is None and reads(*rows))
    if chosen != "xla":
        launch = None if chosen == "tpu" else launch_of("quantized_attention", chosen)
        return stored_attention(
            queries, *rows, seen, mask, launch, probabilities=probabilities, dtype=dtype
        )
    product = None if turn is None else turn.product
    out, lse, p = attention_by_products(
        queries, lambda rows: quantized_logits(rows, *k, axis=key_axis, product=product),
        lambda p, live: quantized_mix(p, *v, live=live), seen, mask, dtype,
    )  # fmt: skip
    return out, lse, p if probabilities else None


def _check(queries: Queries, k: Encoded, v: Encoded, seen: Seen) -> None:
    q = queries.q
    if q.ndim != 5:
        raise ValueError(f"q must be [B, H, G, T, D], got {q.shape}")
    for name, x in (("k", k), ("v", v)):
        width = q.shape[4] if x.low is None else q.shape[4] // 2
        store = (*q.shape[:2], seen.bias.shape[-1], width)
        if x.values.shape != store:
            raise ValueError(f"{name}.values must have shape {store}, got {x.values.shape}")
    check_slots(queries, k.values.shape[1:3], seen)
