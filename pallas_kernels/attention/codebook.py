"""Attention of a few new tokens over keys and values that are references to a codebook."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.attention.call import stored_attention
from pallas_kernels.attention.decode import attention_by_products, check_slots, check_used
from pallas_kernels.attention.forms import codebook_rows
from pallas_kernels.attention.rotation import Turn
from pallas_kernels.base.dispatch import choose_implementation
from pallas_kernels.formats.codebook import References, codebook_logits, codebook_mix


def codebook_attention(
    q: Float[Array, "B H G T D"],
    k: References,
    v: References,
    bias: Float[Array, "B H S"],
    query_position: Int[Array, "B T"],
    key_position: Int[Array, "B H S"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    turn: Turn | None = None,
    used: Int[Array, "B H"] | None = None,
    probabilities: bool = True,
    implementation: str | None = None,
) -> tuple[Float[Array, "B H G T D"], Float[Array, "B H G T"], Float[Array, "B H G T S"] | None]:
    """Computes `decode_attention` over `entries[index] · magnitude`, without a decoded copy.

    Only the reference and the magnitude of each slot are read from memory. All heads of a row share
    the entries, so an entry that is read again is in the device's cache. Keys are rotated in
    registers, by the position of their slot.

    Args:
      q: queries, grouped under their KV head.
      k, v: entries, the entry of each slot, and its magnitude.
      bias, query_position, key_position, scale, window, soft_cap, used, probabilities,
        implementation: as in `decode_attention`.
      turn: rotation of keys when they are read; None: no rotation.

    Returns:
      Outputs in the dtype of the values' entries (0 for a row that sees nothing), float32
      log-sum-exps, float32 probabilities or None.

    Raises:
      ValueError: shapes that do not fit each other; an unknown implementation, or one that the
        GPU is too old for.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import References, codebook_attention
      >>> at = jnp.array([[[0, 1, 2]]])
      >>> book = References(jnp.eye(2)[None, None], jnp.array([[[1, 0, 1]]]), jnp.ones((1, 1, 3)))
      >>> out, _, _ = codebook_attention(jnp.zeros((1, 1, 1, 1, 2)), book, book,
      ...                                jnp.zeros((1, 1, 3)), at[0, :, 1:2], at, scale=1.0)
      >>> out.tolist()
      [[[[[0.5, 0.5]]]]]
    """
    chosen = choose_implementation(implementation, *k, *v)
    _check(q, k, v, bias, query_position, key_position)
    check_used(used, q)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    dtype = v.entries.dtype
    if chosen != "xla":
        return stored_attention(
            "codebook_attention", q, codebook_rows(k), codebook_rows(v), bias, query_position,
            key_position, end=used, turn=turn, probabilities=probabilities,
            chosen=chosen, dtype=dtype, **options,
        )  # fmt: skip
    rotated = {} if turn is None else {"product": turn.product, "channels": turn.channels}
    out, lse, p = attention_by_products(
        q, lambda rows: codebook_logits(rows, *k, **rotated),
        lambda p, live: codebook_mix(p, *v, live=live), bias, query_position, key_position,
        dtype=dtype, **options,
    )  # fmt: skip
    return out, lse, p if probabilities else None


def _check(q, k: References, v: References, bias, query_position, key_position) -> None:
    if q.ndim != 5:
        raise ValueError(f"q must be [B, H, G, T, D], got {q.shape}")
    for name, x in (("k", k), ("v", v)):
        entries = x.entries.shape
        if len(entries) != 4 or (*entries[:2], entries[3]) != (q.shape[0], 1, q.shape[4]):
            raise ValueError(
                f"{name}.entries must be [B, 1, E, D] with the B and D of q {q.shape}, got "
                f"{entries}"
            )
        for part, array in (("index", x.index), ("magnitude", x.magnitude)):
            if array is not None and array.shape != bias.shape:
                raise ValueError(
                    f"{name}.{part} must have the shape of bias, {bias.shape}, got {array.shape}"
                )
    check_slots(q, bias.shape[1:], bias, query_position, key_position, q.shape[1])
