"""H2O: heavy hitters and the newest tokens (arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from kvjax.budgets.budgets import Budget, check_budget
from kvjax.cache.slots import KVCache
from kvjax.checks import check_choice
from kvjax.decisions import Keep
from kvjax.protocol import Card, GroupReduce, Needs, Step, accumulated_attention
from kvjax.serialization import named
from kvjax.transforms.held_budget import Budgets, HeldBudget


@named("h2o")
@dataclass(frozen=True)
class H2O(HeldBudget):
    """Keeps the newest tokens and those that have received the most attention so far.

    A budget of B slots is split: `⌊B/2⌋` are for heavy hitters, the rest for the newest tokens. The
    score of a slot is `Σ_t p[t, s]`, the attention probability that it has received from all
    queries so far, not normalised. At the end of the prompt these sums are exact over the causal
    attention matrix, which is never held in memory as a whole. A decode step appends its token,
    attends over at most B + 1 slots and adds its probabilities to the scores. If more than B slots
    are then live, the one with the lowest score that is not recent is evicted.

    Args:
      budget: live slots per KV head, generated tokens included. A float is a share of each row's
        prompt, fixed at its end.
      group_reduce: how the scores of a KV head's query heads are combined; mean by default.

    Raises:
      TypeError, ValueError: `budget` is not a number, below 2 or a share outside (0, 1]; an unknown
        reduction.

    Example:
      >>> import kvjax
      >>> kvjax.H2O(budget=512).extent(kvjax.kit.Extent(prompt=4096, new=1000)).total
      513

    References:
      Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
      Models, arXiv 2306.14048.

    Deviations from the paper:
      With grouped queries one decision is made per KV head. A prompt that is shorter than the
      budget is left alone, and decoding fills the free slots before anything is evicted. "Newest"
      refers to positions: where positions have gaps, fewer recent tokens are kept and more heavy
      hitters. A score that is NaN counts as the lowest.
    """

    budget: Budget
    group_reduce: GroupReduce = "mean"

    card = Card(acts="prompt, every step", paper="H2O, arXiv 2306.14048", when="endless")
    minimum: ClassVar[int] = 2  # smallest workable budget

    @property
    def needs(self) -> Needs:
        """Accumulated attention."""
        return Needs(accumulated_attention=True)

    def __post_init__(self):
        check_budget(self.budget, self.minimum, "one heavy hitter, one recent token")
        check_choice("group_reduce", self.group_reduce, get_args(GroupReduce))

    def on_step(self, cache: KVCache, state: Budgets, step: Step) -> tuple[Keep, Budgets]:
        """Keeps the newest tokens and those that have received the most attention."""
        score = accumulated_attention(cache)
        recent = state - state // 2
        return Keep(state, score, newest=recent, reduce=self.group_reduce), state
