"""Representatives of KVCrush: groups of evicted tokens, and the token kept for each group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.payload import max_into, take_slots, write_slots
from kvjax.cache.selection import keep_best
from kvjax.cache.slots import sorted_slots
from pallas_kernels import kmeans
from pallas_kernels.base.annotations import NoneElsewhere

Anchor = Literal["random", "mean", "median", "alternate"]
Pick = Literal["middle", "random"]
Draw = Callable[[Int[Array, "B H R"]], Float[Array, "B H R"]]
_LAST = jnp.iinfo(jnp.int32).max


def anchor_bits(
    name: Anchor,
    bits: Bool[Array, "B U N"],
    present: Bool[Array, "B U"],
    key: Array | NoneElsewhere,
) -> Bool[Array, "B N"]:
    """Returns the vector that distances are measured from.

    Anchors that do not depend on the bits are the same for all rows, `[1, N]`.

    Args:
      name: as `KVCrush.anchor`; the median is the lower one.
      bits: vectors of the units, zeros where there is no unit.
      present: units that exist.
      key: random key of the random anchor.
    """
    size = bits.shape[-1]
    if name == "random":
        return jax.random.bernoulli(key, jnp.float32(0.5), (1, size))
    if name == "alternate":
        return (jnp.arange(size) % 2 == 1)[None]
    count = bits.sum(1, dtype=jnp.int32)
    if name == "mean":
        return 2 * count > present.sum(1, dtype=jnp.int32)[:, None]
    return count > jnp.sort(count, axis=-1)[:, (size - 1) // 2, None]


def bucket_representatives(
    distance: Int[Array, "B U"],
    evicted: Bool[Array, "B H U"],
    buckets: Int[Array, " B"],
    most: int,
    draw: Draw | None,
) -> Bool[Array, "B H U"]:
    """Picks one unit of each bucket of the units that a head has evicted.

    Units are ordered by distance, then by position, and cut into R `buckets`, at most `most`
    (static). Where fewer than R are evicted, each is a bucket. `draw` maps the first unit of each
    bucket to a number u in [0, 1); the bucket's member `⌊u · length⌋` is then picked. Without
    `draw`, the lower median is.
    """
    size = evicted.shape[-1]
    number = jnp.arange(size, dtype=jnp.int32)[None]
    # Distance and position in one integer, so that one sort orders by both.
    order = jnp.where(evicted, (distance * size + number)[:, None], _LAST)
    order = jnp.sort(order, axis=-1)
    start, length = member_runs(evicted.sum(-1, dtype=jnp.int32), buckets, min(most, size))

    def unit_at(rank: Int[Array, "B H R"]) -> Int[Array, "B H R"]:
        return take_slots(order, jnp.clip(rank, 0, size - 1)) % size

    if draw is None:
        offset = (length - 1) // 2
    else:
        offset = (draw(unit_at(start)) * length.astype(jnp.float32)).astype(jnp.int32)
        offset = jnp.minimum(offset, length - 1)
    chosen = jnp.where(length > 0, unit_at(start + offset), size)
    return write_slots(jnp.zeros_like(evicted), chosen, jnp.ones(chosen.shape, bool))


def member_runs(
    members: Int[Array, "B H"], buckets: Int[Array, " B"], most: int
) -> tuple[Int[Array, "B H R"], Int[Array, "B H R"]]:
    """Cuts n members into R runs, never more than members; returns their first ranks and lengths.

    Run i has the ranks `⌊i·n/R⌋ … ⌊(i + 1)·n/R⌋ − 1`. Beyond the last run the length is 0.
    """
    members = members[..., None]
    used = jnp.minimum(buckets[:, None, None], members)
    runs = jnp.maximum(used, 1)
    quotient, remainder = members // runs, members % runs

    def first(i: Int[Array, "1 1 R"]) -> Int[Array, "B H R"]:
        # ⌊i·n/R⌋ = i·quotient + ⌊i·remainder/R⌋. The last product would overflow int32 from
        # R = 46,341, so that the upper bits of i and its lower eight are divided separately.
        high = (i >> 8) * remainder
        low = (high % runs << 8) + (i & 255) * remainder
        return i * quotient + (high // runs << 8) + low // runs

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
    """Picks the token nearest to each of `count` centroids of the evicted keys, by k-means.

    k-means starts from the middle tokens of equal runs by position. Where clusters are empty, the
    tokens farthest from their centroids are picked instead. Ties go to the lower position.
    `implementation` is as in `kmeans`.
    """
    most = min(most, keys.shape[2])
    order = sorted_slots(evicted, position)
    start, length = member_runs(evicted.sum(-1, dtype=jnp.int32), count, most)
    middle = take_slots(order, jnp.maximum(start + (length - 1) // 2, 0))
    initial = take_slots(keys, middle)
    label, centroids = kmeans(
        keys, evicted, initial, length > 0, metric="l2", implementation=implementation
    )
    centroid = take_slots(centroids, jnp.minimum(label, most - 1))
    distance = jnp.square(keys.astype(jnp.float32) - centroid).sum(-1)
    # The two members of a cluster of two are equally far from their mean: the tolerance keeps
    # rounding from choosing between them.
    nearest = evicted & (distance <= -max_into(-distance, label) * (1 + 1e-4))
    place = jnp.where(nearest, position, _LAST)
    nearest = nearest & (place == -max_into(-place, label))
    return keep_best(jnp.where(nearest, jnp.inf, distance), evicted, position, count)
