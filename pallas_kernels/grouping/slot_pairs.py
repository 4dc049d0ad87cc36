"""Compares keys of a cache with one another, pair by pair."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.base import route
from pallas_kernels.base.dispatch import choose_implementation
from pallas_kernels.base.kernel_parts import load_rows, program_part
from pallas_kernels.base.rows import take_slots
from pallas_kernels.base.tiles import power_of_two
from pallas_kernels.base.varying import varying
from pallas_kernels.grouping.cosine import EPSILON, above, inverse_length, round_cosine

BLOCK = 512  # pairs that are compared at a time: as many as stay in a CPU's caches
TILE = 4096  # numbers of the first keys of a program's pairs: 4 warps hold both keys in registers


def pair_cosine(
    keys: Float[Array, "B H S D"],
    first: Int[Array, "B H N"],
    second: Int[Array, "B H N"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B H N"]:
    """Returns the cosine of two keys, `a·b / (|a| |b|)`, for N pairs of slots; float32.

    The cosine with a zero key is 0. Cosines are rounded to multiples of a step: the first power of
    two that is at least `2^-21 √D`, with D channels. Half a step is more than the rounding
    error of a sum of D products. So the cosine of keys that are equal, or positive multiples of
    each other, is exactly 1. Equal cosines of different pairs are equal numbers, except the few
    halfway between two multiples.

    Args:
      first, second: the slots of each pair.
      implementation: `"pallas"` (the kernel), `"interpret"` (the kernel, interpreted on any
        device), `"xla"`, or None: the kernel on a GPU that can run it, XLA elsewhere.

    Raises:
      ValueError: shapes that do not fit each other; an unknown implementation, or one that the
        GPU is too old for.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import pair_cosine
      >>> keys = jnp.array([[[[2.0, 0.0], [0.6, 0.8]]]])
      >>> round(float(pair_cosine(keys, jnp.array([[[0]]]), jnp.array([[[1]]]))[0, 0, 0]), 4)
      0.6
    """
    cosine = _measured(_cosine, _tile_cosine, keys, first, second, implementation)
    return round_cosine(cosine, keys.shape[3])


def pair_distance(
    keys: Float[Array, "B H S D"],
    first: Int[Array, "B H N"],
    second: Int[Array, "B H N"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B H N"]:
    """Returns the distance of two keys, `|a - b|`, for N pairs of slots; float32.

    It is exactly 0 where it is at most one rounding error of the keys' dtype, `ε |a| / 2`, or that
    of a few steps in float32, `4 · 2^-23 |a|`. So keys that differ only by rounding count as equal.

    Args:
      first, second: the slots of each pair.
      implementation: `"pallas"` (the kernel), `"interpret"` (the kernel, interpreted on any
        device), `"xla"`, or None: the kernel on a GPU that can run it, XLA elsewhere.

    Raises:
      ValueError: shapes that do not fit each other; an unknown implementation, or one that the
        GPU is too old for.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import pair_distance
      >>> keys = jnp.array([[[[1.0, 1.0], [4.0, 5.0], [1.0, 1.0 + 1e-7]]]])
      >>> pair_distance(keys, jnp.array([[[0, 0]]]), jnp.array([[[1, 2]]])).tolist()
      [[[5.0, 0.0]]]
    """
    rounding = max(float(jnp.finfo(keys.dtype).eps) / 2, 4 * EPSILON)

    def distance(a: Float[Array, "*N D"], b: Float[Array, "*N D"]) -> Float[Array, "*N"]:
        apart = _length(a - b)
        return jnp.where(apart > rounding * _length(a), apart, 0.0)

    return _measured(distance, distance, keys, first, second, implementation)


def join_anchors(
    keys: Float[Array, "B H S D"],
    order: Int[Array, "B H N"],
    pairs: Bool[Array, "B H N"],
    threshold: float,
    *,
    implementation: str | None = None,
) -> Bool[Array, "B H N"]:
    """Returns which entries of `order` join the run after them, from the last to the first.

    The last entry of a run is its anchor. An entry joins if `pairs` allows it and its key's cosine
    with the anchor's key is above the threshold by more than a step; cosines are rounded as by
    `pair_cosine`. Otherwise the entry is the anchor of a new run. The keys to compare depend on
    earlier comparisons, so XLA takes a loop step for each entry. The kernel is one launch, in which
    a program goes through the entries of a head.

    Args:
      keys: keys of all slots.
      order: slots of the entries.
      pairs: whether an entry may join the next one; the last may not.
      threshold: cosine above which an entry joins.
      implementation: `"pallas"` (the kernel), `"interpret"` (the kernel, interpreted on any
        device), `"xla"`, or None: the kernel on a GPU that can run it, XLA elsewhere.

    Raises:
      ValueError: shapes that do not fit each other; an unknown implementation, or one that the
        GPU is too old for.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import join_anchors
      >>> keys = jnp.array([[[[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 3.0]]]])
      >>> order, pairs = jnp.array([[[0, 1, 2, 3]]]), jnp.array([[[True, True, True, False]]])
      >>> join_anchors(keys, order, pairs, threshold=0.9).tolist()  # runs of slots 0, 1 and 2, 3
      [[[True, False, True, False]]]
    """
    chosen = choose_implementation(implementation, keys)
    _check(keys, order=order, pairs=pairs)
    channels = keys.shape[3]
    if chosen != "xla" and keys.size and order.size:
        return _join(keys, order, pairs, threshold, chosen == "interpret")

    def step(anchor: Array, entry: tuple[Array, Array]) -> tuple[Array, Array]:
        slot, pair = entry
        key = take_slots(keys, slot[..., None]).astype(jnp.float32)
        cosine = round_cosine(_cosine(key, anchor)[..., 0], channels)
        joins = pair & above(cosine, threshold, channels)
        return jnp.where(joins[..., None, None], anchor, key), joins

    entries = jnp.moveaxis(order, -1, 0), jnp.moveaxis(pairs, -1, 0)
    nothing = jnp.zeros((*keys.shape[:2], 1, keys.shape[3]), jnp.float32)
    nothing = varying(nothing, keys, order, pairs)
    _, joins = jax.lax.scan(step, nothing, entries, reverse=True)
    return jnp.moveaxis(joins, 0, -1)


def _measured(
    by_xla: Callable[[Array, Array], Array],
    by_kernel: Callable[[Array, Array], Array],
    keys: Array,
    first: Array,
    second: Array,
    implementation: str | None,
) -> Float[Array, "B H N"]:
    """Returns the result of `by_xla`, or in a kernel of `by_kernel`, for each pair of keys."""
    chosen = choose_implementation(implementation, keys)
    _check(keys, first=first, second=second)
    if chosen == "xla" or not keys.size or not first.size:
        return _in_blocks(by_xla, keys, first, second)
    channels, pairs = keys.shape[3], first.shape[2]
    tile = max(min(TILE // power_of_two(channels), power_of_two(pairs)), 1)
    measured = jax.ShapeDtypeStruct(first.shape, jnp.float32)
    return route.pallas_call(
        functools.partial(_pair_kernel, measure=by_kernel, tile=tile),
        grid=(*first.shape[:2], pl.cdiv(pairs, tile)),
        in_specs=[program_part(x, (0, 1)) for x in (keys, first, second)],
        out_specs=program_part(measured, (0, 1)),
        out_shape=measured,
        num_stages=1,
        interpret=chosen == "interpret",
        name="slot_pairs",
    )(keys, *(x.astype(jnp.int32) for x in (first, second)))


def _check(keys: Array, **lists: Array) -> None:
    """Raises ValueError unless two lists of the same length belong to each row and head."""
    if keys.ndim != 4:
        raise ValueError(f"keys must be [B, H, S, D], got {keys.shape}")
    (name, first), (second_name, second) = lists.items()
    if first.ndim != 3 or first.shape[:2] != keys.shape[:2]:
        expected = f"{keys.shape[:2]} and a length"
        raise ValueError(f"{name} must have shape {expected}, got {first.shape}")
    if second.shape != first.shape:
        raise ValueError(f"{second_name} must have shape {first.shape}, got {second.shape}")


def _pair_kernel(keys, first, second, measured, *, measure: Callable, tile: int):
    """Compares a tile of pairs."""
    pair = pl.program_id(2) * tile + jnp.arange(tile, dtype=jnp.int32)
    there = pair < first.shape[0]
    slots = (route.load(x.at[pair], mask=there, other=np.int32(0)) for x in (first, second))
    rows = (load_rows(keys, slot, there).astype(jnp.float32) for slot in slots)
    route.store(measured.at[pair], measure(*rows), mask=there)


def _join(keys, order, pairs, threshold: float, interpret: bool) -> Bool[Array, "B H N"]:
    """Joins entries by one launch; a program goes through the entries of a row and head."""
    joins = jax.ShapeDtypeStruct(order.shape, jnp.int32)
    joined = route.pallas_call(
        functools.partial(_anchor_kernel, threshold=threshold),
        grid=order.shape[:2],
        in_specs=[program_part(x, (0, 1)) for x in (keys, order, pairs)],
        out_specs=program_part(joins, (0, 1)),
        out_shape=joins,
        num_warps=1,  # sums over the channels of one key need no shared memory then
        num_stages=1,
        interpret=interpret,
        name="join_anchors",
    )(keys, order.astype(jnp.int32), pairs.astype(jnp.int32))
    return joined > 0


def _anchor_kernel(keys, order, pairs, joins, *, threshold: float):
    """Goes through the entries of a row and head, from the last to the first."""
    entries, channels = order.shape[0], keys.shape[1]

    def load(entry):
        slot = jnp.full((1,), order[jnp.maximum(entry, 0)])
        return load_rows(keys, slot, slot >= 0).astype(jnp.float32)

    def go(i, carry):
        anchor, key = carry
        entry = np.int32(entries - 1) - i
        before = load(entry - 1)  # on its way while this entry is compared
        cosine = round_cosine(_tile_cosine(key, anchor), channels, in_kernel=True)
        join = (pairs[entry] > 0) & above(cosine, threshold, channels)
        route.store(joins.at[jnp.full((1,), entry)], join.astype(jnp.int32))
        return jnp.where(join[:, None], anchor, key), before

    last = load(np.int32(entries - 1))
    jax.lax.fori_loop(np.int32(0), np.int32(entries), go, (jnp.zeros_like(last), last))


def _in_blocks(
    measure: Callable[[Array, Array], Array], keys: Array, first: Array, second: Array
) -> Float[Array, "B H N"]:
    """Measures pairs block by block, so that gathered keys are never held all at once."""
    count = first.shape[2]
    block = min(BLOCK, count)
    pairs = jnp.pad(jnp.stack((first, second)), ((0, 0), (0, 0), (0, 0), (0, -count % block)))
    blocks = jnp.moveaxis(pairs.reshape(*pairs.shape[:3], -1, block), 3, 0)

    def measure_block(pair: Int[Array, "2 B H N"]) -> Float[Array, "B H N"]:
        return measure(*(take_slots(keys, index).astype(jnp.float32) for index in pair))

    measured = jnp.moveaxis(jax.lax.map(measure_block, blocks), 0, 2)
    return measured.reshape(*first.shape[:2], -1)[..., :count]


def _cosine(a: Float[Array, "*N D"], b: Float[Array, "*N D"]) -> Float[Array, "*N"]:
    # Uses a batched product: summing an elementwise product is several times slower on CPU.
    dots = jnp.einsum("...d,...d->...", a, b, precision=jax.lax.Precision.HIGHEST)
    return dots * inverse_length(a) * inverse_length(b)


def _tile_cosine(a: Float[Array, "*N D"], b: Float[Array, "*N D"]) -> Float[Array, "*N"]:
    """Returns cosines in a kernel, which has no batched product."""
    return (a * b).sum(-1) * inverse_length(a) * inverse_length(b)


def _length(x: Float[Array, "*N D"]) -> Float[Array, "*N"]:
    return jnp.sqrt(jnp.square(x).sum(-1))
