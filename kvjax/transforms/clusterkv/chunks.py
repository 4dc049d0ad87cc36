"""k-means over chunks of neighbouring slots, each chunk separately."""

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


class Points(NamedTuple):
    """Tokens of each KV head that are to be clustered.

    Args:
      keys, position: keys and positions of all slots.
      members: slots that are clustered.
      number: random numbers; k-means starts from the members with the highest ones.
    """

    keys: Float[Array, "B H N D"]
    position: Int[Array, "B H N"]
    members: Bool[Array, "B H N"]
    number: Float[Array, "B H N"]


class Clustering(NamedTuple):
    """Clusters of each KV head.

    Args:
      label: the cluster of every slot; C where it is in none.
      centroids, sizes: means of the clusters' keys, and numbers of their slots.
      there: marks the clusters that exist.
    """

    label: Int[Array, "B H N"]
    centroids: Float[Array, "B H C D"]
    sizes: Int[Array, "B H C"]
    there: Bool[Array, "B H C"]


class KMeansOptions(NamedTuple):
    """Options of `pallas_kernels.kmeans`: metric, rounds and implementation."""

    metric: Metric
    rounds: int
    implementation: str | None = None


def cluster(
    points: Points, wanted: Int[Array, "B H"], most: int, options: KMeansOptions
) -> Clustering:
    """Makes `wanted` clusters, at most `most` (static), by k-means from keys of random members."""
    keys, position, members, number = points
    drawn = keep_best(number, members, position, wanted)
    start = take_slots(keys, sorted_slots(drawn, position)[..., :most])
    there = jnp.arange(most, dtype=jnp.int32)[None, None] < wanted[..., None]
    label, centroids = kmeans(keys, members, start, there, **options._asdict())
    return Clustering(label, centroids, sum_into(label, jnp.ones_like(label), most), there)


def cluster_chunks(
    points: Points,
    wanted: Int[Array, "B H J"],
    most: int,
    chunk: int,
    options: KMeansOptions,
) -> Clustering:
    """Clusters every chunk separately; its clusters are numbered behind those of earlier chunks.

    Args:
      points: tokens of J chunks, the last of which may be shorter.
      wanted: number of clusters of each chunk, at most `most` (static).
      chunk: slots of a chunk.
      options: of k-means.
    """
    batch, heads, size = points.members.shape
    chunks = math.ceil(size / chunk)

    def chunks_as_heads(x: Array) -> Array:
        """Pads to whole chunks, and puts them into the axis of heads."""
        padding = [(0, 0)] * x.ndim
        padding[2] = (0, chunks * chunk - size)
        return jnp.pad(x, padding).reshape(batch, heads * chunks, chunk, *x.shape[3:])

    chunked = Points(*map(chunks_as_heads, points))
    clustering = cluster(chunked, wanted.reshape(batch, -1), most, options)
    label = clustering.label.reshape(batch, heads, chunks, chunk)
    first = most * jnp.arange(chunks, dtype=jnp.int32)[None, None, :, None]
    label = jnp.where(label < most, label + first, chunks * most)
    joined = (x.reshape(batch, heads, chunks * most, *x.shape[3:]) for x in clustering[1:])
    return Clustering(label.reshape(batch, heads, -1)[..., :size], *joined)
