"""Merges rows of a cache into one another: weighted means, in place."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.base import route
from pallas_kernels.base.dispatch import choose_implementation
from pallas_kernels.base.kernel_parts import load_rows, program_part, store_rows
from pallas_kernels.base.rows import over_blocks, take_slots
from pallas_kernels.base.tiles import power_of_two
from pallas_kernels.grouping.segment_sum import Segments, Targets, add_into, targets_of

BLOCK = 512  # rows that are added at a time: as many as stay in a CPU's caches


def segment_merge(
    rows: Float[Array, "B H S D"],
    into: Int[Array, "B H S"],
    weights: Float[Array, "B H S"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B H S D"]:
    """Puts the weighted mean of each segment into its target's row.

    Row s belongs to the segment of row `into[s]`, its target. With M the rows of a segment,
    `out[target] = Σ_M w x / Σ_M w`. All other rows come back unchanged: rows that were merged
    away, targets of no other row, and targets whose rows all have weight 0.

    The kernel adds up each target's rows in the order of their numbers and writes every row once.
    XLA adds each row to its target. On a GPU the order of these atomic additions, and so the
    rounding of a sum, differs from run to run.

    Args:
      into: target of each row; S: none. A target must be its own target.
      weights: weights of the rows, non-negative, float32.
      implementation: `"pallas"` (the kernel), `"interpret"` (the kernel, interpreted on any
        device), `"xla"`, or None: the kernel on a GPU that can run it, XLA elsewhere.

    Returns:
      The rows in their dtype; sums are float32.

    Raises:
      ValueError: shapes that do not fit each other; an unknown implementation, or one that the
        GPU is too old for.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import segment_merge
      >>> rows = jnp.array([[[[1.0], [3.0], [8.0]]]])
      >>> segment_merge(rows, jnp.array([[[1, 1, 2]]]), jnp.array([[[3.0, 1.0, 1.0]]])).tolist()
      [[[[1.0], [1.5], [8.0]]]]
    """
    chosen = choose_implementation(implementation, rows)
    if rows.ndim != 4:
        raise ValueError(f"rows must be [B, H, S, D], got {rows.shape}")
    for name, x in (("into", into), ("weights", weights)):
        if x.shape != rows.shape[:3]:
            raise ValueError(f"{name} must have shape {rows.shape[:3]}, got {x.shape}")
    size = rows.shape[2]
    if chosen != "xla" and rows.size:
        segments = Segments.of(into.astype(jnp.int32), size)
        return _merge(rows, weights.astype(jnp.float32), segments, chosen == "interpret")
    slot = jax.lax.broadcasted_iota(jnp.int32, into.shape, 2)
    moves = (into != slot) & (into < size)
    target = jnp.where(moves, into, size)
    total = add_into(jnp.zeros_like(weights), into, weights)
    received = add_into(jnp.zeros_like(into), target, moves.astype(into.dtype)) > 0
    total = jnp.where(total > 0, total, jnp.inf)  # rows of weight 0 add nothing
    # A target is scaled in place and the other rows are added to it. This takes fewer passes over
    # the rows than summing all of them and then choosing between sums and rows.
    target_share = jnp.where(received & (total < jnp.inf), weights / total, 1.0)
    share = jnp.where(moves, weights / take_slots(total, jnp.minimum(into, size - 1)), 0.0)

    def add(start: Array | int, count: int, out: Array) -> Array:
        """Adds the rows from `start` on to those of their targets."""
        part, to, by = (
            jax.lax.dynamic_slice_in_dim(x, start, count, 2) for x in (rows, target, share)
        )
        return add_into(out, to, part.astype(jnp.float32) * by[..., None])

    # Adds block by block, so that the scaled rows are never held all at once.
    out = over_blocks(size, BLOCK, add, rows.astype(jnp.float32) * target_share[..., None])
    return out.astype(rows.dtype)


def _merge(
    rows: Float[Array, "B H S D"],
    weights: Float[Array, "B H S"],
    segments: Segments,
    interpret: bool,
) -> Float[Array, "B H S D"]:
    """Merges by one launch, after those that find the segments."""
    tile = targets_of(rows.shape[3], rows.shape[2])
    axes = (0, 1)
    return route.pallas_call(
        functools.partial(_kernel, tile=tile),
        grid=(*rows.shape[:2], pl.cdiv(rows.shape[2], tile)),
        in_specs=[program_part(rows, axes), program_part(weights, axes), *segments.parts()],
        out_specs=program_part(rows, axes),
        out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        num_stages=1,
        interpret=interpret,
        name="segment_merge",
    )(rows, weights, *segments)


def _kernel(rows, weights, order, first, count, out, *, tile: int):
    """Writes a tile of rows: means if they are targets of other rows, else their former values."""
    targets = Targets.of(order, first, count, tile)
    # Rows that other rows do not go into have nothing to add up.
    members = jnp.where(targets.count > 1, targets.count, 0)

    def weigh(number, wanted):
        return route.load(weights.at[number], mask=wanted, other=jnp.float32(0))

    def add_weights(number, wanted, total):
        return total + weigh(number, wanted).sum(1)

    total = targets.fold(members, add_weights, jnp.zeros((tile,), jnp.float32))
    merged = total > 0

    def add_rows(number, wanted, mean):
        share = weigh(number, wanted) / jnp.where(merged, total, 1.0)[:, None]
        row = load_rows(rows, number, wanted).astype(jnp.float32)
        return mean + (row * share[:, :, None]).sum(1)

    members = jnp.where(merged, members, 0)
    mean = targets.fold(
        members, add_rows, jnp.zeros((tile, power_of_two(rows.shape[1])), jnp.float32)
    )
    before = load_rows(rows, targets.target, targets.there)
    after = jnp.where(merged[:, None], mean.astype(rows.dtype), before)
    store_rows(out, targets.target, targets.there, after)
