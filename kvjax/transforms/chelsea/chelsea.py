"""Chelsea: clusters of similar keys by chunked soft matching (arXiv 2506.11418)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.budgets.budgets import Budget, check_budget, most_slots, rows_budget
from kvjax.cache.payload import sum_into, take_slots, write_slots
from kvjax.cache.selection import evictable, keep_best, newest
from kvjax.cache.slots import KVCache, sorted_slots
from kvjax.checks import check_count, check_layers
from kvjax.decisions import Merge
from kvjax.messages import brief
from kvjax.protocol import Extent, KVTransform, Needs, Step
from kvjax.transforms.chelsea.outlier_heads import OutlierHeads
from pallas_kernels import segment_merge, soft_matching
from pallas_kernels.base.varying import varying

_MOST_STEPS = 1000  # a table has a row for each


class Passes(NamedTuple):
    """What a layer remembers: the budget of each row, and how many passes there have been."""

    budget: Int[Array, " B"]
    passes: Int[Array, "B H"]


class Clusters(NamedTuple):
    """What the passes of one compression have come to.

    Args:
      into: slot of the cluster that each slot has become part of, its own where it stands for one.
      key: of the clusters, at their slots.
      mass: of the clusters, at their slots; 0 elsewhere.
      need: how many slots must still be freed.
      passes: passes so far.
    """

    into: Int[Array, "B H S"]
    key: Float[Array, "B H S D"]
    mass: Float[Array, "B H S"]
    need: Int[Array, "B H"]
    passes: Int[Array, "B H"]


@dataclass(frozen=True)
class Chelsea(KVTransform):
    """Merges tokens with similar keys into their mean, at the prompt's end and while decoding.

    The first `sinks` and the newest `recent` tokens are protected. The others, in position order,
    are cut into chunks; in each, even offsets are set A and odd offsets set B. Every A has an edge
    to the B with the most similar key, `max_b cos(k_a, k_b)`. Of all edges of a head the most
    similar are kept, and each B with its A's becomes one slot at B's position:
    `k = Σ m_i k_i / Σ m_i`, `v = Σ m_i v_i / Σ m_i`, `m = Σ m_i`, with masses m that attention adds
    to its logits as `log m`. A pass can halve the cache; passes repeat until `budget` slots are
    live, the last one merging exactly what remains.

    Args:
      budget: live slots B per KV head to compress to, generated tokens included; a float is a share
        of each row's prompt and `max_new` tokens, `max(⌊f · (L + max_new)⌋, sinks + recent + 1)`.
      chunk: tokens per chunk, 256 as in the paper; `"whole"` for none (bipartite soft matching).
      sinks: tokens at positions 0 … sinks - 1 that are never merged; 16 as in the paper.
      recent: newest positions that are not merged; 64 as in the paper.
      interval: while decoding, a head holds at most B + interval slots: it is compressed to B at
        the flush (every `interval` steps) after which its new tokens would not fit; 128 is ours.
      ratio_0, decay, steps, floor: pass i merges at most the share
        `r_i = max(ratio_0 - decay · min(i, steps), floor)` of set A, counted from the first pass of
        all; a constant 1 by default, that is, as few passes as possible. They are read as the
        nearest fractions with a denominator up to a million.
      outlier_heads: heads that keep everything, from `calibrate_outlier_heads`; the others then get
        less, so that the total stays. Give the transform to `bind`.
      keep_layers: layers that keep everything, inside the share of the outlier heads: as many heads
        of those with the lowest rank are compressed instead.

    Raises:
      TypeError, ValueError: no number, `budget` below `sinks + recent + 1`, a share outside (0, 1],
        `chunk` below 2, a schedule outside [0, 1] or one that comes to a halt; in `for_layer`,
        heads or layers that the model does not have.

    Example:
      >>> import kvjax
      >>> kvjax.Chelsea(budget=0.2).extent(kvjax.kit.Extent(prompt=4096, new=1000)).total
      1147

    References:
      Hu et al., Efficient Long-Context LLM Inference via KV Cache Clustering (Chelsea, later
      CentroidKV), arXiv 2506.11418.

    Deviations from the paper:
      The interval and the constants of the schedule are not in its text. The schedule falls
      linearly and stays where `steps` have taken it. A pass merges one edge at least. An odd last
      token of a chunk is in A; a chunk of one token merges nothing. Similarity is that of the keys
      as they are stored. Cosines are compared after they have been rounded to multiples of a power
      of two, the first from `2^-21 √D` (2^-17 with 128 channels), so that they do not depend on the
      order of a sum: of pairs that are equally similar on this grid, those of lower tokens come
      first. A further turn compresses the rows that have tokens in it, with a share taken anew.
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
    outlier_heads: OutlierHeads | None = None
    keep_layers: tuple[int, ...] = ()

    paper: ClassVar[str] = "Chelsea, arXiv 2506.11418"
    needs = property(lambda self: Needs(writes_values=True))
    minimum = property(lambda self: self.sinks + self.recent + 1)  # the smallest workable budget

    def __post_init__(self):
        check_count("sinks", self.sinks, 0)
        check_count("recent", self.recent, 1)
        check_count("interval", self.interval, 1)
        if self.chunk != "whole":
            check_count("chunk", self.chunk, 2)
        check_budget(self.budget, self.minimum, "sinks + recent + 1")
        check_count("steps", self.steps, 0, most=_MOST_STEPS)
        self._check_schedule()
        if not isinstance(self.outlier_heads, OutlierHeads | None):
            raise TypeError(
                "outlier_heads must be OutlierHeads (calibrate_outlier_heads gives them), got "
                f"{self.outlier_heads!r}"
            )
        check_layers("keep_layers", self.keep_layers)

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """The outlier heads apart; the others share what is left of the budget."""
        if self.outlier_heads is None and not self.keep_layers:
            return self
        outliers = self.outlier_heads or OutlierHeads((), num_layers, kv_heads=1)
        if outliers.num_layers != num_layers:
            raise ValueError(f"{outliers!r} is of another model, got {num_layers} layers")
        outliers = outliers.with_layers(self.keep_layers)
        budget = outliers.remaining(self.budget, self.minimum)
        rest = dataclasses.replace(self, budget=budget, outlier_heads=None, keep_layers=())
        return outliers.split(layer, rest)

    def extent(self, extent: Extent) -> Extent:
        """The budget, and `interval` tokens more while decoding."""
        tokens = extent.longest_prompt + extent.new
        most = most_slots(self.budget, tokens, self.minimum)
        return extent.keep(most).hold(most + self.interval).every(self.interval)

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, Passes]:
        """Each row's budget, a share of which is known when the prompt ends, and no pass so far."""
        return cache, Passes(self._rows_budget(cache), jnp.zeros(cache.shape[:2], jnp.int32))

    def on_prompt(self, cache: KVCache, state: Passes, step: Step) -> tuple[Merge, Passes]:
        """Merges the rows of the prompt down to their budgets."""
        budget = step.of_rows(self._rows_budget(cache), state.budget)
        return self._compress(cache, state._replace(budget=budget), step.rows[:, None], step)

    def on_flush(self, cache: KVCache, state: Passes, step: Step) -> tuple[Merge, Passes]:
        """Merges what has no room for the tokens until the next flush down to its budget."""
        most = state.budget[:, None] + self.interval
        due = evictable(cache).sum(-1, dtype=jnp.int32) + step.room > most
        return self._compress(cache, state, due, step)

    def _compress(
        self, cache: KVCache, state: Passes, due: Bool[Array, "B N"], step: Step
    ) -> tuple[Merge, Passes]:
        """One merge that does what all passes do: a mean of means is the mean by masses."""
        over = evictable(cache).sum(-1, dtype=jnp.int32) - state.budget[:, None]
        need = jnp.where(due, jnp.maximum(over, 0), 0)
        mergeable = evictable(cache) & (cache.position >= self.sinks) & ~newest(cache, self.recent)
        slot = jax.lax.broadcasted_iota(jnp.int32, cache.shape, 2)
        mass = jnp.where(cache.live, jnp.exp(cache.log_mass), 0.0)
        done = jax.lax.while_loop(
            lambda clusters: clusters.need.any(),
            lambda clusters: self._pass(clusters, mergeable, cache.position, step.implementation),
            varying(Clusters(slot, cache.k.read(), mass, need, state.passes), cache.k, mass, need),
        )
        return Merge(done.into), state._replace(passes=done.passes)

    def _pass(
        self,
        clusters: Clusters,
        mergeable: Bool[Array, "B H S"],
        position: Int[Array, "B H S"],
        implementation: str | None,
    ) -> Clusters:
        """Merges along the most similar edges, in every row and head that still needs to."""
        into, key, mass, need, passes = clusters
        token = jax.lax.broadcasted_iota(jnp.int32, into.shape, 2)
        mergeable &= into == token
        count = mergeable.sum(-1, dtype=jnp.int32)
        order = sorted_slots(mergeable, position)
        chunk = max(into.shape[2], 2) if self.chunk == "whole" else self.chunk
        similarity, partner = soft_matching(
            take_slots(key, order), count, chunk=chunk, implementation=implementation
        )
        edges = similarity > -jnp.inf
        table = jnp.asarray(self.most_merges(into.shape[2]))
        most = table[jnp.minimum(passes, self.steps), edges.sum(-1)]
        merges = jnp.minimum(need, jnp.clip(most, 1, count // 2))
        kept = keep_best(similarity, edges, token, merges)
        joins = write_slots(order, order, take_slots(order, jnp.where(kept, partner, token)))
        return Clusters(
            into=take_slots(joins, into),
            key=segment_merge(key, joins, mass, implementation=implementation),
            mass=sum_into(joins, mass, implementation=implementation),
            need=need - merges,
            passes=passes + (merges > 0).astype(jnp.int32),
        )

    def most_merges(self, slots: int) -> Int[np.ndarray, "P E"]:
        """`⌊r_i · e⌋`, exactly, of every pass i and of e edges among so many slots."""
        edges = np.arange(slots // 2 + 2)
        return np.array([edges * r.numerator // r.denominator for r in self._shares], np.int32)

    @property
    def _shares(self) -> list[Fraction]:
        """Share of set A that each pass merges at most; the last one's holds from there on."""
        first, less, least = (
            Fraction(float(x)).limit_denominator(10**6)
            for x in (self.ratio_0, self.decay, self.floor)
        )
        return [max(first - less * i, least) for i in range(self.steps + 1)]

    def _rows_budget(self, cache: KVCache) -> Int[Array, " B"]:
        prompt, tokens = jnp.minimum(cache.length, cache.max_prompt), cache.max_tokens
        return rows_budget(self.budget, prompt + cache.max_new, tokens, self.minimum)

    def _check_schedule(self) -> None:
        schedule = {"ratio_0": self.ratio_0, "decay": self.decay, "floor": self.floor}
        for name, value in schedule.items():
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise TypeError(f"{name} must be a number, got {brief(value)}")
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must lie in [0, 1], got {brief(value)}")
        if self._shares[-1] <= 0:
            raise ValueError(
                f"the share of a pass must stay above 0, got {float(self._shares[-1])} after "
                f"{self.steps} steps of {schedule}"
            )
