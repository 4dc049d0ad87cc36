"""H2O: heavy hitters and the newest tokens (arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.budgets.budgets import Budget, check_budget
from kvjax.cache.slots import KVCache, evict
from kvjax.protocol import (
    Extent,
    GroupReduce,
    KVTransform,
    Needs,
    State,
    Step,
    accumulated_attention,
    check_group_reduce,
    group_scores,
)
from kvjax.transforms.selection import (
    decoding_budget,
    decoding_extent,
    evict_worst,
    evictable,
    keep_best,
    newest,
)


@dataclass(frozen=True)
class H2O(KVTransform):
    """Keeps the newest tokens and those that have received the most attention so far.

    Of a budget B, `⌊B/2⌋` slots are for heavy hitters and the rest for the newest tokens. The score
    of a slot is `Σ_t p[t, s]`, the attention probability it received from all queries so far, not
    normalised. After the prompt the sums are exact over its whole causal attention matrix, which
    never exists in memory. While decoding: append, attend over at most B + 1 slots, add the step's
    probabilities, and only if more than B are live evict the lowest one that is not recent.

    Args:
      budget: live slots per KV head, generated tokens included; a float is a share of each row's
        prompt, fixed at its end.
      group_reduce: how the scores of a KV head's query heads become one; mean by default.

    Raises:
      TypeError, ValueError: no number, `budget` below 2, a share outside (0, 1], unknown reduction.

    Example:
      >>> import kvjax
      >>> kvjax.H2O(budget=512).extent(kvjax.Extent(prompt=4096, new=1000)).total
      513

    References:
      Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
      Models, arXiv 2306.14048.

    Deviations from the paper:
      With grouped queries one decision is made per KV head. A prompt that is shorter than the
      budget is left alone, and decoding fills the free slots before anything is evicted.
    """

    budget: Budget
    group_reduce: GroupReduce = "mean"

    paper: ClassVar[str] = "H2O, arXiv 2306.14048"
    minimum: ClassVar[int] = 2  # smallest workable budget
    frees_while_decoding = property(lambda self: True)
    needs = property(lambda self: Needs(accumulated_attention=True))

    def __post_init__(self):
        check_budget(self.budget, self.minimum, "one heavy hitter, one recent token")
        check_group_reduce(self.group_reduce)

    def extent(self, extent: Extent) -> Extent:
        """The budget, and one slot for the token that is being added."""
        return decoding_extent(extent, self.budget, self.minimum)

    def init(self, cache: KVCache) -> tuple[KVCache, State]:
        """Each row's budget; a share is known when the prompt ends."""
        return cache, decoding_budget(self.budget, cache, self.minimum)

    def update(self, cache: KVCache, state: State, step: Step) -> tuple[KVCache, State]:
        """Evicts the least attended tokens outside the recent window until the budget is met."""
        if step.phase == "prompt" and not step.last:
            return cache, state
        score = group_scores(self.score(cache, state, step), cache, self.group_reduce)
        if step.phase == "decode":
            others = evictable(cache) & ~self._recent(cache, state)
            return evict_worst(cache, score, others, state), state
        budget = decoding_budget(self.budget, cache, self.minimum)
        score = jnp.where(self._recent(cache, budget), jnp.inf, score)
        return evict(cache, keep_best(score, evictable(cache), cache.position, budget)), budget

    def score(self, cache: KVCache, state: State, step: Step) -> Float[Array, "B Q S"]:
        """Accumulated attention per query head."""
        return accumulated_attention(cache)

    def recent(self, cache: KVCache, state: State) -> Int[Array, " B"]:
        """The half of the budget that heavy hitters leave."""
        return state - state // 2

    def _recent(self, cache: KVCache, budget: Array) -> Array:
        return newest(cache, self.recent(cache, budget))
