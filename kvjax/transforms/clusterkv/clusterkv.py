"""ClusterKV: clusters of similar keys, recalled for each query (arXiv 2412.03213)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax.budgets.budgets import Budget, check_budget, most_slots, slots_for
from kvjax.cache.payload import take_slots, write_slots
from kvjax.cache.slots import STORED_SLOT, KVCache
from kvjax.checks import check_choice, check_count
from kvjax.decisions import Order
from kvjax.devices import all_heads
from kvjax.protocol import Card, Extent, Needs, Step, View
from kvjax.serialization import named
from kvjax.transforms.clusterkv.chunks import KMeansOptions, Metric, Points, cluster, cluster_chunks
from kvjax.transforms.clusterkv.clusters import Clusters, where_heads
from kvjax.transforms.clusterkv.recalled import GroupReduce, Ranking, recalled_slots
from kvjax.transforms.random import check_seed, layer_key, uniform
from kvjax.transforms.recall import Recall, of_lists
from pallas_kernels.base.varying import varying

# Default size of clusters: from SMALLEST to LARGEST tokens, such that a budget holds at least
# RECALLED of them unless they would have fewer than SMALLEST.
RECALLED, SMALLEST, LARGEST = 12, 8, 24
# Sort keys of slots at a prompt's end: slots of clusters that stay have their stored slot number,
# slots of new clusters beside them have BEHIND and the cluster's number, and free slots have LAST.
BEHIND, LAST = np.int32(2**30), np.int32(2**31 - 1)

Counts = TypeVar("Counts", Array, np.ndarray)  # NumPy computes static bounds by the same formulas
Index = tuple[Clusters, Array]  # the index, and the random key of the layer's draws


@named("clusterkv")
@dataclass(frozen=True)
class ClusterKV(Recall):
    """Keeps everything, and attends to the clusters of tokens with the highest `q · centroid`.

    At the prompt's end the keys of each KV head, except the first `sinks`, are clustered by k-means
    under cosine distance. Each `chunk` of neighbouring tokens is clustered separately. A decode
    step ranks all clusters by the inner product of query and centroid, `q · μ_c`. It attends to the
    sinks and to whole clusters in that order, up to `budget` slots; the last cluster is trimmed to
    its earliest tokens. Every step also attends to all generated tokens that are not clustered yet.
    Once a row has `interval` of them, `kvjax.flush` clusters them among themselves. In attention
    with a sliding window, clusters that lie entirely outside the window are skipped, and so are the
    sinks.

    Slots are stored cluster by cluster. So a cluster is a range of slots, and the list of slots
    follows from prefix sums over cluster sizes.

    The defaults come from measurements on SmolLM2-135M (docs/results/selections.md, "ClusterKV's
    clusters"): clusters of fewer tokens than the paper's find more needles, and have a smaller
    error, as has the largest score of a group beside its mean; few rounds of k-means find as many
    as many do.

    Args:
      budget: slots to attend to per KV head, sinks included; generated tokens that are not yet
        clustered come on top. A float is a share of each row's prompt.
      tokens_per_cluster: a chunk of n tokens has `round(n / tokens_per_cluster)` clusters. The
        paper has 80, for prompts of 32,768 tokens. None: `L / budget` for a prompt of L tokens, so
        that a step reads about as many centroids as slots. That is limited to a twelfth of the
        budget, so that a small budget recalls several clusters too, and to between 8 and 24.
      sinks: first tokens, which are in no cluster and are always attended to; 16 as in the paper.
      interval: generated tokens of a row that are clustered together; 320 as in the paper.
      new_clusters: clusters made of them each time, 4 in the paper. None: clusters of the same size
        as those of the prompt.
      iterations: largest number of rounds of k-means. The paper has no limit, and stops when no
        label changes, which ends the rounds here too.
      chunk: tokens that are clustered together, so that the time is linear in the prompt's length.
        None: the whole prompt, as in the paper.
      clusters: a fixed number of clusters for prompts of any length; the whole prompt is then
        clustered together.
      metric: assigns a key to a cluster by `"cosine"`, or by `"l2"` or `"inner_product"` for the
        paper's comparison.
      per_query_head: every query head chooses its own clusters. False: the scores of the group
        decide for a KV head. The paper does not say what is done where query heads share keys.
      group_reduce: combines `q · μ_c` of a group's query heads: the largest, `"max"`, or the
        `"mean"`.
      dense_layers: layers that attend to everything; the first two as in the paper. Give `()` to a
        model of two layers.
      seed: seed of the draw of keys that k-means starts from.

    Raises:
      TypeError, ValueError: a number out of range; `budget` below `sinks + 1`; an unknown metric.

    Example:
      >>> import kvjax
      >>> kvjax.bind(kvjax.ClusterKV(budget=1024, dense_layers=(0,)), num_layers=2)[0]
      Full()

    References:
      Liu et al., ClusterKV: Manipulating LLM KV Cache in Semantic Space for Recallable Compression,
      arXiv 2412.03213.

    Deviations from the paper:
      The paper's method is `ClusterKV(budget, tokens_per_cluster=80, new_clusters=4, chunk=None)`
      with as many `iterations` as it takes until no label changes. With 80 tokens a cluster a small
      model finds fewer needles; fewer rounds and chunks take less time and lose nothing that can be
      told (docs/results/selections.md, "ClusterKV's clusters"). Clustering is not overlapped with
      the attention of its layer, nor does the next layer go on beside it, as in the paper: one
      device runs JAX's programs one after the other (docs/design/recall.md). The paper has no
      further turns. Here the tokens of a further turn are clustered among themselves, and existing
      clusters stay. Everything is clustered anew in these cases: the turn has more than `chunk`
      tokens; a method before has evicted or merged clustered tokens; there is no room for more
      clusters; the prompt before was shorter than `sinks`, so that tokens of this one are sinks
      too; or `clusters` is given, which is the number of all clusters. A row that got no token in
      some steps has fewer than `interval` new tokens when a flush must make room. They are
      clustered all the same, and join the row's last cluster if there is no room for further
      clusters. Behind a method that evicts or merges, the sinks are the first tokens that remain.
    """

    budget: Budget
    tokens_per_cluster: int | None = None
    sinks: int = 16
    interval: int = 320
    new_clusters: int | None = None
    iterations: int = 5
    chunk: int | None = 1024
    clusters: int | None = None
    metric: Metric = "cosine"
    per_query_head: bool = False
    group_reduce: GroupReduce = "max"
    dense_layers: tuple[int, ...] = (0, 1)
    seed: int = 0

    card = Card(
        acts="prompt, every 320 tokens", paper="ClusterKV, arXiv 2412.03213", when="later",
        examples=("--method clusterkv --budget 0.1",),
        small={"tokens_per_cluster": 4, "sinks": 2, "interval": 3, "new_clusters": 2},
    )  # fmt: skip
    minimum = property(lambda self: self.sinks + 1)  # the smallest workable budget

    @property
    def needs(self) -> Needs:
        """Reordered slots with a fixed number of clusters, which each prompt's end makes anew."""
        return Needs(reordered_slots=self.clusters is not None)

    def __post_init__(self):
        super().__post_init__()
        for name in ("interval", "iterations"):
            check_count(name, getattr(self, name), 1)
        for name in ("tokens_per_cluster", "new_clusters", "chunk", "clusters"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), 1)
        check_count("sinks", self.sinks, 0)
        check_choice("metric", self.metric, get_args(Metric))
        check_choice("group_reduce", self.group_reduce, get_args(GroupReduce))
        check_seed(self.seed)
        check_budget(self.budget, self.minimum, "sinks + 1, the smallest cluster")

    def extent(self, extent: Extent) -> Extent:
        """Sets the interval of flushes, also where a method before has another one."""
        return dataclasses.replace(extent, interval=self.interval)

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, Index]:
        """Makes an index without clusters, and the random key of the layer's draws."""
        batch, kv_heads, slots = cache.shape
        listed = min(most_slots(self.budget, cache.max_prompt, self.minimum), slots)
        cache = self.with_lists(cache, max(listed, self.minimum))
        no_sinks = jnp.zeros((batch, kv_heads), jnp.int32)
        return cache, (self._no_clusters(cache, no_sinks), layer_key(self.seed, layer))

    def select(self, view: View, state: Index, query: Array) -> tuple[View, Index]:
        """Selects the sinks, the clusters with the highest `q · μ`, and all recent tokens."""
        cache, (clusters, _) = view.cache, state
        slots, recent = self._recent(cache, clusters)
        fixed = self.sinks
        if view.window is not None:
            clusters, fixed = clusters.seen(cache, view.window), 0
        chosen = recalled_slots(
            query.reshape(*cache.shape[:2], cache.group, -1), clusters, cache.lists[1],
            self._likely(cache),
            Ranking(self.per_query_head, self.group_reduce, view.implementation),
        )  # fmt: skip
        recent = of_lists(jnp.where(recent, slots, -1), cache)
        # A new token behind the last recent slot is in no list: attention cannot see it.
        invisible = (slots[..., -1:] < view.slots) & (view.slots < cache.slots)
        dropped = cache.dropped + invisible.sum(-1, dtype=jnp.int32)
        view = dataclasses.replace(view, cache=cache.replace(dropped=dropped))
        return view.take(jnp.concatenate((chosen, recent), axis=-1), fixed=fixed), state

    def on_prompt(self, cache: KVCache, state: Index, step: Step) -> tuple[Order, Index]:
        """Clusters everything except the sinks; in a further turn only new tokens, if possible."""
        clusters, key = state
        slot = jax.lax.broadcasted_iota(jnp.int32, cache.shape, 2)
        empty = varying(self._no_clusters(cache, jnp.minimum(cache.used, self.sinks)), cache.k)
        if STORED_SLOT not in cache.columns:  # a first prompt
            heads = jnp.broadcast_to(step.rows[:, None], cache.shape[:2])
            place, made = self._cluster_all(cache, empty, key, heads, step)
        else:
            place, made = self._cluster_further(cache, clusters, empty, key, step)
        # A stable sort keeps the order of positions within a cluster.
        source = jax.lax.sort((place, slot), dimension=2, num_keys=1)[-1]
        return Order(source), (step.of_rows(made, clusters), key)

    def _cluster_further(
        self, cache: KVCache, clusters: Clusters, empty: Clusters, key: Array, step: Step
    ) -> tuple[Int[Array, "B H S"], Clusters]:
        """Clusters new tokens beside existing clusters, or all tokens where those cannot stay.

        Returns the sort key of each slot, and all clusters.
        """
        slot = jax.lax.broadcasted_iota(jnp.int32, cache.shape, 2)
        last = varying(jnp.full_like(slot, LAST), cache.k)
        earlier = dataclasses.replace(clusters, budget=empty.budget, per_cluster=empty.per_cluster)
        earlier = varying(earlier, cache.k)
        stay = self._can_stay(cache, earlier)
        anew, grow = step.rows[:, None] & ~stay, step.rows[:, None] & stay
        place, remade = jax.lax.cond(
            anew.any(), lambda: self._cluster_all(cache, empty, key, anew, step),
            lambda: (last, empty),
        )  # fmt: skip
        added, grown = jax.lax.cond(
            grow.any(), lambda: self._cluster_new(cache, earlier, key, grow, step),
            lambda: (last, earlier),
        )  # fmt: skip
        # While a prompt is read, slots are in the order of positions. Clusters that stay return to
        # the slots in which they were stored.
        stored_slot = cache.column(STORED_SLOT)
        kept = jnp.where(slot < earlier.clustered[..., None], stored_slot, added)
        return jnp.where(anew[..., None], place, kept), where_heads(anew, remade, grown)

    def _can_stay(self, cache: KVCache, clusters: Clusters) -> Bool[Array, "B H"]:
        """Returns whether existing clusters can stay, with clusters of the new tokens beside them.

        They can if all their tokens are still there, the new tokens fit into a chunk, and there is
        room for their clusters. A fixed number of clusters (`clusters`) counts all of them, so that
        none can stay.
        """
        if self.clusters is not None:
            return jnp.zeros(cache.shape[:2], bool)
        slot = jax.lax.broadcasted_iota(jnp.int32, cache.shape, 2)
        clustered = clusters.clustered[..., None]
        stored_slot = cache.column(STORED_SLOT)
        present = cache.live & (slot < clustered) & (stored_slot >= 0) & (stored_slot < clustered)
        complete = present.sum(-1, dtype=jnp.int32) == clusters.clustered
        complete &= clusters.sinks == jnp.minimum(cache.used, self.sinks)
        count = cache.used - clusters.clustered
        wanted = self._clusters_of(count, count, clusters.per_cluster[:, None])
        return complete & (count <= self._chunk(cache.slots)) & (wanted <= clusters.room)

    def _cluster_all(
        self, cache: KVCache, empty: Clusters, key: Array, heads: Bool[Array, "B H"], step: Step
    ) -> tuple[Int[Array, "B H S"], Clusters]:
        """Clusters all tokens of these heads; returns the sort key of each slot, and the clusters.

        Sinks have the key -1, a cluster's tokens its number, and free slots `LAST`.
        """
        slot = jax.lax.broadcasted_iota(jnp.int32, cache.shape, 2)
        sinks = empty.sinks[..., None]
        members = cache.live & (slot >= sinks) & heads[..., None]
        chunk = self._chunk(cache.slots)
        begin = jnp.arange(0, cache.slots, chunk, dtype=jnp.int32)[None, None]
        live, fixed = (jnp.clip(n - begin, 0, chunk) for n in (cache.used[..., None], sinks))
        wanted = self._clusters_of(live, live - fixed, empty.per_cluster[:, None, None])
        # Keys are read from the cache and not taken from `step.keys`: an earlier part of a chain
        # may have merged some since attention saw them.
        number = uniform(key, cache.position, cache.heads)
        tokens = Points(cache.k.read(), cache.position, members, number)
        most, options = self._most_clusters(cache)[0], self._kmeans_options(step.implementation)
        wanted = jnp.where(heads[..., None], wanted, 0)
        clustering = cluster_chunks(tokens, wanted, most, chunk, options)
        place = jnp.where(members, clustering.label, jnp.where(slot < sinks, -1, LAST))
        return place, empty.add(*clustering[1:])

    def _cluster_new(
        self, cache: KVCache, clusters: Clusters, key: Array, heads: Bool[Array, "B H"], step: Step
    ) -> tuple[Int[Array, "B H S"], Clusters]:
        """Clusters the tokens behind the clusters of these heads.

        Returns the sort keys of their slots, and all clusters.
        """
        size = self._chunk(cache.slots)
        slots = clusters.clustered[..., None] + jnp.arange(size, dtype=jnp.int32)[None, None]
        members = (slots < cache.used[..., None]) & heads[..., None]
        count = members.sum(-1, dtype=jnp.int32)
        wanted = self._clusters_of(count, count, clusters.per_cluster[:, None])
        tokens_per_cluster = self._sizes(cache)
        all_new = 0 * tokens_per_cluster + size
        most = int(self._clusters_of(all_new, all_new, tokens_per_cluster).max())
        tokens = self._tokens(cache, key, slots, members)
        clustering = cluster(tokens, wanted, most, self._kmeans_options(step.implementation))
        place = jnp.full(cache.shape, LAST, jnp.int32)
        target = jnp.where(members, slots, cache.slots)
        place = write_slots(place, target, BEHIND + clustering.label)
        return place, clusters.add(*clustering[1:])

    def on_flush(self, cache: KVCache, state: Index, step: Step) -> tuple[Order, Index]:
        """Clusters the recent tokens of rows that have no room for those of the next steps."""
        clusters, key = state
        slots, recent = self._recent(cache, clusters)
        due = all_heads(recent.sum(-1), cache.heads).max(1) + step.room > slots.shape[2]
        members = recent & due[:, None, None]
        count = members.sum(-1, dtype=jnp.int32)
        most = min(self._most_new(cache), slots.shape[2])
        wanted = self._new_clusters_of(count, clusters.per_cluster[:, None])
        wanted = jnp.minimum(wanted, clusters.room)
        tokens = self._tokens(cache, key, slots, members)
        clustering = cluster(tokens, wanted, most, self._kmeans_options(step.implementation))
        clusters = clusters.add(*clustering[1:])
        clusters = clusters.join_last(tokens.keys, members & (wanted == 0)[..., None])
        place = jax.lax.broadcasted_iota(jnp.int32, slots.shape, 2)
        # Slots that are not clustered keep their places behind all others.
        label = jnp.where(members, clustering.label, most + 1)
        order = label, jnp.where(members, tokens.position, place), slots
        source = jax.lax.sort(order, dimension=2, num_keys=2)[-1]
        return Order(source, slots), (clusters, key)

    def _tokens(
        self, cache: KVCache, key: Array, slots: Int[Array, "B H N"], members: Bool[Array, "B H N"]
    ) -> Points:
        """Reads the tokens of some slots; slots that are not members may lie beyond the cache."""
        index = jnp.minimum(slots, cache.slots - 1)
        position = take_slots(cache.position, index)
        return Points(cache.k.read(index), position, members, uniform(key, position, cache.heads))

    def _kmeans_options(self, implementation: str | None) -> KMeansOptions:
        """Returns the options of k-means."""
        return KMeansOptions(self.metric, self.iterations, implementation)

    def _recent(self, cache: KVCache, clusters: Clusters):
        """Returns the slots behind the clusters, at most S, and marks those that hold tokens."""
        size = min(self.interval, max(cache.max_new, 1))
        slots = clusters.clustered[..., None] + jnp.arange(size, dtype=jnp.int32)[None, None]
        return jnp.minimum(slots, cache.slots), slots < cache.used[..., None]

    def _no_clusters(self, cache: KVCache, sinks: Int[Array, "B H"]) -> Clusters:
        """Makes an index without clusters, with room for those of a prompt and of `max_new`."""
        new = self._most_new(cache) * (cache.max_new // self.interval)
        shape = (*cache.shape[:2], self._most_clusters(cache)[1] + new)
        length, budget = jnp.minimum(cache.length, cache.max_prompt), self.rows_budget(cache)
        return Clusters(
            centroids=jnp.zeros((*shape, cache.k.shape[3]), jnp.float32),
            sizes=jnp.zeros(shape, jnp.int32),
            starts=jnp.zeros(shape, jnp.int32),
            number=jnp.zeros(shape[:2], jnp.int32),
            sinks=sinks,
            budget=budget,
            per_cluster=self._per_cluster(length, budget),
        )

    def _chunk(self, slots: int) -> int:
        """Returns how many of `slots` slots are clustered together."""
        if self.chunk is None or self.clusters is not None:
            return slots
        return min(self.chunk, slots)

    def _per_cluster(self, length: Counts, budget: Counts) -> Counts:
        """Returns the tokens per cluster of rows with these prompt lengths and budgets."""
        if self.tokens_per_cluster is not None:
            return 0 * budget + self.tokens_per_cluster
        most = (budget // RECALLED).clip(SMALLEST, LARGEST)
        clusters = budget.clip(1).clip(max=length.clip(1))
        return _rounded(length, clusters).clip(SMALLEST).clip(max=most)

    def _clusters_of(self, live: Counts, clusterable: Counts, size: Counts) -> Counts:
        """Returns the clusters of a chunk with `live` tokens, of which some are `clusterable`."""
        return _number_of(self.clusters, live, size).clip(max=clusterable)

    def _new_clusters_of(self, count: Counts, size: Counts) -> Counts:
        """Returns the clusters of `count` generated tokens."""
        return _number_of(self.new_clusters, count, size).clip(max=count)

    def _most_clusters(self, cache: KVCache) -> tuple[int, int]:
        """Returns the most clusters of a chunk, and of a head, when a prompt is complete."""
        size, live = self._sizes(cache), np.arange(cache.max_prompt + 1).clip(max=cache.capacity)
        live[-1] = cache.capacity  # with tokens of earlier turns, all slots may be live
        chunk = self._chunk(cache.capacity)
        first, last = np.minimum(live, chunk), live % chunk
        in_first, in_last = (self._clusters_of(n, n, size) for n in (first, last))
        in_all = live // chunk * in_first + in_last
        return max(int(in_first.max()), 1), max(int(in_all.max()), 1)

    def _most_new(self, cache: KVCache) -> int:
        """Returns the most clusters that the tokens of an interval become."""
        size = self._sizes(cache)
        return int(self._new_clusters_of(0 * size + self.interval, size).max())

    def _likely(self, cache: KVCache) -> int:
        """Returns a number of clusters that fills a list in nearly all steps.

        If all clusters had the mean size, it would be the budget divided by that size. SmolLM2
        needed up to about half as many again, and relatively more where there are few.
        """
        if self.clusters is not None:
            return most_slots(self.budget, cache.max_prompt, self.minimum)
        lengths = np.arange(cache.max_prompt + 1)
        mean = slots_for(self.budget, lengths, self.minimum) / self._sizes(cache)
        return int(1.5 * mean.max()) + 16

    def _sizes(self, cache: KVCache) -> np.ndarray:
        """Returns the tokens per cluster for prompts of 0 to `max_prompt` tokens."""
        lengths = np.arange(cache.max_prompt + 1)
        budget = slots_for(self.budget, lengths, self.minimum)
        return self._per_cluster(lengths, budget)


def _number_of(fixed: int | None, count: Counts, size: Counts) -> Counts:
    """Returns a number of clusters, at least 1: a fixed one, or that of clusters of this size."""
    return (_rounded(count, size) if fixed is None else fixed + 0 * count).clip(1)


def _rounded(count: Counts, size: Counts) -> Counts:
    """Returns `count / size`, rounded to the nearest integer, halves up."""
    return (count + size // 2) // size
