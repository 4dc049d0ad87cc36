"""Chelsea: clusters of similar keys by chunked soft matching (arXiv 2506.11418)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.budgets.budgets import Budget, check_budget, most_slots, rows_budget
from kvjax.cache.payload import sum_into, take_slots, write_slots
from kvjax.cache.selection import evictable, keep_best, newest
from kvjax.cache.slots import KVCache, sorted_slots
from kvjax.calibration import Learner
from kvjax.checks import check_count, check_layers, check_number, check_part
from kvjax.decisions import Merge
from kvjax.protocol import Card, Extent, Full, KVTransform, Needs, Step
from kvjax.serialization import named, pytree_node
from kvjax.transforms.chelsea.outlier_heads import OutlierHeads
from pallas_kernels import segment_merge, soft_matching
from pallas_kernels.base.varying import varying

_MOST_STEPS = 1000  # limits the table of `most_merges`, which has a row for each step


@pytree_node
class Passes(NamedTuple):
    """State of a layer: the budget of each row, and the number of passes of each head so far."""

    budget: Int[Array, " B"]
    passes: Int[Array, "B H"]


class Clusters(NamedTuple):
    """Clusters after some passes of one compression; a cluster is kept at one of its slots.

    Args:
      into: slot of the cluster that each slot belongs to; its own number where the cluster is kept.
      key: keys of the clusters, at their slots.
      mass: masses of the clusters, at their slots; 0 elsewhere.
      need: number of slots that must still be freed.
      passes: number of passes so far.
    """

    into: Int[Array, "B H S"]
    key: Float[Array, "B H S D"]
    mass: Float[Array, "B H S"]
    need: Int[Array, "B H"]
    passes: Int[Array, "B H"]


@named("chelsea")
@dataclass(frozen=True)
class Chelsea(Learner):
    """Merges tokens with similar keys into their mean, at the prompt's end and while decoding.

    The first `sinks` and the newest `recent` tokens are protected. The others, in position order,
    are cut into chunks; in each chunk, even offsets are set A and odd offsets set B. Every token a
    of A has an edge to the b with the most similar key, `max_b cos(k_a, k_b)`. The most similar
    edges of a head are kept, and each b becomes one slot with the a's that point at it, at b's
    position: `k = Σ m_i k_i / Σ m_i`, `v = Σ m_i v_i / Σ m_i`, `m = Σ m_i`. The masses m are added
    to the logits of attention as `log m`. A pass can halve the cache; passes repeat until `budget`
    slots are live, and the last one merges exactly as many as needed.

    Args:
      budget: live slots B per KV head to compress to, generated tokens included. A float is a share
        of each row's prompt and `max_new` tokens, `max(⌊f · (L + max_new)⌋, sinks + recent + 1)`.
      chunk: tokens per chunk, 256 as in the paper; `"whole"`: one chunk (bipartite soft matching).
      sinks: tokens at positions 0 … sinks - 1 that are never merged; 16 as in the paper.
      recent: newest positions that are not merged; 64 as in the paper.
      interval: decode steps between two flushes; 128 is ours. A flush compresses a head to B slots
        if the tokens until the next flush would not fit into B + interval.
      ratio_0, decay, steps, floor: pass i merges at most the share
        `r_i = max(ratio_0 - decay · min(i, steps), floor)` of set A; i counts all passes of a head.
        By default it is a constant 1, which makes passes as few as possible. The numbers are read
        as the nearest fractions with a denominator up to a million.
      outlier_heads: heads that keep everything, or the path of their file. The others get less, so
        that the total stays the same. Pass the transform to `bind`.
      keep_layers: layers that keep everything, within the share of the outlier heads: as many of
        the outlier heads with the lowest rank are compressed instead.
      outlier_threshold: cosine above which an edge counts when `kvjax.calibrated` finds the outlier
        heads, between the similarities in most heads and those in the outliers. None: only given
        heads are outliers.
      outlier_share: share of all heads that are outliers, rounded to the nearest count; 0.04 as in
        the paper.

    Raises:
      TypeError, ValueError: an argument is not a number; `budget` below `sinks + recent + 1`; a
        share outside (0, 1]; `chunk` below 2; a schedule outside [0, 1] or one whose share falls to
        0; a threshold outside (-1, 1]; in `for_layer`, heads or layers that the model does not
        have; in `init_cache`, outlier heads that have not been found yet.

    Example:
      >>> import kvjax
      >>> kvjax.Chelsea(budget=0.2).extent(kvjax.kit.Extent(prompt=4096, new=1000)).total
      1147

    References:
      Hu et al., Efficient Long-Context LLM Inference via KV Cache Clustering (Chelsea, later
      CentroidKV), arXiv 2506.11418.

    Deviations from the paper:
      The paper's share of set A falls during the first passes, and some heads keep everything. By
      default the share is a constant 1 and no head keeps everything. The paper has such a form for
      needles alone; on LongBench it scores less without those heads. On SmolLM2, a falling share
      loses a little less and outlier heads a little more (docs/results/studies.md). The paper's
      text gives neither the interval nor the constants of the schedule. The schedule falls linearly
      for `steps` passes and then stays. A pass merges at least one edge. If a chunk has an odd
      number of tokens, the last is in A; a chunk of one token merges nothing. Similarity is that of
      the keys as they are stored. Before cosines are compared, they are rounded to a grid, so that
      they do not depend on the order of a sum. Its step is the smallest power of two that is at
      least `2^-21 √D` (2^-17 with 128 channels). Among pairs that are equally similar on this grid,
      those of lower tokens come first. A further turn compresses the rows that have tokens in it; a
      share is then taken anew.
    """

    budget: Budget
    chunk: int | Literal["whole"] = 256
    sinks: int = 16
    recent: int = 64
    interval: int = 128
    ratio_0: float = 1.0
    decay: float = 0.0
    steps: int = 0
    floor: float = 0.0
    outlier_heads: OutlierHeads | str | None = None
    keep_layers: tuple[int, ...] = ()
    outlier_threshold: float | None = None
    outlier_share: float = 0.04

    learns = ("outlier_heads", OutlierHeads)
    card = Card(
        acts="prompt, whenever the cache is full", paper="Chelsea, arXiv 2506.11418",
        when="sentences",
        small={"chunk": 8, "sinks": 2, "recent": 4, "interval": 3},
        unscored=("interval", "ratio_0", "decay", "steps", "floor", "keep_layers"),
    )  # fmt: skip
    minimum = property(lambda self: self.sinks + self.recent + 1)  # the smallest workable budget

    @property
    def needs(self) -> Needs:
        """Remainders of the values that it writes."""
        return Needs(writes_values=True)

    def __post_init__(self):
        check_count("sinks", self.sinks, 0)
        check_count("recent", self.recent, 1)
        check_count("interval", self.interval, 1)
        if self.chunk != "whole":
            check_count("chunk", self.chunk, 2)
        check_budget(self.budget, self.minimum, "sinks + recent + 1")
        check_count("steps", self.steps, 0, most=_MOST_STEPS)
        self._check_schedule()
        self.check_learned()
        if self.outlier_threshold is not None:
            check_number("outlier_threshold", self.outlier_threshold, above=-1, most=1)
        check_number("outlier_share", self.outlier_share, above=0, most=1)
        check_layers("keep_layers", self.keep_layers)

    @property
    def lacks_calibration(self) -> bool:
        """Tells whether outlier heads are only named, or have to be found by the threshold."""
        if self.outlier_heads is None:
            return self.outlier_threshold is not None
        return isinstance(self.outlier_heads, str)

    def planned(self, model: Any) -> Chelsea:
        """Returns the method without outlier heads, with which the total stays the same."""
        return dataclasses.replace(self, outlier_threshold=None)

    def reader(self, model: Any, lengths: Sequence[int]) -> KVTransform:
        """Returns the full cache, if all texts have tokens between sinks and recent ones."""
        least = self.sinks + self.recent + 2
        if min(lengths) < least:
            raise ValueError(
                f"every text of the sample must have at least sinks + recent + 2 = {least} tokens, "
                f"got {min(lengths)}"
            )
        return Full()

    def observe(self, reader: KVTransform, cache: KVCache, state: Any, step: Step) -> Array:
        """Returns the share of set A without an edge above the threshold, of each KV head."""
        # Keys without the sinks; the recent ones are beyond `count`.
        keys = cache.k.read()[:, :, self.sinks :]
        count = jnp.broadcast_to(cache.length[:, None], keys.shape[:2]) - self.sinks - self.recent
        similarity, _ = soft_matching(keys, count, chunk=self._chunk(keys.shape[2]))
        edges = similarity > -jnp.inf
        unmatched = edges & (similarity <= self.outlier_threshold)  # pyright: ignore[reportOperatorIssue]  # only a threshold learns
        return (unmatched.sum(-1) / edges.sum(-1))[0]

    def learn(self, model: Any, observed: Sequence[Sequence[Any]]) -> OutlierHeads:
        """Ranks the heads by their mean score over the texts."""
        scores = np.mean(observed, axis=0)
        # A stable sort leaves the lower head first where scores are equal.
        ranked = np.argsort(-scores, axis=None, kind="stable")
        count = max(1, round(self.outlier_share * scores.size))
        heads = tuple(divmod(int(head), model.kv_heads) for head in ranked[:count])
        return OutlierHeads(heads, model.num_layers, model.kv_heads)

    def _chunk(self, slots: int) -> int:
        return max(slots, 2) if self.chunk == "whole" else self.chunk

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """Separates the outlier heads; the others share the remaining budget."""
        if self.lacks_calibration or (self.outlier_heads is None and not self.keep_layers):
            return self
        outliers: Any = self.outlier_heads or OutlierHeads((), num_layers, kv_heads=1)
        outliers.check_model(num_layers)
        outliers = outliers.with_layers(self.keep_layers)
        budget = outliers.remaining(self.budget, self.minimum)
        rest = dataclasses.replace(
            self, budget=budget, outlier_heads=None, keep_layers=(), outlier_threshold=None
        )
        return outliers.split(layer, rest)

    def extent(self, extent: Extent) -> Extent:
        """Bounds the cache to the budget, plus `interval` tokens while decoding."""
        tokens = extent.longest_prompt + extent.new
        most = most_slots(self.budget, tokens, self.minimum)
        return extent.keep(most).hold(most + self.interval).every(self.interval)

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, Passes]:
        """Makes each row's budget and a count of passes; a share is fixed when the prompt ends."""
        if self.lacks_calibration:
            raise self.unlearned()
        return cache, Passes(self._rows_budget(cache), jnp.zeros(cache.shape[:2], jnp.int32))

    def on_prompt(self, cache: KVCache, state: Passes, step: Step) -> tuple[Merge, Passes]:
        """Merges the rows of the prompt down to their budgets."""
        budget = step.of_rows(self._rows_budget(cache), state.budget)
        return self._compress(cache, state._replace(budget=budget), step.rows[:, None], step)

    def on_flush(self, cache: KVCache, state: Passes, step: Step) -> tuple[Merge, Passes]:
        """Compresses the heads that have no room for the tokens until the next flush."""
        most = state.budget[:, None] + self.interval
        due = evictable(cache).sum(-1, dtype=jnp.int32) + step.room > most
        return self._compress(cache, state, due, step)

    def _compress(
        self, cache: KVCache, state: Passes, due: Bool[Array, "B N"], step: Step
    ) -> tuple[Merge, Passes]:
        """Returns one merge that has the effect of all passes.

        The passes only follow the clusters' keys and masses. Since a mean of means weighted by
        masses is the mean of all tokens, the cache is merged once, at the end.
        """
        excess = evictable(cache).sum(-1, dtype=jnp.int32) - state.budget[:, None]
        need = jnp.where(due, jnp.maximum(excess, 0), 0)
        mergeable = evictable(cache) & (cache.position >= self.sinks) & ~newest(cache, self.recent)
        slot = jax.lax.broadcasted_iota(jnp.int32, cache.shape, 2)
        mass = jnp.where(cache.live, jnp.exp(cache.log_mass), 0.0)
        final = jax.lax.while_loop(
            lambda clusters: clusters.need.any(),
            lambda clusters: self._pass(clusters, mergeable, cache.position, step.implementation),
            varying(Clusters(slot, cache.k.read(), mass, need, state.passes), cache.k, mass, need),
        )
        return Merge(final.into), state._replace(passes=final.passes)

    def _pass(
        self,
        clusters: Clusters,
        mergeable: Bool[Array, "B H S"],
        position: Int[Array, "B H S"],
        implementation: str | None,
    ) -> Clusters:
        """Merges along the most similar edges, in every row and head that must free slots."""
        into, key, mass, need, passes = clusters
        token = jax.lax.broadcasted_iota(jnp.int32, into.shape, 2)
        mergeable &= into == token  # slots that have been merged into another are gone
        count = mergeable.sum(-1, dtype=jnp.int32)
        order = sorted_slots(mergeable, position)
        chunk = self._chunk(into.shape[2])
        similarity, partner = soft_matching(
            take_slots(key, order), count, chunk=chunk, implementation=implementation
        )
        edges = similarity > -jnp.inf  # tokens of set A
        table = jnp.asarray(self.most_merges(into.shape[2]))
        most = table[jnp.minimum(passes, self.steps), edges.sum(-1)]
        merges = jnp.minimum(need, jnp.clip(most, 1, count // 2))
        kept = keep_best(similarity, edges, token, merges)
        # Edges in terms of slots: the slot that each slot joins, its own where it joins none.
        target = write_slots(order, order, take_slots(order, jnp.where(kept, partner, token)))
        return Clusters(
            into=take_slots(target, into),
            key=segment_merge(key, target, mass, implementation=implementation),
            mass=sum_into(target, mass, implementation=implementation),
            need=need - merges,
            passes=passes + (merges > 0).astype(jnp.int32),
        )

    def most_merges(self, slots: int) -> Int[np.ndarray, "P E"]:
        """Returns `⌊r_i · e⌋` of every pass i and every number of edges e among `slots` slots.

        Fractions keep the floor exact.
        """
        edges = np.arange(slots // 2 + 2)
        return np.array([edges * r.numerator // r.denominator for r in self._shares], np.int32)

    @property
    def _shares(self) -> list[Fraction]:
        """Largest share of set A that each pass merges; the last one holds for further passes."""
        ratio_0, decay, floor = (
            Fraction(float(x)).limit_denominator(10**6)
            for x in (self.ratio_0, self.decay, self.floor)
        )
        return [max(ratio_0 - decay * i, floor) for i in range(self.steps + 1)]

    def _rows_budget(self, cache: KVCache) -> Int[Array, " B"]:
        """Returns each row's budget, from its prompt and the `max_new` tokens that may follow."""
        prompt, tokens = jnp.minimum(cache.length, cache.max_prompt), cache.max_tokens
        return rows_budget(self.budget, prompt + cache.max_new, tokens, self.minimum)

    def _check_schedule(self) -> None:
        """Raises unless the shares are numbers in [0, 1], and every pass merges something."""
        schedule = {"ratio_0": self.ratio_0, "decay": self.decay, "floor": self.floor}
        for name, value in schedule.items():
            check_part(name, value)
        if self._shares[-1] <= 0:
            raise ValueError(
                f"the share of a pass must stay above 0, got {float(self._shares[-1])} after "
                f"{self.steps} steps of {schedule}"
            )
