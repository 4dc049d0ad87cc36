"""An index of clusters, each a range of slots."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.payload import of_rows, take_slots, write_slots
from kvjax.cache.slots import KVCache
from kvjax.serialization import pytree_node


@pytree_node
@dataclass(frozen=True)
class Clusters:
    """Index of each KV head. From slot 0 on there are the sinks, then cluster after cluster.

    Args:
      centroids: means of the clusters' keys, those of the prompt first.
      sizes: number of slots of each cluster; 0 where there is no such cluster.
      starts: first slot of each cluster.
      number: number of clusters so far.
      sinks: number of sinks.
      budget: slots that each row attends to.
      per_cluster: tokens per cluster on average, in each row.
    """

    centroids: Float[Array, "B H C D"]
    sizes: Int[Array, "B H C"]
    starts: Int[Array, "B H C"]
    number: Int[Array, "B H"]
    sinks: Int[Array, "B H"]
    budget: Int[Array, " B"]
    per_cluster: Int[Array, " B"]

    room = property(lambda self: self.sizes.shape[2] - self.number)  # for further clusters
    # Number of slots of the sinks and of all clusters.
    clustered = property(lambda self: self.sinks + self.sizes.sum(-1, dtype=jnp.int32))

    def add(
        self,
        centroids: Float[Array, "B H N D"],
        sizes: Int[Array, "B H N"],
        there: Bool[Array, "B H N"],
    ) -> Clusters:
        """Adds the clusters that exist (`there`); their slots follow those of the earlier ones."""
        rank = jnp.cumsum(there, axis=-1, dtype=jnp.int32) - 1
        place = jnp.where(there, self.number[..., None] + rank, self.sizes.shape[2])
        before = jnp.cumsum(sizes, axis=-1, dtype=jnp.int32) - sizes
        return dataclasses.replace(
            self,
            centroids=write_slots(self.centroids, place, centroids),
            sizes=write_slots(self.sizes, place, sizes),
            starts=write_slots(self.starts, place, self.clustered[..., None] + before),
            number=self.number + there.sum(-1, dtype=jnp.int32),
        )

    def join_last(self, keys: Float[Array, "B H N D"], members: Bool[Array, "B H N"]) -> Clusters:
        """Adds tokens to the last cluster of each KV head that has members."""
        count = members.sum(-1, dtype=jnp.int32)
        last = jnp.maximum(self.number - 1, 0)[..., None]
        place = jnp.where(count[..., None] > 0, last, self.sizes.shape[2])
        size, centroid = take_slots(self.sizes, last), take_slots(self.centroids, last)
        total = jnp.where(members[..., None], keys.astype(jnp.float32), 0.0).sum(2, keepdims=True)
        new_size = size + count[..., None]
        weight, divisor = (
            x.astype(jnp.float32)[..., None] for x in (size, jnp.maximum(new_size, 1))
        )
        return dataclasses.replace(
            self,
            centroids=write_slots(self.centroids, place, (centroid * weight + total) / divisor),
            sizes=write_slots(self.sizes, place, new_size),
        )

    def seen(self, cache: KVCache, window: int) -> Clusters:
        """Empties the clusters, and drops the sinks, that lie entirely outside the window.

        The result serves a selection only: the slots themselves stay as they are.
        """
        first = cache.length[:, None] - window

        def newest_position(
            starts: Int[Array, "B H N"], sizes: Int[Array, "B H N"]
        ) -> Int[Array, "B H N"]:
            last = jnp.clip(starts + sizes - 1, 0, cache.slots - 1)
            return take_slots(cache.position, last)  # positions ascend within a cluster

        visible = newest_position(self.starts, self.sizes) >= first[..., None]
        sinks = self.sinks[..., None]
        sinks_visible = newest_position(jnp.zeros_like(sinks), sinks)[..., 0] >= first
        return dataclasses.replace(
            self,
            sizes=jnp.where(visible, self.sizes, 0),
            sinks=jnp.where(sinks_visible, self.sinks, 0),
        )

    def with_sinks(self) -> tuple[Int[Array, "B H C"], Int[Array, "B H C"]]:
        """Returns sizes and starts of all clusters, with the sinks as one more cluster in front."""
        sizes = jnp.concatenate((self.sinks[..., None], self.sizes), axis=-1)
        return sizes, jnp.pad(self.starts, ((0, 0), (0, 0), (1, 0)))


def where_heads(which: Bool[Array, "B H"], new: Clusters, old: Clusters) -> Clusters:
    """Takes `new` in the chosen KV heads and `old` in the others; budgets are the same in both."""
    names = "centroids", "sizes", "starts", "number", "sinks"
    chosen = {name: of_rows(which, getattr(new, name), getattr(old, name)) for name in names}
    return dataclasses.replace(new, **chosen)
