"""Tokens that KVMerger does not merge: numbers of recent and heavy tokens by prompt length."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from kvjax.budgets.budgets import check_budget, slots_for
from kvjax.budgets.heads import ROUNDING
from kvjax.checks import check_count, check_number
from kvjax.transforms.held_budget import PromptBudget

# The paper gives shares of the prompt for budgets of 35 % and 50 %. Between them shares are
# linear; outside they are proportional to the budget.
BUDGETS, RECENT, HEAVY = (0.0, 0.35, 0.5, 1.0), (0.0, 0.08, 0.17, 0.34), (0.0, 0.02, 0.12, 0.24)
LEAST_RECENT = 64
"""Recent tokens that stay by default, even where the paper's share is smaller."""


class Unmerged(PromptBudget):
    """Base class of `KVMerger` with its fields `budget`, `recent` and `heavy`.

    Of n tokens, h heavy and r recent ones leave at least n − r − 2h − 1 pairs of neighbours that
    can be merged, since a heavy token separates two sets. A budget must therefore be above r + 2h.

    Example:
      >>> import kvjax, numpy as np
      >>> [int(x[0]) for x in kvjax.KVMerger(budget=0.35).counts(np.array([1000]))]
      [80, 20]
    """

    if TYPE_CHECKING:
        recent: int | float | None
        heavy: int | float | None

    def __post_init__(self):
        for name, value in (("recent", self.recent), ("heavy", self.heavy)):
            if isinstance(value, float):
                check_number(name, value, 0.0, 1.0)
            elif value is not None:
                check_count(name, value, 0)
        if self.budget is not None:
            check_budget(self.budget, self.minimum, "recent + 2 · heavy + 1")
        if isinstance(self.budget, float) and self._protected(float) >= self.budget:
            raise ValueError(
                f"recent + 2 · heavy must be below the budget {self.budget}, got recent="
                f"{self.recent} and heavy={self.heavy}"
            )

    minimum = property(lambda self: self._protected(int) + 1)  # the smallest workable budget

    def _protected(self, number_type: type[int] | type[float]) -> float:
        """Returns r + 2h of the fields given as counts (int) or as shares (float)."""
        recent, heavy = (x if isinstance(x, number_type) else 0 for x in (self.recent, self.heavy))
        return recent + 2 * heavy

    def counts(
        self, lengths: Int[np.ndarray, " L"]
    ) -> tuple[Int[np.ndarray, " L"], Int[np.ndarray, " L"]]:
        """Returns the recent and heavy tokens of rows of these lengths, as the budget allows."""
        budget = None if self.budget is None else slots_for(self.budget, lengths, self.minimum)
        budget_share = 0.5 if budget is None else budget / np.maximum(lengths, 1)

        def tokens(option: int | float | None, paper: tuple[float, ...]) -> np.ndarray:
            if option is not None and not isinstance(option, float):
                return np.full(lengths.shape, option)
            share = np.interp(budget_share, BUDGETS, paper) if option is None else option
            return np.floor(share * lengths + ROUNDING).astype(np.int64)

        recent, heavy = tokens(self.recent, RECENT), tokens(self.heavy, HEAVY)
        if budget is not None:
            if self.recent is None:
                least = np.minimum(LEAST_RECENT, budget * 7 // 8)
                if self.heavy is not None:  # an explicit number of heavy tokens has precedence
                    least = np.minimum(least, budget - 1 - 2 * heavy)
                recent = np.maximum(recent, least)
            recent = np.clip(recent, 0, np.maximum(budget - 1, 0))
            heavy = np.clip(heavy, 0, np.maximum(budget - 1 - recent, 0) // 2)
        return recent, heavy
