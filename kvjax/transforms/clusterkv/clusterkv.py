"""ClusterKV: clusters of similar keys, recalled as a query asks for them (arXiv 2412.03213)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.budgets.budgets import Budget, check_budget, check_choice, check_count, most_slots
from kvjax.cache.payload import sum_into, take_slots
from kvjax.cache.selection import keep_best
from kvjax.cache.slots import KVCache, sorted_slots
from kvjax.decisions import Order
from kvjax.devices import all_heads
from kvjax.protocol import Extent, Step, View
from kvjax.transforms.clusterkv.clusters import Clusters
from kvjax.transforms.random import check_seed, layer_key, uniform
from kvjax.transforms.recall import Recall, of_lists
from pallas_kernels import build_indices, kmeans, rank_clusters

Metric = Literal["cosine", "l2", "inner_product"]
Index = tuple[Clusters, Array]  # the index, and the key of the layer's draws


@dataclass(frozen=True)
class ClusterKV(Recall):
    """Keeps everything, and attends to the clusters of tokens that the query points at.

    At the prompt's end the keys of each KV head, the first `sinks` tokens apart, are clustered by
    k-means under cosine distance. A decode step ranks the clusters by the inner product of query
    and centroid, `q · μ_c`, and attends to the sinks and to whole clusters in that order, up to
    `budget` slots; the last cluster is trimmed to its earliest tokens. Tokens that are generated
    are attended to as they are, until the `kvjax.flush` that finds `interval` of them in a row
    clusters them among themselves. In attention with a sliding window, clusters that lie outside it
    as a whole are passed over, and so are the sinks.

    Slots are stored cluster by cluster, so that a cluster is a range of slots and the list of slots
    follows from prefix sums over cluster sizes.

    Args:
      budget: slots to attend to per KV head, sinks included; generated tokens that are not yet
        clustered come on top. A float is a share of each row's prompt.
      tokens_per_cluster: a prompt of n tokens has `round(n / 80)` clusters, as in the paper.
      sinks: first tokens, which stand outside the clusters and are always attended to; 16 as in the
        paper.
      interval: generated tokens of a row that are clustered together; 320 as in the paper.
      new_clusters: clusters made each time; 4 as in the paper.
      iterations: most rounds of k-means.
      clusters: number of clusters of a prompt outright, whatever its length.
      metric: what assigns a key to a cluster: `"cosine"`, or `"l2"` and `"inner_product"` for the
        paper's comparison.
      per_query_head: every query head chooses its own clusters, as in the paper; else the mean of
        `q · μ_c` over the group decides for a KV head.
      dense_layers: layers that stay as they are; the first two as in the paper. Give `()` to a
        model of two layers.
      seed: of the keys that k-means starts from.

    Raises:
      TypeError, ValueError: a number out of range, `budget` below `sinks + 1`, an unknown metric.

    Example:
      >>> import kvjax
      >>> kvjax.bind(kvjax.ClusterKV(budget=1024, dense_layers=(0,)), num_layers=2)[0]
      Full()

    References:
      Liu et al., ClusterKV: Manipulating LLM KV Cache in Semantic Space for Recallable Compression,
      arXiv 2412.03213.

    Deviations from the paper:
      The default is one choice per KV head; `per_query_head=True` is the paper's. Clustering is not
      overlapped with the attention of its layer. On a further turn everything live is clustered
      anew in rows that have tokens in it. A row that got no token in some steps has fewer than
      `interval` tokens when the flush comes that must make room: they are clustered all the same,
      and join the row's last cluster once there is no room for further ones. Over a cache that was
      evicted or merged, the sinks are the first tokens that are left.
    """

    budget: Budget
    tokens_per_cluster: int = 80
    sinks: int = 16
    interval: int = 320
    new_clusters: int = 4
    iterations: int = 20
    clusters: int | None = None
    metric: Metric = "cosine"
    per_query_head: bool = False
    dense_layers: tuple[int, ...] = (0, 1)
    seed: int = 0

    paper: ClassVar[str] = "ClusterKV, arXiv 2412.03213"
    minimum = property(lambda self: self.sinks + 1)  # the smallest workable budget

    def __post_init__(self):
        super().__post_init__()
        for name in ("tokens_per_cluster", "interval", "new_clusters", "iterations"):
            check_count(name, getattr(self, name), 1)
        check_count("sinks", self.sinks, 0)
        if self.clusters is not None:
            check_count("clusters", self.clusters, 1)
        check_choice("metric", self.metric, ("cosine", "l2", "inner_product"))
        check_seed(self.seed)
        check_budget(self.budget, self.minimum, "sinks + 1, the smallest cluster")

    def extent(self, extent: Extent) -> Extent:
        """Everything; its own interval, whatever a method before has."""
        return dataclasses.replace(extent, interval=self.interval)

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, Index]:
        """No clusters yet, and the key of the layer's draws."""
        batch, kv_heads, slots = cache.shape
        listed = min(most_slots(self.budget, cache.max_prompt, self.minimum), slots)
        cache = self.with_lists(cache, max(listed, self.minimum))
        none = jnp.zeros((batch, kv_heads), jnp.int32)
        return cache, (self._no_clusters(cache, none), layer_key(self.seed, layer))

    def select(self, view: View, state: Index, query: Array) -> tuple[View, Index]:
        """The sinks, the clusters of the highest `q · μ` up to the budget, and recent tokens."""
        cache, (clusters, _) = view.cache, state
        slots, recent = self._recent(cache, clusters)
        fixed = self.sinks
        if view.window is not None:
            clusters, fixed = clusters.seen(cache, view.window), 0
        order = rank_clusters(
            query.reshape(*cache.shape[:2], cache.group, -1), clusters.centroids, clusters.sizes,
            per_query_head=self.per_query_head, implementation=view.implementation,
        )  # fmt: skip
        sinks_first = jnp.pad(order + 1, ((0, 0), (0, 0), (1, 0)))
        chosen = build_indices(
            sinks_first, *clusters.with_sinks(), clusters.budget[:, None], length=cache.lists[1],
            implementation=view.implementation,
        )  # fmt: skip
        recent = of_lists(jnp.where(recent, slots, -1), cache)
        unseen = (slots[..., -1:] < view.slots) & (view.slots < cache.slots)
        dropped = cache.dropped + unseen.sum(-1, dtype=jnp.int32)
        view = dataclasses.replace(view, cache=cache.replace(dropped=dropped))
        return view.take(jnp.concatenate((chosen, recent), axis=-1), fixed=fixed), state

    def on_prompt(self, cache: KVCache, state: Index, step: Step) -> tuple[Order, Index]:
        """Clusters everything but the sinks."""
        clusters, key = state
        slot = jax.lax.broadcasted_iota(jnp.int32, cache.shape, 2)
        sinks = jnp.minimum(cache.used, self.sinks)
        rows = step.rows[:, None, None]
        members = cache.live & (slot >= sinks[..., None]) & rows
        wanted = jnp.asarray(self._clusters_of(np.arange(cache.slots + 1)), jnp.int32)[cache.used]
        wanted = jnp.where(rows[..., 0], wanted, 0)
        # Keys as they are now, not as attention saw them: a part before may have merged them.
        keys, most = cache.k.read(), self._most_clusters(cache)
        label, found = self._find(keys, members, cache.position, wanted, most, key, cache.heads)
        new = self._no_clusters(cache, sinks).add(*found)
        cluster = jnp.where(members, label, jnp.where(slot < sinks[..., None], -1, most))
        order = cluster, jnp.where(members, cache.position, slot), slot
        source = jax.lax.sort(order, dimension=2, num_keys=2)[-1]
        return Order(source), (step.of_rows(new, clusters), key)

    def on_flush(self, cache: KVCache, state: Index, step: Step) -> tuple[Order, Index]:
        """Clusters recent tokens of rows that have no room for those of the next steps."""
        clusters, key = state
        slots, recent = self._recent(cache, clusters)
        due = all_heads(recent.sum(-1), cache.heads).max(1) + step.room > slots.shape[2]
        members = recent & due[:, None, None]
        index = jnp.minimum(slots, cache.slots - 1)
        keys, position = cache.k.read(index), take_slots(cache.position, index)
        count = members.sum(-1, dtype=jnp.int32)
        most = min(self.new_clusters, slots.shape[2])
        wanted = jnp.minimum(jnp.minimum(count, most), clusters.room)
        label, found = self._find(keys, members, position, wanted, most, key, cache.heads)
        clusters = clusters.add(*found).join_last(keys, members & (wanted == 0)[..., None])
        place = jax.lax.broadcasted_iota(jnp.int32, slots.shape, 2)
        cluster = jnp.where(members, label, most + 1)
        order = cluster, jnp.where(members, position, place), slots
        source = jax.lax.sort(order, dimension=2, num_keys=2)[-1]
        return Order(source, slots), (clusters, key)

    def _recent(self, cache: KVCache, clusters: Clusters):
        """The slots behind the clusters, at most S, and which of them hold tokens."""
        size = min(self.interval, max(cache.max_new, 1))
        slots = clusters.clustered[..., None] + jnp.arange(size, dtype=jnp.int32)[None, None]
        return jnp.minimum(slots, cache.slots), slots < cache.used[..., None]

    def _find(
        self,
        keys: Float[Array, "B H N D"],
        members: Bool[Array, "B H N"],
        position: Int[Array, "B H N"],
        wanted: Int[Array, "B H"],
        most: int,
        key: Array,
        heads: int,
    ) -> tuple[Int[Array, "B H N"], tuple[Array, Array, Array]]:
        """k-means from the keys of `wanted` members that are drawn, at most `most`.

        Returns:
          The cluster of each member, and of the clusters centroids, sizes and how many they are.
        """
        drawn = keep_best(uniform(key, position, heads), members, position, wanted)
        start = take_slots(keys, sorted_slots(drawn, position)[..., :most])
        there = jnp.arange(most, dtype=jnp.int32)[None, None] < wanted[..., None]
        label, centroids = kmeans(
            keys, members, start, there, metric=self.metric, rounds=self.iterations
        )
        sizes = sum_into(label, jnp.ones_like(label))[..., :most]
        return label, (centroids, sizes, wanted)

    def _no_clusters(self, cache: KVCache, sinks: Int[Array, "B H"]) -> Clusters:
        """An index of sinks, with room for the clusters of a prompt and of `max_new` tokens."""
        blocks = cache.max_new // self.interval
        shape = (*cache.shape[:2], self._most_clusters(cache) + self.new_clusters * blocks)
        return Clusters(
            centroids=jnp.zeros((*shape, cache.k.shape[3]), jnp.float32),
            sizes=jnp.zeros(shape, jnp.int32),
            starts=jnp.zeros(shape, jnp.int32),
            number=jnp.zeros(shape[:2], jnp.int32),
            sinks=sinks,
            budget=self.rows_budget(cache),
        )

    def _clusters_of(self, count: np.ndarray) -> np.ndarray:
        """How many clusters a head with so many live tokens gets."""
        wanted = (
            np.rint(count / self.tokens_per_cluster) if self.clusters is None else self.clusters
        )
        clusterable = np.maximum(count - self.sinks, 0)
        return np.minimum(np.maximum(wanted, 1), clusterable).astype(np.int64)

    def _most_clusters(self, cache: KVCache) -> int:
        """Most clusters of a head when a prompt is complete."""
        return max(int(self._clusters_of(np.arange(cache.capacity + 1)).max()), 1)
