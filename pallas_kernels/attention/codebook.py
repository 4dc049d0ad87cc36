"""Attention of a few new tokens over keys and values that are references to a codebook."""

from __future__ import annotations

from jaxtyping import Array, Float

from pallas_kernels.attention.call import stored_attention
from pallas_kernels.attention.decode import attention_by_products, check_slots
from pallas_kernels.attention.forms import codebook_rows
from pallas_kernels.base.dispatch import choose_implementation
from pallas_kernels.base.logits import Mask, Queries, Seen
from pallas_kernels.base.tiles import launch_of
from pallas_kernels.formats.codebook import References, codebook_logits, codebook_mix


def codebook_attention(
    queries: Queries,
    k: References,
    v: References,
    seen: Seen,
    mask: Mask,
    *,
    probabilities: bool = True,
    implementation: str | None = None,
) -> tuple[Float[Array, "B H G T D"], Float[Array, "B H G T"], Float[Array, "B H G T S"] | None]:
    """Computes `decode_attention` over `entries[index] · magnitude`, without a decoded copy.

    Only the reference and the magnitude of each slot are read from memory. All heads of a row share
    the entries, so an entry that is read again is in the device's cache. Keys are rotated in
    registers, by the position of their slot.

    Args:
      k, v: entries, the entry of each slot, and its magnitude.
      queries, seen, mask, probabilities, implementation: as in `decode_attention`.

    Returns:
      Outputs in the dtype of the values' entries (0 for a row that sees nothing), float32
      log-sum-exps, float32 probabilities or None.

    Raises:
      ValueError: shapes that do not fit each other; an unknown implementation, or one that the
        GPU is too old for.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import Mask, Queries, References, Seen, codebook_attention
      >>> seen = Seen(jnp.zeros((1, 1, 3)), jnp.array([[[0, 1, 2]]]))
      >>> book = References(jnp.eye(2)[None, None], jnp.array([[[1, 0, 1]]]), jnp.ones((1, 1, 3)))
      >>> queries = Queries(jnp.zeros((1, 1, 1, 1, 2)), jnp.array([[1]]))
      >>> out, _, _ = codebook_attention(queries, book, book, seen, Mask(1.0))
      >>> out.tolist()
      [[[[[0.5, 0.5]]]]]
    """
    chosen = choose_implementation(implementation, *k, *v)
    _check(queries, k, v, seen)
    dtype, turn = v.entries.dtype, seen.turn
    if chosen != "xla":
        return stored_attention(
            queries, codebook_rows(k), codebook_rows(v), seen, mask,
            launch_of("codebook_attention", chosen), probabilities=probabilities, dtype=dtype,
        )  # fmt: skip
    rotated = {} if turn is None else {"product": turn.product, "channels": turn.channels}
    out, lse, p = attention_by_products(
        queries, lambda rows: codebook_logits(rows, *k, **rotated),
        lambda p, live: codebook_mix(p, *v, live=live), seen, mask, dtype,
    )  # fmt: skip
    return out, lse, p if probabilities else None


def _check(queries: Queries, k: References, v: References, seen: Seen) -> None:
    q, store = queries.q, seen.bias.shape
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
            if array is not None and array.shape != store:
                raise ValueError(
                    f"{name}.{part} must have the shape of bias, {store}, got {array.shape}"
                )
    check_slots(queries, store[1:], seen)
