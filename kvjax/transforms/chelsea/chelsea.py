"""Chelsea: clusters of similar keys by chunked soft matching (arXiv 2506.11418)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.budgets.budgets import Budget, check_budget, check_count, most_slots, rows_budget
from kvjax.cache.payload import take_slots, write_slots
from kvjax.cache.slots import KVCache, merge
from kvjax.protocol import Extent, KVTransform, State, Step
from kvjax.transforms.chelsea.outlier_heads import OutlierHeads, RemainingBudget
from kvjax.transforms.selection import evictable, keep_best, newest
from pallas_kernels import soft_matching


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
      interval: while decoding, B + interval live slots are compressed to B; 128 is ours.
      ratio_0, decay, steps, floor: pass i merges at most the share
        `r_i = max(ratio_0 - decay · min(i, steps), floor)` of set A, counted from the first pass of
        all; a constant 1 by default, that is, as few passes as possible.
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
      >>> kvjax.Chelsea(budget=0.2).extent(kvjax.Extent(prompt=4096, new=1000)).total
      1147

    References:
      Hu et al., Efficient Long-Context LLM Inference via KV Cache Clustering (Chelsea, later
      CentroidKV), arXiv 2506.11418.

    Deviations from the paper:
      The interval and the constants of the schedule are not in its text. The schedule falls
      linearly and stays where `steps` have taken it. A pass merges one edge at least. An odd last
      token of a chunk is in A; a chunk of one token merges nothing. Similarity is that of the keys
      as they are stored.
    """

    budget: Budget | RemainingBudget
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
    frees_while_decoding = property(lambda self: True)
    merges = property(lambda self: True)
    bound = property(lambda self: self.outlier_heads is None and not self.keep_layers)

    def __post_init__(self):
        check_count("sinks", self.sinks, 0)
        check_count("recent", self.recent, 1)
        check_count("interval", self.interval, 1)
        if self.chunk != "whole":
            check_count("chunk", self.chunk, 2)
        if not isinstance(self.budget, RemainingBudget):
            check_budget(self.budget, self.minimum, "sinks + recent + 1")
        check_count("steps", self.steps, 0)
        self._check_schedule()
        if not isinstance(self.outlier_heads, OutlierHeads | None):
            raise TypeError(
                "outlier_heads must be OutlierHeads (calibrate_outlier_heads gives them), got "
                f"{self.outlier_heads!r}"
            )
        if not isinstance(self.keep_layers, tuple):
            raise TypeError(f"keep_layers must be a tuple of layers, got {self.keep_layers!r}")
        for layer in self.keep_layers:
            check_count("keep_layers", layer, 0)

    @property
    def minimum(self) -> int:
        """The smallest workable budget."""
        return self.sinks + self.recent + 1

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """The outlier heads apart; the others share what is left of the budget."""
        if self.bound:
            return self
        outliers = self.outlier_heads or OutlierHeads((), num_layers, kv_heads=1)
        if outliers.num_layers != num_layers:
            raise ValueError(f"{outliers!r} is of another model, got {num_layers} layers")
        outliers = outliers.with_layers(self.keep_layers)
        rest = dataclasses.replace(
            self, budget=outliers.remaining(self.budget), outlier_heads=None, keep_layers=()
        )
        return outliers.split(layer, rest)

    def extent(self, extent: Extent) -> Extent:
        """The budget, and `interval` tokens more while decoding."""
        tokens = extent.longest_prompt + extent.new
        most = most_slots(self._budget(tokens), tokens, self.minimum)
        return extent.keep(most).hold(most + self.interval)

    def init(self, cache: KVCache) -> tuple[KVCache, State]:
        """Each row's budget, a share of which is known when the prompt ends, and passes so far."""
        return cache, (self._rows_budget(cache), jnp.zeros(cache.shape[:2], jnp.int32))

    def update(self, cache: KVCache, state: State, step: Step) -> tuple[KVCache, State]:
        """Merges down to the budget at the prompt's end, and whenever `interval` more are live."""
        if step.phase == "prompt" and not step.last:
            return cache, state
        budget, passes = state
        if step.prompt_done:
            budget = self._rows_budget(cache)
        over = evictable(cache).sum(-1, dtype=jnp.int32) - budget[:, None]
        need = jnp.where(over >= (1 if step.prompt_done else self.interval), over, 0)
        # A loop of no round, where nothing is due, leaves keys and values where they are.
        cache, _, passes = jax.lax.while_loop(
            lambda carry: carry[1].any(), self._pass, (cache, need, passes)
        )
        return cache, (budget, passes)

    def _pass(self, carry):
        """Merges along the most similar edges, in every row and head that still needs to."""
        cache, need, passes = carry
        middle = evictable(cache) & (cache.position >= self.sinks) & ~newest(cache, self.recent)
        count = middle.sum(-1, dtype=jnp.int32)
        order = jnp.argsort(jnp.where(middle, cache.position, jnp.iinfo(jnp.int32).max), axis=-1)
        chunk = max(cache.slots, 2) if self.chunk == "whole" else self.chunk
        similarity, partner = soft_matching(cache.k.read(order), count, chunk=chunk)
        edges = similarity > -jnp.inf
        merges = jnp.minimum(need, self._most_merges(edges.sum(-1), count, passes))
        token = jax.lax.broadcasted_iota(jnp.int32, edges.shape, 2)
        kept = keep_best(similarity, edges, token, merges)
        into = write_slots(order, order, take_slots(order, jnp.where(kept, partner, token)))
        return merge(cache, into), need - merges, passes + (merges > 0).astype(jnp.int32)

    def _most_merges(
        self, edges: Int[Array, "B H"], count: Int[Array, "B H"], passes: Int[Array, "B H"]
    ) -> Int[Array, "B H"]:
        """`⌊r_i · edges⌋` of the next pass i: one at least, half of the tokens at most."""
        share = jnp.asarray(self._shares, jnp.float32)[jnp.minimum(passes, self.steps)]
        return jnp.clip((share * edges.astype(jnp.float32)).astype(jnp.int32), 1, count // 2)

    @property
    def _shares(self) -> list[float]:
        """Share of set A that each pass merges at most; the last one's holds from there on."""
        return [max(self.ratio_0 - self.decay * i, self.floor) for i in range(self.steps + 1)]

    def _rows_budget(self, cache: KVCache) -> Int[Array, " B"]:
        prompt, tokens = jnp.minimum(cache.length, cache.max_prompt), cache.max_tokens
        return rows_budget(self._budget(tokens), prompt + cache.max_new, tokens, self.minimum)

    def _budget(self, tokens: int) -> Budget:
        """Slots or a share, in a cache for rows of up to so many tokens."""
        if isinstance(self.budget, RemainingBudget):
            return self.budget.slots(tokens, self.minimum)
        return self.budget

    def _check_schedule(self) -> None:
        schedule = {"ratio_0": self.ratio_0, "decay": self.decay, "floor": self.floor}
        for name, value in schedule.items():
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise TypeError(f"{name} must be a number, got {value!r}")
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must lie in [0, 1], got {value}")
        if self._shares[-1] <= 0:
            raise ValueError(
                f"the share of a pass must stay above 0, got {self._shares[-1]} after {self.steps} "
                f"steps of {schedule}"
            )
