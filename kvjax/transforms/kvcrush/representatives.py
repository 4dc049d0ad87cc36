"""One token for many: groups of evicted tokens, and which of each stands for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.payload import take_slots, write_slots
from kvjax.cache.selection import keep_best
from kvjax.cache.slots import sorted_slots
from pallas_kernels import kmeans

Anchor = Literal["random", "mean", "median", "alternate"]
Pick = Literal["middle", "random"]
Draw = Callable[[Int[Array, "B H R"]], Float[Array, "B H R"]]
_LAST = jnp.iinfo(jnp.int32).max


def anchor_bits(
    kind: Anchor, bits: Bool[Array, "B U N"], there: Bool[Array, "B U"], key: Array | None
) -> Bool[Array, "B N"]:
    """The vector that distances are measured from; one for all rows where it ignores their bits.

    `kind` is `KVCrush.anchor`, whose median is the lower one. Bits are zeros where no vector is
    `there`. `key` is that of the random one.
    """
    size = bits.shape[-1]
    if kind == "random":
        return jax.random.bernoulli(key, jnp.float32(0.5), (1, size))
    if kind == "alternate":
        return (jnp.arange(size) % 2 == 1)[None]
    count = bits.sum(1, dtype=jnp.int32)
    if kind == "mean":
        return 2 * count > there.sum(1, dtype=jnp.int32)[:, None]
    return count > jnp.sort(count, axis=-1)[:, (size - 1) // 2, None]


def bucket_representatives(
    distance: Int[Array, "B U"],
    evicted: Bool[Array, "B H U"],
    buckets: Int[Array, " B"],
    most: int,
    draw: Draw | None,
) -> Bool[Array, "B H U"]:
    """One of each bucket of what a head has evicted, in the order of distance, then of position.

    There are R `buckets`, at most `most` (static); where fewer are evicted, each is a bucket.
    `draw` gives a number u in [0, 1) for each bucket, from the bucket's first: its member
    `⌊u · length⌋` is taken. Without it, its lower median is.
    """
    size = evicted.shape[-1]
    number = jnp.arange(size, dtype=jnp.int32)[None]
    # One sort of whole numbers: by distance, then by position.
    order = jnp.where(evicted, (distance * size + number)[:, None], _LAST)
    order = jnp.sort(order, axis=-1)
    start, length = cut(evicted.sum(-1, dtype=jnp.int32), buckets, min(most, size))

    def at(rank: Int[Array, "B H R"]) -> Int[Array, "B H R"]:
        return take_slots(order, jnp.clip(rank, 0, size - 1)) % size

    if draw is None:
        offset = (length - 1) // 2
    else:
        offset = (draw(at(start)) * length.astype(jnp.float32)).astype(jnp.int32)
        offset = jnp.minimum(offset, length - 1)
    chosen = jnp.where(length > 0, at(start + offset), size)
    return write_slots(jnp.zeros_like(evicted), chosen, jnp.ones(chosen.shape, bool))


def cut(
    members: Int[Array, "B H"], buckets: Int[Array, " B"], most: int
) -> tuple[Int[Array, "B H R"], Int[Array, "B H R"]]:
    """First rank and length of each of R runs of n members, never more runs than members.

    Run i has the ranks `⌊i·n/R⌋ … ⌊(i + 1)·n/R⌋ − 1`; its length is 0 beyond the last.
    """
    members = members[..., None]
    used = jnp.minimum(buckets[:, None, None], members)
    runs = jnp.maximum(used, 1)
    whole, rest = members // runs, members % runs

    def first(i: Int[Array, "1 1 R"]) -> Int[Array, "B H R"]:
        # i·whole + ⌊i·rest/R⌋, eight bits of i apart: the product outgrows int32 from R = 46,341.
        high = (i >> 8) * rest
        low = (high % runs << 8) + (i & 255) * rest
        return i * whole + (high // runs << 8) + low // runs

    i = jnp.arange(most, dtype=jnp.int32)[None, None]
    return first(i), jnp.where(i < used, first(i + 1) - first(i), 0)


def nearest_to_centroids(
    keys: Float[Array, "B H S D"],
    evicted: Bool[Array, "B H S"],
    position: Int[Array, "B H S"],
    count: Int[Array, " B"],
    most: int,
    implementation: str | None = None,
) -> Bool[Array, "B H S"]:
    """The token nearest to each of `count` centroids of the evicted keys, by k-means.

    It starts from the middle tokens of equal runs by position. What empty clusters leave goes to
    the tokens farthest from their centroids. Ties go to the lower position. `implementation` is as
    in `kmeans`.
    """
    most = min(most, keys.shape[2])
    order = sorted_slots(evicted, position)
    start, length = cut(evicted.sum(-1, dtype=jnp.int32), count, most)
    middle = take_slots(order, jnp.maximum(start + (length - 1) // 2, 0))
    initial = take_slots(keys, middle)
    label, centroids = kmeans(
        keys, evicted, initial, length > 0, metric="l2", implementation=implementation
    )
    own = take_slots(centroids, jnp.minimum(label, most - 1))
    apart = jnp.square(keys.astype(jnp.float32) - own).sum(-1)

    def least(x: Array, fill: float | int) -> Array:
        """The smallest of each cluster, at its members."""
        small = jnp.full((*x.shape[:2], most), fill, x.dtype)
        small = jax.vmap(jax.vmap(lambda s, i, x: s.at[i].min(x, mode="drop")))(small, label, x)
        return take_slots(small, jnp.minimum(label, most - 1))

    # Two tokens alone are as far from their mean: rounding must not choose between them.
    nearest = evicted & (apart <= least(apart, jnp.inf) * (1 + 1e-4))
    place = jnp.where(nearest, position, _LAST)
    nearest = nearest & (place == least(place, _LAST))
    return keep_best(jnp.where(nearest, jnp.inf, apart), evicted, position, count)
