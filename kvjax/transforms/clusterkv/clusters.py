"""An index of clusters, each a range of slots."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.payload import take_slots
from kvjax.transforms.random import uniform
from kvjax.transforms.selection import keep_best
from pallas_kernels import kmeans


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Clusters:
    """The index: every cluster is a range of slots, in the order of token positions.

    Args:
      centroids: means of the clusters' keys, those of the prompt first.
      sizes: how many slots each has; 0 where there is no such cluster.
      starts: its first slot.
      first: slot of the first sink.
      sinks: how many there are.
      budget: slots to attend to, of each row.
    """

    centroids: Float[Array, "B H C D"]
    sizes: Int[Array, "B H C"]
    starts: Int[Array, "B H C"]
    first: Int[Array, "B H"]
    sinks: Int[Array, "B H"]
    budget: Int[Array, " B"]

    @classmethod
    def none(
        cls, batch: int, kv_heads: int, count: int, head_dim: int, budget: Int[Array, " B"]
    ) -> Clusters:
        """An index with room for `count` clusters per row and KV head."""
        return cls(
            centroids=jnp.zeros((batch, kv_heads, count, head_dim), jnp.float32),
            sizes=jnp.zeros((batch, kv_heads, count), jnp.int32),
            starts=jnp.zeros((batch, kv_heads, count), jnp.int32),
            first=jnp.zeros((batch, kv_heads), jnp.int32),
            sinks=jnp.zeros((batch, kv_heads), jnp.int32),
            budget=budget,
        )

    def put(self, at: int | Int[Array, ""], found: Found, first: Int[Array, "B H"]) -> Clusters:
        """With clusters from number `at` on, whose slots follow each other from `first` on."""

        def write(old: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(old, new, at, 2)

        starts = first[..., None] + jnp.cumsum(found.sizes, axis=-1, dtype=jnp.int32) - found.sizes
        return dataclasses.replace(
            self,
            centroids=write(self.centroids, found.centroids),
            sizes=write(self.sizes, found.sizes),
            starts=write(self.starts, starts),
        )

    def with_sinks(self) -> tuple[Int[Array, "B H C"], Int[Array, "B H C"]]:
        """Sizes and starts of all clusters, and before them of the sinks, as if they were one."""
        sizes = jnp.concatenate((self.sinks[..., None], self.sizes), axis=-1)
        return sizes, jnp.concatenate((self.first[..., None], self.starts), axis=-1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Found:
    """What k-means found.

    Args:
      label: cluster of each slot, C where it is in none.
      centroids, sizes: of the clusters.
    """

    label: Int[Array, "B H N"]
    centroids: Float[Array, "B H C D"]
    sizes: Int[Array, "B H C"]


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
    return Found(label, centroids, count(label))
