"""Comparing keys of a cache with one another, pair by pair."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.base.rows import take_slots
from pallas_kernels.grouping.cosine import above, inverse_length, round_cosine

BLOCK = 512  # pairs that are compared at a time: on CPU, what stays in its caches


def pair_cosine(
    keys: Float[Array, "B H S D"],
    first: Int[Array, "B H N"],
    second: Int[Array, "B H N"],
) -> Float[Array, "B H N"]:
    """Cosine of two keys, `a·b / (|a| |b|)`, for N pairs of slots; 0 where one is 0; float32.

    Cosines are rounded to multiples of a step: the first power of two that is no less than
    `2^-21 √D`, with D channels. Half a step is more than the rounding error of a sum of D products.
    So the cosine of keys that are equal, or positive multiples of each other, is exactly 1. Equal
    cosines of different pairs are equal numbers, except the few halfway between two multiples.

    Args:
      first, second: the slots of each pair.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import pair_cosine
      >>> keys = jnp.array([[[[2.0, 0.0], [0.6, 0.8]]]])
      >>> round(float(pair_cosine(keys, jnp.array([[[0]]]), jnp.array([[[1]]]))[0, 0, 0]), 4)
      0.6
    """
    return round_cosine(_in_blocks(_cosine, keys, first, second), keys.shape[3])


def pair_distance(
    keys: Float[Array, "B H S D"],
    first: Int[Array, "B H N"],
    second: Int[Array, "B H N"],
) -> Float[Array, "B H N"]:
    """Distance of two keys, `|a - b|`, for N pairs of slots; float32.

    It is exactly 0 where it is no more than the rounding of the keys' dtype, `4ε |a|`, so that
    equal keys are equal whatever they were computed from.

    Args:
      first, second: the slots of each pair.
    """
    rounding = 4 * float(jnp.finfo(keys.dtype).eps)

    def distance(a: Float[Array, "*N D"], b: Float[Array, "*N D"]) -> Float[Array, "*N"]:
        apart = _length(a - b)
        return jnp.where(apart > rounding * _length(a), apart, 0.0)

    return _in_blocks(distance, keys, first, second)


def join_anchors(
    keys: Float[Array, "B H S D"],
    order: Int[Array, "B H N"],
    pairs: Bool[Array, "B H N"],
    threshold: float,
) -> Bool[Array, "B H N"]:
    """Which entries of `order` join the run after them, from the last to the first.

    An entry joins where `pairs` allows it and the cosine of its key and that of the run's last
    entry, the anchor, rounded as by `pair_cosine`, is above the threshold by more than a step;
    elsewhere the entry is the anchor of a new run.

    Args:
      order: slots.
      pairs: whether an entry may join the next one; the last may not.
    """
    channels = keys.shape[3]

    def step(anchor: Array, entry: tuple[Array, Array]) -> tuple[Array, Array]:
        slot, pair = entry
        key = take_slots(keys, slot[..., None]).astype(jnp.float32)
        cosine = round_cosine(_cosine(key, anchor)[..., 0], channels)
        joins = pair & above(cosine, threshold, channels)
        return jnp.where(joins[..., None, None], anchor, key), joins

    entries = tuple(jnp.moveaxis(x, -1, 0) for x in (order, pairs))
    nothing = jnp.zeros((*keys.shape[:2], 1, keys.shape[3]), jnp.float32)
    _, joins = jax.lax.scan(step, nothing, entries, reverse=True)
    return jnp.moveaxis(joins, 0, -1)


def _in_blocks(
    measure: Callable[[Array, Array], Array], keys: Array, first: Array, second: Array
) -> Float[Array, "B H N"]:
    """`measure` of every pair of keys, block by block: gathered keys are never held all at once."""
    count = first.shape[2]
    block = min(BLOCK, count)
    pairs = jnp.pad(jnp.stack((first, second)), ((0, 0), (0, 0), (0, 0), (0, -count % block)))
    blocks = jnp.moveaxis(pairs.reshape(*pairs.shape[:3], -1, block), 3, 0)

    def measure_block(pair: Int[Array, "2 B H N"]) -> Float[Array, "B H N"]:
        return measure(*(take_slots(keys, index).astype(jnp.float32) for index in pair))

    measured = jnp.moveaxis(jax.lax.map(measure_block, blocks), 0, 2)
    return measured.reshape(*first.shape[:2], -1)[..., :count]


def _cosine(a: Float[Array, "*N D"], b: Float[Array, "*N D"]) -> Float[Array, "*N"]:
    # A batched product: the sum of an elementwise one is several times slower on CPU.
    dots = jnp.einsum("...d,...d->...", a, b, precision=jax.lax.Precision.HIGHEST)
    return dots * inverse_length(a) * inverse_length(b)


def _length(x: Float[Array, "*N D"]) -> Float[Array, "*N"]:
    return jnp.sqrt(jnp.square(x).sum(-1))
