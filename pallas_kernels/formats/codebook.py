"""Attention's products with keys and values stored as references to a codebook's entries."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt

from pallas_kernels.base.mixing import as_weights, unless_finite, unscaled
from pallas_kernels.base.products import Product, products
from pallas_kernels.base.rows import BLOCK, block_of, counted_rows, over_blocks, take_shared
from pallas_kernels.base.varying import varying

# On CPU, gathering a slot's entry takes as long as this many products of a query row with an entry.
# The kernels always gather, which is cheap on a GPU.
PER_ENTRY = 16
ROTATED = 1024  # rows of all heads together that are rotated at a time


class References(NamedTuple):
    """Keys or values of all slots as `entries[index] · magnitude`, for `codebook_attention`.

    Args:
      entries: E vectors, which all heads of a row share.
      index: the entry of each slot.
      magnitude: what a slot's entry is multiplied by; None: 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import References, codebook_logits
      >>> entries = jnp.array([[[[1.0, 0.0], [0.0, 1.0]]]])
      >>> index = jnp.array([[[1, 0, 1]]], jnp.uint16)
      >>> keys = References(entries, index, magnitude=jnp.array([[[3.0, 1.0, 2.0]]]))
      >>> codebook_logits(jnp.array([[[[2.0, 5.0]]]]), *keys).tolist()
      [[[[15.0, 2.0, 10.0]]]]
    """

    entries: Float[Array, "B 1 E D"]
    index: UInt[Array, "B H S"]  # pyright: ignore[reportIncompatibleMethodOverride]  # a field, no method of tuples
    magnitude: Float[Array, "B H S"] | None = None


def codebook_logits(
    q: Float[Array, "B H R D"],
    entries: Float[Array, "B 1 E D"],
    index: UInt[Array, "B H S"],
    magnitude: Float[Array, "B H S"] | None = None,
    *,
    product: Product | None = None,
    channels: int | None = None,
) -> Float[Array, "B H R S"]:
    """Returns `q · entries[index] · magnitude` in float32, without a decoded copy of all keys.

    Where it is cheaper, products with unrotated channels are computed once per entry and gathered
    per slot. Products with rotated channels also depend on the slot's position, so such channels
    are gathered and rotated a block of slots at a time.

    Args:
      entries: that all heads of a row share.
      index: the entry of each slot.
      magnitude: what a slot's entry is multiplied by; None: 1.
      product: takes the place of `q · k` where keys are rotated when they are read; see
        `base.products.Product`.
      channels: how many leading channels `product` rotates; it leaves the others as they are.
        None: all.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import codebook_logits
      >>> entries = jnp.array([[[[1.0, 0.0], [0.0, 1.0]]]])
      >>> index = jnp.array([[[1, 0, 1]]], jnp.uint16)
      >>> codebook_logits(jnp.array([[[[2.0, 5.0]]]]), entries, index).tolist()
      [[[[5.0, 2.0, 5.0]]]]
    """
    slots, width = index.shape[2], q.shape[3]
    rotates_all = product is not None and channels in (None, width)
    by_entry = not rotates_all and _per_entry(q.shape[2], entries, slots)
    width = width if not by_entry else 0 if product is None else channels
    q = q.astype(entries.dtype)
    out = jnp.zeros((*q.shape[:3], slots), jnp.float32)
    if by_entry:
        per_entry = _einsum("bhrd,bed->bher", q[..., width:], entries[:, 0, :, width:])
        out = jnp.moveaxis(_take_per_head(per_entry, index), 3, 2)

    def add(start: Array | int, count: int, out: Array) -> Array:
        part = block_of(index, start, count, 2)
        logits = multiply(q[..., :width], _take(entries[..., :width], part), start)
        if by_entry:
            logits = logits + block_of(out, start, count, 3)
        return jax.lax.dynamic_update_slice_in_dim(out, logits, start, 3)

    if width:
        multiply, block = (_product, BLOCK) if product is None else (product, _rotated_block(q))
        out = over_blocks(slots, block, add, varying(out, q, entries, index))
    return out if magnitude is None else out * magnitude.astype(jnp.float32)[:, :, None]


def codebook_mix(
    weights: Float[Array, "B H R S"],
    entries: Float[Array, "B 1 E D"],
    index: UInt[Array, "B H S"],
    magnitude: Float[Array, "B H S"] | None = None,
    *,
    live: Bool[Array, "B H S"] | None = None,
) -> Float[Array, "B H R D"]:
    """Returns `Σ_s w_s · entries[index_s] · magnitude_s` in float32, without decoding all values.

    Weights are summed per entry and multiplied with the entries once. Where a row has many more
    entries than a head has slots, decoding the slots block by block is cheaper and done instead.

    Args:
      entries, index, magnitude: as in `codebook_logits`.
      live: the slots whose values count; others have weight 0, and their magnitudes and entries may
        be NaN. None: all.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import codebook_mix
      >>> entries = jnp.array([[[[1.0, 0.0], [0.0, 1.0]]]])
      >>> index = jnp.array([[[1, 0, 1]]], jnp.uint16)
      >>> codebook_mix(jnp.array([[[[1.0, 3.0, 2.0]]]]), entries, index).tolist()
      [[[[3.0, 3.0]]]]
    """
    weights = weights.astype(jnp.float32)
    if magnitude is not None:
        weights = weights * magnitude.astype(jnp.float32)[:, :, None]
        if live is not None:
            # The magnitude of a free slot may be NaN, and 0 · NaN is NaN.
            weights = jnp.where(live[:, :, None], weights, 0.0)
    slots = index.shape[2]
    if not _per_entry(weights.shape[2], entries, slots):
        return _mix_slots(weights, entries, index, live)
    total = _sum_per_entry(jnp.moveaxis(weights, 2, 3), index, entries.shape[2])
    out = _mixed("bher,bed->bhrd", total, entries[:, 0], 2)
    if live is None:
        return out
    return unless_finite(out, lambda: _mix_slots(weights, entries, index, live))


def _mix_slots(
    weights: Float[Array, "B H R S"],
    entries: Float[Array, "B 1 E D"],
    index: UInt[Array, "B H S"],
    live: Bool[Array, "B H S"] | None,
) -> Float[Array, "B H R D"]:
    """Returns `Σ_s w_s · entries[index_s]` of live slots, decoded block by block."""

    def add(start: Array | int, count: int, total: Array) -> Array:
        part = block_of(weights, start, count, 3)
        rows = _take(entries, block_of(index, start, count, 2))
        if live is not None:
            rows = jnp.where(block_of(live, start, count, 2)[..., None], rows, 0)
        return total + _mixed("bhrs,bhsd->bhrd", part, rows, 3)

    total = jnp.zeros((*weights.shape[:3], entries.shape[3]), jnp.float32)
    return over_blocks(index.shape[2], BLOCK, add, varying(total, weights, entries, index))


def _per_entry(query_rows: int, entries: Array, slots: int) -> bool:
    """Returns whether R products per entry cost less than a gather for each slot of a head."""
    return query_rows * entries.shape[2] <= PER_ENTRY * slots


def _rotated_block(q: Array) -> int:
    """Returns how many slots are rotated at a time: those of all heads stay in a core's cache."""
    return max(ROTATED // (counted_rows(q) * q.shape[1]), 16)


def _product(q: Array, keys: Array, start: Array | int) -> Array:
    return products(q, keys)


def _take(entries: Float[Array, "B 1 E D"], index: UInt[Array, "B H N"]) -> Array:
    """Gathers rows `[B, H, N, D]` of entries that the heads share."""
    return take_shared(entries[:, 0], index.astype(jnp.int32))


def _take_per_head(x: Float[Array, "B H E R"], index: UInt[Array, "B H S"]) -> Array:
    """Gathers each head's own numbers of its slots' entries, `[B, H, S, R]`."""

    def take_head(x: Array, index: Array) -> Array:
        return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)

    return jax.vmap(jax.vmap(take_head))(x, index.astype(jnp.int32))


def _sum_per_entry(x: Float[Array, "B H S R"], index: UInt[Array, "B H S"], entries: int) -> Array:
    """Sums each head's numbers by entry, `[B, H, E, R]`."""

    def sum_head(x: Array, index: Array) -> Array:
        zeros = jnp.zeros((entries, x.shape[1]), x.dtype)
        return zeros.at[index].add(x, mode="promise_in_bounds", wrap_negative_indices=False)

    return jax.vmap(jax.vmap(sum_head))(x, index.astype(jnp.int32))


def _mixed(subscripts: str, weights: Array, rows: Array, axis: int) -> Float[Array, "B H R D"]:
    """Sums rows by weights, cast to the dtype of the rows, along an axis of the weights."""
    if rows.dtype != jnp.float16:
        return _einsum(subscripts, weights.astype(rows.dtype), rows)
    # `as_weights` takes weights of at most 1, but norms and sums over an entry's slots may be more.
    most = jnp.abs(weights).max(axis)
    most = jnp.where(most > 0, most, 1.0)
    weights = as_weights(weights / jnp.expand_dims(most, axis), rows.dtype)
    return unscaled(_einsum(subscripts, weights, rows), rows.dtype) * most[..., None]


def _einsum(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)
