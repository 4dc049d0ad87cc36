"""An index of clusters, each a range of slots."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.payload import of_rows, take_slots, write_slots
from kvjax.cache.slots import KVCache
from kvjax.protocol import Estimate
from kvjax.serialization import pytree_node
from kvjax.transforms.clusterkv.chunks import Points
from pallas_kernels.base.annotations import NoneElsewhere


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
      values, mass: means of the clusters' values, and how many tokens each cluster stands for; None
        where nothing stands for clusters that are not recalled.
    """

    centroids: Float[Array, "B H C D"]
    sizes: Int[Array, "B H C"]
    starts: Int[Array, "B H C"]
    number: Int[Array, "B H"]
    sinks: Int[Array, "B H"]
    budget: Int[Array, " B"]
    per_cluster: Int[Array, " B"]
    values: Float[Array, "B H C D"] | NoneElsewhere = None
    mass: Float[Array, "B H C"] | NoneElsewhere = None

    room = property(lambda self: self.sizes.shape[2] - self.number)  # for further clusters
    # Number of slots of the sinks and of all clusters.
    clustered = property(lambda self: self.sinks + self.sizes.sum(-1, dtype=jnp.int32))

    def add(
        self,
        centroids: Float[Array, "B H N D"],
        sizes: Int[Array, "B H N"],
        there: Bool[Array, "B H N"],
        values: Float[Array, "B H N D"] | None = None,
        mass: Float[Array, "B H N"] | None = None,
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
            values=None if values is None else write_slots(self.values, place, values),
            mass=None if mass is None else write_slots(self.mass, place, mass),
        )

    def join_last(
        self, points: Points, members: Bool[Array, "B H N"], implementation: str | None
    ) -> Clusters:
        """Adds tokens to the last cluster of each KV head that has members."""
        keys = points.keys
        count = members.sum(-1, dtype=jnp.int32)
        last = jnp.maximum(self.number - 1, 0)[..., None]
        place = jnp.where(count[..., None] > 0, last, self.sizes.shape[2])
        size, centroid = take_slots(self.sizes, last), take_slots(self.centroids, last)
        total = jnp.where(members[..., None], keys.astype(jnp.float32), 0.0).sum(2, keepdims=True)
        new_size = size + count[..., None]
        weight, divisor = (
            x.astype(jnp.float32)[..., None] for x in (size, jnp.maximum(new_size, 1))
        )
        joined = dataclasses.replace(
            self,
            centroids=write_slots(self.centroids, place, (centroid * weight + total) / divisor),
            sizes=write_slots(self.sizes, place, new_size),
        )
        if self.values is None:
            return joined
        label = jnp.zeros_like(points.position)
        mean, added = points._replace(members=members).means(label, 1, implementation)
        before, value = take_slots(self.mass, last), take_slots(self.values, last)
        mass = before + added
        share = (added / jnp.where(mass > 0, mass, 1.0))[..., None]
        return dataclasses.replace(
            joined,
            values=write_slots(self.values, place, value + share * (mean - value)),
            mass=write_slots(self.mass, place, mass),
        )

    def seen(self, cache: KVCache, window: int) -> Clusters:
        """Empties the clusters, and drops the sinks, that lie entirely outside the window.

        Nothing stands for clusters that lie partly outside. The result serves a selection only: the
        slots themselves stay as they are.
        """
        first = cache.length[:, None] - window

        def position_of(slots: Int[Array, "B H N"]) -> Int[Array, "B H N"]:
            return take_slots(cache.position, jnp.clip(slots, 0, cache.slots - 1))

        def newest_position(
            starts: Int[Array, "B H N"], sizes: Int[Array, "B H N"]
        ) -> Int[Array, "B H N"]:
            return position_of(starts + sizes - 1)  # positions ascend within a cluster

        visible = newest_position(self.starts, self.sizes) >= first[..., None]
        sinks = self.sinks[..., None]
        sinks_visible = newest_position(jnp.zeros_like(sinks), sinks)[..., 0] >= first
        mass = self.mass
        if mass is not None:
            mass = jnp.where(position_of(self.starts) >= first[..., None], mass, 0.0)
        return dataclasses.replace(
            self,
            mass=mass,
            sizes=jnp.where(visible, self.sizes, 0),
            sinks=jnp.where(sinks_visible, self.sinks, 0),
        )

    def with_sinks(self) -> tuple[Int[Array, "B H C"], Int[Array, "B H C"]]:
        """Returns sizes and starts of all clusters, with the sinks as one more cluster in front."""
        sizes = jnp.concatenate((self.sinks[..., None], self.sizes), axis=-1)
        return sizes, jnp.pad(self.starts, ((0, 0), (0, 0), (1, 0)))

    def estimate(self, unread: Int[Array, "B K C"]) -> Estimate | None:
        """Lets each cluster stand for those of its slots that are not read, if it may.

        Args:
          unread: number of these slots.
        """
        if self.mass is None:
            return None
        lists = unread.shape[1] // self.mass.shape[1]
        of_slot = self.mass / jnp.maximum(self.sizes, 1).astype(jnp.float32)
        mass = unread.astype(jnp.float32) * jnp.repeat(of_slot, lists, axis=1)
        return Estimate(self.centroids, self.values, jnp.log(mass))


def where_heads(which: Bool[Array, "B H"], new: Clusters, old: Clusters) -> Clusters:
    """Takes `new` in the chosen KV heads and `old` in the others; budgets are the same in both."""
    names = "centroids", "sizes", "starts", "number", "sinks", "values", "mass"
    chosen = {name: of_rows(which, getattr(new, name), getattr(old, name)) for name in names}
    return dataclasses.replace(new, **chosen)
