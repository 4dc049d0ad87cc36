"""H2O: heavy hitters and the newest tokens (arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from kvjax.budgets.budgets import Budget, check_budget
from kvjax.cache.slots import KVCache
from kvjax.checks import check_choice
from kvjax.decisions import Keep
from kvjax.protocol import GroupReduce, Needs, Step, accumulated_attention
from kvjax.transforms.held_budget import Budgets, HeldBudget


@dataclass(frozen=True)
class H2O(HeldBudget):
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
      >>> kvjax.H2O(budget=512).extent(kvjax.kit.Extent(prompt=4096, new=1000)).total
      513

    References:
      Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
      Models, arXiv 2306.14048.

    Deviations from the paper:
      With grouped queries one decision is made per KV head. A prompt that is shorter than the
      budget is left alone, and decoding fills the free slots before anything is evicted. The newest
      tokens are those of the newest positions: where positions have gaps there are fewer of them,
      and more heavy hitters. A score that is NaN counts as the lowest.
    """

    budget: Budget
    group_reduce: GroupReduce = "mean"

    paper: ClassVar[str] = "H2O, arXiv 2306.14048"
    minimum: ClassVar[int] = 2  # smallest workable budget
    needs = property(lambda self: Needs(accumulated_attention=True))

    def __post_init__(self):
        check_budget(self.budget, self.minimum, "one heavy hitter, one recent token")
        check_choice("group_reduce", self.group_reduce, get_args(GroupReduce))

    def on_step(self, cache: KVCache, state: Budgets, step: Step) -> tuple[Keep, Budgets]:
        """Keeps the newest tokens and those that have received the most attention."""
        score = accumulated_attention(cache)
        recent = state - state // 2
        return Keep(state, score, newest=recent, reduce=self.group_reduce), state
