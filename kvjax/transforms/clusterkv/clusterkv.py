"""ClusterKV: clusters of similar keys, recalled as a query asks for them (arXiv 2412.03213)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.budgets.budgets import (
    Budget,
    check_budget,
    check_choice,
    check_count,
    most_slots,
    rows_budget,
)
from kvjax.cache.slots import KVCache
from kvjax.protocol import Full, KVTransform, Stage, State, Step, View
from kvjax.transforms.clusterkv.clusters import Clusters, Found, find_clusters
from kvjax.transforms.random import Seed, check_seed, layer_key, seed_of_layer
from kvjax.transforms.recall import (
    begin_tail,
    by_group,
    check_dense_layers,
    check_flag,
    lists_per_row,
)
from kvjax.transforms.selection import oldest
from pallas_kernels import build_indices, rank_clusters

Metric = Literal["cosine", "l2", "inner_product"]


@dataclass(frozen=True)
class ClusterKV(KVTransform):
    """Keeps everything, and attends to the clusters of tokens that the query points at.

    At the prompt's end the keys of each KV head, the first `sinks` tokens apart, are clustered by
    k-means under cosine distance. A decode step ranks the clusters by the inner product of query
    and centroid, `q · μ_c`, and attends to the sinks and to whole clusters in that order, up to
    `budget` slots; the last cluster is trimmed to its earliest tokens. Every `interval` steps the
    tokens generated since are clustered among themselves.

    Slots are stored cluster by cluster, so that a cluster is a range of slots and the list of slots
    follows from prefix sums over cluster sizes.

    Args:
      budget: slots to attend to per KV head, sinks included; generated tokens that are not yet
        clustered come on top. A float is a share of each row's prompt.
      tokens_per_cluster: a prompt of n tokens has `round(n / 80)` clusters, as in the paper.
      sinks: first tokens, which stand outside the clusters and are always attended to; 16 as in the
        paper.
      interval: decode steps between clusterings; 320 as in the paper.
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
      anew. Over a cache that was evicted or merged, the sinks are the first tokens that are left.
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
    seed: Seed = 0

    stage: ClassVar[Stage] = Stage.RECALL
    paper: ClassVar[str] = "ClusterKV, arXiv 2412.03213"
    bound = property(lambda self: not self.dense_layers)
    indexes = property(lambda self: True)

    def __post_init__(self):
        for name in ("tokens_per_cluster", "interval", "new_clusters", "iterations"):
            check_count(name, getattr(self, name), 1)
        check_count("sinks", self.sinks, 0)
        if self.clusters is not None:
            check_count("clusters", self.clusters, 1)
        check_choice("metric", self.metric, ("cosine", "l2", "inner_product"))
        check_flag("per_query_head", self.per_query_head)
        check_dense_layers(self.dense_layers)
        check_seed(self.seed)
        check_budget(self.budget, self.minimum, "sinks + 1, the smallest cluster")

    @property
    def minimum(self) -> int:
        """The smallest workable budget."""
        return self.sinks + 1

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """Itself with draws of its own, or `Full` for a dense layer."""
        if layer in self.dense_layers:
            return Full()
        return dataclasses.replace(self, dense_layers=(), seed=seed_of_layer(self.seed, layer))

    def init(self, cache: KVCache) -> tuple[KVCache, State]:
        """No clusters yet, and a tail for the tokens of decoding."""
        batch, kv_heads, slots = cache.shape
        listed = min(most_slots(self.budget, cache.max_prompt, self.minimum), slots)
        lists = (lists_per_row(cache, self.per_query_head), max(listed, self.minimum))
        count = self._most_clusters(cache) + self.new_clusters * self._blocks(cache)
        state = Clusters.none(batch, kv_heads, count, cache.k.shape[3], self._rows_budget(cache))
        return begin_tail(cache, self.interval, lists), state

    def read(self, view: View, state: Clusters, query: Array) -> tuple[View, State]:
        """The sinks, the clusters of the highest `q · μ` up to the budget, and the tail."""
        cache, tail = view.cache, view.cache.tail
        order = rank_clusters(
            by_group(query, cache), state.centroids, state.sizes,
            per_query_head=self.per_query_head, implementation=view.implementation,
        )  # fmt: skip
        sinks_first = jnp.pad(order + 1, ((0, 0), (0, 0), (1, 0)))
        _, length = tail.lists
        chosen = build_indices(
            sinks_first, *state.with_sinks(), state.budget[:, None], length=length,
            implementation=view.implementation,
        )  # fmt: skip
        new = jnp.arange(cache.tail_slots, dtype=jnp.int32)
        new = jnp.where(new < tail.count, tail.start + new, -1)
        new = jnp.broadcast_to(new, (*chosen.shape[:2], new.size))
        index = jnp.concatenate((chosen, new), axis=-1)
        return view.take(index, fixed=self.sinks, fresh=new.shape[-1]), state

    def update(self, cache: KVCache, state: Clusters, step: Step) -> tuple[KVCache, State]:
        """Clusters what is live at a prompt's end, and the tail whenever it is full."""
        if step.prompt_done:
            return self._cluster_prompt(cache)
        if step.phase == "decode" and cache.settles:
            return self._cluster_tail(cache, state)
        return cache, state

    def _cluster_prompt(self, cache: KVCache) -> tuple[KVCache, State]:
        """Clusters of everything but the sinks; says how the slots are to be sorted."""
        (batch, kv_heads, slots), live = cache.shape, cache.live
        count = live.sum(-1, dtype=jnp.int32)
        sinks = oldest(live, cache.position, jnp.full((*count.shape, 1), self.sinks, jnp.int32))
        wanted = jnp.asarray(self._clusters_of(np.arange(slots + 1)), jnp.int32)[count]
        # Keys as they are now, not as attention saw them: a part before may have merged them. And
        # no more clusters than there is room for, which the slots of a prompt being read exceed.
        found = self._find(
            cache.k.read(), live & ~sinks, cache.position, wanted, self._most_clusters(cache)
        )
        room = found.sizes.shape[2] + self.new_clusters * self._blocks(cache)
        state = Clusters.none(batch, kv_heads, room, cache.k.shape[3], self._rows_budget(cache))
        there, first = jnp.minimum(count, self.sinks), count.max() - count  # rows end at one slot
        state = dataclasses.replace(state, first=first, sinks=there).put(0, found, first + there)
        return cache.replace(order=jnp.where(sinks, -1, found.label)), state

    def _cluster_tail(self, cache: KVCache, state: Clusters) -> tuple[KVCache, State]:
        """Clusters of the tail where it is full, behind those that are there."""
        tail, size, new = cache.tail, cache.tail.size, self.new_clusters
        before = state.sizes.shape[2] - new * self._blocks(cache)

        def span(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, tail.start, size, 2)

        def cluster(carry):
            _, state, _ = carry
            live = span(cache.live)
            count = live.sum(-1, dtype=jnp.int32)
            found = self._find(
                cache.k.span(tail.start, size), live, span(cache.position),
                jnp.minimum(count, new), min(new, size),
            )  # fmt: skip
            start = jnp.broadcast_to(tail.start, count.shape)
            state = state.put(before + new * tail.settled, found, start)
            return jnp.zeros((), bool), state, found.label

        due = tail.count == size
        order = jnp.zeros((*cache.shape[:2], size), jnp.int32)
        # A loop of no round or of one: a conditional would copy the centroids at every step.
        _, state, order = jax.lax.while_loop(lambda c: c[0], cluster, (due, state, order))
        return cache.replace(order=order), state

    def _find(self, keys, members, position, wanted, most: int) -> Found:
        return find_clusters(
            keys, members, position, wanted, most,
            key=layer_key(self.seed), metric=self.metric, rounds=self.iterations,
        )  # fmt: skip

    def _rows_budget(self, cache: KVCache) -> Int[Array, " B"]:
        return rows_budget(self.budget, cache.length, cache.max_prompt, self.minimum)

    def _blocks(self, cache: KVCache) -> int:
        """How often the tail can be full."""
        return cache.max_new // self.interval

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
