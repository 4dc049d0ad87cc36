"""An index of clusters, each a range of slots."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.payload import take_slots, write_slots
from kvjax.cache.selection import keep_best
from kvjax.transforms.random import uniform
from pallas_kernels import kmeans


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Clusters:
    """The index of each KV head: sinks, then cluster after cluster, from slot 0 on.

    Args:
      centroids: means of the clusters' keys, those of the prompt first.
      sizes: how many slots each has; 0 where there is no such cluster.
      starts: its first slot.
      number: clusters so far.
      sinks: how many there are.
      clustered: slots of the sinks and of all clusters.
      budget: slots to attend to, of each row.
    """

    centroids: Float[Array, "B H C D"]
    sizes: Int[Array, "B H C"]
    starts: Int[Array, "B H C"]
    number: Int[Array, "B H"]
    sinks: Int[Array, "B H"]
    clustered: Int[Array, "B H"]
    budget: Int[Array, " B"]

    @classmethod
    def none(
        cls,
        shape: tuple[int, int, int, int],
        sinks: Int[Array, "B H"],
        budget: Int[Array, " B"],
    ) -> Clusters:
        """Sinks alone, with room for C clusters per row and KV head; `shape` is B, H, C, D."""
        return cls(
            centroids=jnp.zeros(shape, jnp.float32),
            sizes=jnp.zeros(shape[:3], jnp.int32),
            starts=jnp.zeros(shape[:3], jnp.int32),
            number=jnp.zeros(shape[:2], jnp.int32),
            sinks=sinks,
            clustered=sinks + 0,  # two arrays: caches are donated
            budget=budget,
        )

    @property
    def room(self) -> Int[Array, "B H"]:
        """How many more clusters there can be."""
        return self.sizes.shape[2] - self.number

    def add(self, found: Found) -> Clusters:
        """With further clusters, whose slots follow those of the others."""
        number = jax.lax.broadcasted_iota(jnp.int32, found.sizes.shape, 2)
        at = jnp.where(
            number < found.number[..., None], self.number[..., None] + number, self.sizes.shape[2]
        )
        before = jnp.cumsum(found.sizes, axis=-1, dtype=jnp.int32) - found.sizes
        return dataclasses.replace(
            self,
            centroids=write_slots(self.centroids, at, found.centroids),
            sizes=write_slots(self.sizes, at, found.sizes),
            starts=write_slots(self.starts, at, self.clustered[..., None] + before),
            number=self.number + found.number,
            clustered=self.clustered + found.sizes.sum(-1, dtype=jnp.int32),
        )

    def join_last(self, keys: Float[Array, "B H N D"], members: Bool[Array, "B H N"]) -> Clusters:
        """With further tokens in the last cluster, where there are any."""
        count = members.sum(-1, dtype=jnp.int32)
        last = jnp.maximum(self.number - 1, 0)[..., None]
        at = jnp.where(count[..., None] > 0, last, self.sizes.shape[2])
        size, centroid = take_slots(self.sizes, last), take_slots(self.centroids, last)
        total = jnp.where(members[..., None], keys.astype(jnp.float32), 0.0).sum(2, keepdims=True)
        new_size = size + count[..., None]
        old, new = (x.astype(jnp.float32)[..., None] for x in (size, jnp.maximum(new_size, 1)))
        return dataclasses.replace(
            self,
            centroids=write_slots(self.centroids, at, (centroid * old + total) / new),
            sizes=write_slots(self.sizes, at, new_size),
            clustered=self.clustered + count,
        )

    def with_sinks(self) -> tuple[Int[Array, "B H C"], Int[Array, "B H C"]]:
        """Sizes and starts of all clusters, and before them of the sinks, as if they were one."""
        sizes = jnp.concatenate((self.sinks[..., None], self.sizes), axis=-1)
        return sizes, jnp.pad(self.starts, ((0, 0), (0, 0), (1, 0)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Found:
    """What k-means found.

    Args:
      label: cluster of each slot, C where it is in none.
      centroids, sizes: of the clusters.
      number: how many clusters there are.
    """

    label: Int[Array, "B H N"]
    centroids: Float[Array, "B H C D"]
    sizes: Int[Array, "B H C"]
    number: Int[Array, "B H"]


def find_clusters(
    keys: Float[Array, "B H N D"],
    members: Bool[Array, "B H N"],
    position: Int[Array, "B H N"],
    wanted: Int[Array, "B H"],
    most: int,
    *,
    key: Array,
    metric: str,
    rounds: int,
) -> Found:
    """k-means from the keys of `wanted` members that are drawn, at most `most`."""
    drawn = keep_best(uniform(key, position), members, position, wanted)
    later = jnp.where(drawn, position, jnp.iinfo(jnp.int32).max)
    start = take_slots(keys, jnp.argsort(later, axis=-1)[..., :most])
    there = jnp.arange(most, dtype=jnp.int32)[None, None] < wanted[..., None]
    label, centroids = kmeans(keys, members, start, there, metric=metric, rounds=rounds)
    count = jax.vmap(
        jax.vmap(lambda label: jnp.zeros(most, jnp.int32).at[label].add(1, mode="drop"))
    )
    return Found(label, centroids, count(label), wanted)
