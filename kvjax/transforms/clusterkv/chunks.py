"""k-means over chunks of neighbouring slots, each by itself."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.payload import sum_into, take_slots
from kvjax.cache.selection import keep_best
from kvjax.cache.slots import sorted_slots
from pallas_kernels import kmeans

Metric = Literal["cosine", "l2", "inner_product"]


class Tokens(NamedTuple):
    """What is clustered of each KV head.

    Args:
      keys, position: of all slots.
      members: slots that are clustered.
      number: random numbers; clusters start from the members with the highest.
    """

    keys: Float[Array, "B H N D"]
    position: Int[Array, "B H N"]
    members: Bool[Array, "B H N"]
    number: Float[Array, "B H N"]


class Found(NamedTuple):
    """Clusters of each KV head.

    Args:
      label: the cluster of every slot, C where it is in none.
      centroids, sizes: of the clusters.
      there: which clusters there are.
    """

    label: Int[Array, "B H N"]
    centroids: Float[Array, "B H C D"]
    sizes: Int[Array, "B H C"]
    there: Bool[Array, "B H C"]


class Means(NamedTuple):
    """How k-means is computed: metric, rounds and implementation as in `kmeans`."""

    metric: Metric
    rounds: int
    implementation: str | None = None


def cluster(tokens: Tokens, wanted: Int[Array, "B H"], most: int, means: Means) -> Found:
    """k-means from the keys of `wanted` members that are drawn, at most `most` (static)."""
    keys, position, members, number = tokens
    drawn = keep_best(number, members, position, wanted)
    start = take_slots(keys, sorted_slots(drawn, position)[..., :most])
    there = jnp.arange(most, dtype=jnp.int32)[None, None] < wanted[..., None]
    label, centroids = kmeans(keys, members, start, there, **means._asdict())
    return Found(label, centroids, sum_into(label, jnp.ones_like(label), most), there)


def cluster_chunks(
    tokens: Tokens,
    wanted: Int[Array, "B H J"],
    most: int,
    chunk: int,
    means: Means,
) -> Found:
    """`cluster` for every `chunk` slots; the clusters of a chunk follow those of the one before.

    Args:
      tokens: of J chunks, the last of which may be shorter.
      wanted: clusters of each chunk, at most `most` (static).
      chunk: slots of a chunk.
      means: how k-means is computed.
    """
    batch, heads, size = tokens.members.shape
    chunks = math.ceil(size / chunk)

    def cut(x: Array) -> Array:
        rest = [(0, 0)] * x.ndim
        rest[2] = (0, chunks * chunk - size)
        return jnp.pad(x, rest).reshape(batch, heads * chunks, chunk, *x.shape[3:])

    found = cluster(Tokens(*map(cut, tokens)), wanted.reshape(batch, -1), most, means)
    label = found.label.reshape(batch, heads, chunks, chunk)
    first = most * jnp.arange(chunks, dtype=jnp.int32)[None, None, :, None]
    label = jnp.where(label < most, label + first, chunks * most)
    joined = (x.reshape(batch, heads, chunks * most, *x.shape[3:]) for x in found[1:])
    return Found(label.reshape(batch, heads, -1)[..., :size], *joined)
