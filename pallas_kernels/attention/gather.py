"""Attention of a few new tokens over the slots of a list, read where they are stored."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.call import probabilities_of
from pallas_kernels.attention.decode import check_rows, decode_attention
from pallas_kernels.attention.forms import dense_rows
from pallas_kernels.attention.kernel import split_attention
from pallas_kernels.base.dispatch import choose_implementation
from pallas_kernels.base.logits import Mask, Queries, Seen, visible_slots
from pallas_kernels.base.rows import take_slots
from pallas_kernels.base.tiles import launch_of


def gather_attention(
    queries: Queries,
    k: Float[Array, "B H S D"],
    v: Float[Array, "B H S D"],
    seen: Seen,
    mask: Mask,
    *,
    probabilities: bool = True,
    implementation: str | None = None,
) -> tuple[Float[Array, "B K G T D"], Float[Array, "B K G T"], Float[Array, "B K G T N"] | None]:
    """Computes `decode_attention` over the listed slots alone, as if there were no others.

    The reference gathers the rows and attends to the copy. The kernel reads rows, bias and position
    of the slots directly from the store.

    Args:
      queries: as in `decode_attention`, grouped under their list. K = H, or a multiple of it
        (K = H · G, and one query head per list).
      k, v: keys and values of all slots.
      seen: bias and position of all slots, and the index of those that are looked at.
      mask, implementation: as in `decode_attention`.
      probabilities: whether to return them (static).

    Returns:
      Outputs in the dtype of `v`, float32 log-sum-exps, float32 probabilities of each entry of the
      list, or None.

    Raises:
      ValueError: shapes that do not fit each other; an unknown implementation, or one that the
        GPU is too old for.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import Mask, Queries, Seen, gather_attention
      >>> q, k = jnp.zeros((1, 1, 1, 1, 2)), jnp.zeros((1, 1, 3, 2))
      >>> v = jnp.array([[[[1.0, 2.0], [3.0, 6.0], [9.0, 9.0]]]])
      >>> index = jnp.array([[[2, 0, -1]]])
      >>> seen = Seen(jnp.zeros((1, 1, 3)), jnp.array([[[0, 1, 2]]]), index=index)
      >>> out, _, p = gather_attention(Queries(q, jnp.array([[2]])), k, v, seen, Mask(1.0))
      >>> out.tolist(), p.tolist()
      ([[[[[5.0, 5.5]]]]], [[[[[0.5, 0.5, 0.0]]]]])
    """
    chosen = choose_implementation(implementation, k, v)
    check_rows(queries, k, v, seen._replace(end=None, index=None))
    lists, index = queries.q.shape[:2], seen.index
    if index is None or index.ndim != 3 or index.shape[:2] != lists:
        shape = None if index is None else index.shape
        raise ValueError(f"index must be [B, K, N] with B, K = {lists}, got {shape}")
    k, index = seen.turned(k), index.astype(jnp.int32)
    seen = seen._replace(index=index, end=_end(index), turn=None)
    if chosen == "xla":
        # An entry of -1 gathers slot 0, with the bias and position of a free slot.
        k, v = (take_slots(x, jnp.maximum(index, 0)) for x in (k, v))
        return decode_attention(
            queries, k, v, seen.listed(), mask, probabilities=probabilities, implementation="xla"
        )
    out, lse, logits = split_attention(
        queries, dense_rows(k), dense_rows(v), seen, mask, launch_of("gather_attention", chosen),
        with_logits=probabilities, dtype=v.dtype,
    )  # fmt: skip
    if not probabilities:
        return out, lse, None
    visible = visible_slots(seen.listed(), queries.position, mask.window)
    return out, lse, probabilities_of(logits, lse, visible)


def _end(index: Int[Array, "B K N"]) -> Int[Array, "B K"]:
    """Returns the end of the places that name a slot; lists need not be read beyond it."""
    place = jnp.arange(index.shape[2], dtype=jnp.int32)[None, None]
    return jnp.where(index >= 0, place + 1, 0).max(2, initial=0)
