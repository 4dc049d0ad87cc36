"""Attention of a few new tokens over the slots of a list, read where they are stored."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.call import probabilities_of
from pallas_kernels.attention.decode import check_rows, decode_attention
from pallas_kernels.attention.forms import dense_rows
from pallas_kernels.attention.kernel import Slots, split_attention
from pallas_kernels.base.dispatch import choose_implementation
from pallas_kernels.base.logits import visible_slots
from pallas_kernels.base.rows import take_slots
from pallas_kernels.base.tiles import tile_of


def gather_attention(
    q: Float[Array, "B K G T D"],
    k: Float[Array, "B H S D"],
    v: Float[Array, "B H S D"],
    index: Int[Array, "B K N"],
    bias: Float[Array, "B H S"],
    query_position: Int[Array, "B T"],
    key_position: Int[Array, "B H S"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    probabilities: bool = True,
    implementation: str | None = None,
) -> tuple[Float[Array, "B K G T D"], Float[Array, "B K G T"], Float[Array, "B K G T N"] | None]:
    """Computes `decode_attention` over the listed slots alone, as if there were no others.

    The reference gathers the rows and attends to the copy. The kernel reads rows, bias and position
    of the slots directly from the store.

    Args:
      q: queries, grouped under their list. K = H, or a multiple of it (K = H · G, and one query
        head per list): list k reads head `k // (K / H)`.
      k, v, bias, key_position: keys, values, bias and position of all slots.
      index: slots of each list, below S, in any order; -1: none. A slot that is listed twice
        counts twice.
      query_position: token position per query, -1 = padding (such a row gives 0).
      scale, window, soft_cap, implementation: as in `decode_attention`.
      probabilities: whether to return them (static).

    Returns:
      Outputs in the dtype of `v`, float32 log-sum-exps, float32 probabilities of each entry of the
      list, or None.

    Raises:
      ValueError: shapes that do not fit each other; an unknown implementation, or one that the
        GPU is too old for.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import gather_attention
      >>> q, k = jnp.zeros((1, 1, 1, 1, 2)), jnp.zeros((1, 1, 3, 2))
      >>> v = jnp.array([[[[1.0, 2.0], [3.0, 6.0], [9.0, 9.0]]]])
      >>> position, index = jnp.array([[[0, 1, 2]]]), jnp.array([[[2, 0, -1]]])
      >>> out, _, p = gather_attention(q, k, v, index, jnp.zeros((1, 1, 3)), position[0, :, 2:],
      ...                              position, scale=1.0)
      >>> out.tolist(), p.tolist()
      ([[[[[5.0, 5.5]]]]], [[[[[0.5, 0.5, 0.0]]]]])
    """
    chosen = choose_implementation(implementation, k, v)
    check_rows(q, k, v, bias, query_position, key_position, q.shape[1])
    if index.ndim != 3 or index.shape[:2] != q.shape[:2]:
        raise ValueError(f"index must be [B, K, N] with B, K = {q.shape[:2]}, got {index.shape}")
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    index = index.astype(jnp.int32)
    if chosen == "xla":
        # An entry of -1 gathers slot 0, with the bias and position of a free slot.
        k, v = (take_slots(x, jnp.maximum(index, 0)) for x in (k, v))
        list_bias, list_position = _of_list(bias, key_position, index)
        return decode_attention(
            q, k, v, list_bias, query_position, list_position,
            probabilities=probabilities, implementation="xla", **options,
        )  # fmt: skip
    out, lse, logits = split_attention(
        q, dense_rows(k), dense_rows(v), Slots(bias, key_position, _end(index), index=index),
        query_position, tile=tile_of("gather_attention"), with_logits=probabilities,
        interpret=chosen == "interpret", dtype=v.dtype, **options,
    )  # fmt: skip
    if not probabilities:
        return out, lse, None
    visible = visible_slots(*_of_list(bias, key_position, index), query_position, window)
    return out, lse, probabilities_of(logits, lse, visible)


def _end(index: Int[Array, "B K N"]) -> Int[Array, "B K"]:
    """Returns the end of the places that name a slot; lists need not be read beyond it."""
    place = jnp.arange(index.shape[2], dtype=jnp.int32)[None, None]
    return jnp.where(index >= 0, place + 1, 0).max(2, initial=0)


def _of_list(bias, key_position, index) -> tuple[Float[Array, "B K N"], Int[Array, "B K N"]]:
    """Returns bias and position of the listed slots; those of a free slot where an entry is -1."""
    named, slot = index >= 0, jnp.maximum(index, 0)
    return (
        jnp.where(named, take_slots(bias, slot), -jnp.inf),
        jnp.where(named, take_slots(key_position, slot), -1),
    )
