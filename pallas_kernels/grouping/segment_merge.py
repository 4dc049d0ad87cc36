"""Merging rows of a cache into one another: weighted means, in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.base.rows import take_slots

BLOCK = 512  # rows that are added at a time: on CPU, what stays in its caches


def segment_merge(
    rows: Float[Array, "B H S D"],
    into: Int[Array, "B H S"],
    weights: Float[Array, "B H S"],
) -> Float[Array, "B H S D"]:
    """The weighted mean of every segment, in its target's row.

    Row s belongs to the segment of row `into[s]`, which is its target: with M the rows of a
    segment, `out[target] = Σ_M w x / Σ_M w`. All other rows come back exactly as they are:
    rows that were merged away, targets of no other row, and targets whose rows all weigh nothing.

    Args:
      into: target of each row, S = none. A target must be its own target.
      weights: non-negative, float32.

    Returns:
      The rows in their dtype; sums are float32.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import segment_merge
      >>> rows = jnp.array([[[[1.0], [3.0], [8.0]]]])
      >>> segment_merge(rows, jnp.array([[[1, 1, 2]]]), jnp.array([[[3.0, 1.0, 1.0]]])).tolist()
      [[[[1.0], [1.5], [8.0]]]]
    """
    size = rows.shape[2]
    slot = jax.lax.broadcasted_iota(jnp.int32, into.shape, 2)
    moves = (into != slot) & (into < size)
    target = jnp.where(moves, into, size)
    total = _add_into(jnp.zeros_like(weights), into, weights)
    received = _add_into(jnp.zeros_like(into), target, moves.astype(into.dtype)) > 0
    total = jnp.where(total > 0, total, jnp.inf)  # what weighs nothing adds nothing
    # A target is scaled in place and the others are added to it. This takes fewer passes over the
    # rows than summing all of them and then choosing between sums and rows.
    own = jnp.where(received & (total < jnp.inf), weights / total, 1.0)
    share = jnp.where(moves, weights / take_slots(total, jnp.minimum(into, size - 1)), 0.0)

    def add(start: Array | int, count: int, out: Array) -> Array:
        """Adds the rows from `start` on to their targets'."""
        part, to, by = (
            jax.lax.dynamic_slice_in_dim(x, start, count, 2) for x in (rows, target, share)
        )
        return _add_into(out, to, part.astype(jnp.float32) * by[..., None])

    # In blocks, so that the scaled rows are never held all at once.
    blocks, rest = divmod(size, BLOCK)
    out = rows.astype(jnp.float32) * own[..., None]
    if blocks:
        out = jax.lax.fori_loop(0, blocks, lambda i, out: add(i * BLOCK, BLOCK, out), out)
    if rest:
        out = add(blocks * BLOCK, rest, out)
    return out.astype(rows.dtype)


_add_into = jax.vmap(
    jax.vmap(lambda x, into, more: x.at[into].add(more, mode="drop", wrap_negative_indices=False))
)
