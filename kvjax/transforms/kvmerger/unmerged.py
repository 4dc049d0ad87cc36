"""What KVMerger leaves alone: how many recent and heavy tokens, for prompts of each length."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from kvjax.budgets.budgets import check_budget, slots_for
from kvjax.budgets.layers import ROUNDING
from kvjax.checks import check_count, check_number
from kvjax.transforms.held_budget import PromptBudget

# The paper's shares of the prompt at these budgets; linear between them, scaled with the budget
# outside.
BUDGETS, RECENT, HEAVY = (0.0, 0.35, 0.5, 1.0), (0.0, 0.08, 0.17, 0.34), (0.0, 0.02, 0.12, 0.24)
LEAST_RECENT = 64
"""Recent tokens that stay by default, whatever the paper's share comes to."""


class Unmerged(PromptBudget):
    """A method with the fields `budget`, `recent` and `heavy` of `KVMerger`.

    Of n tokens, h heavy ones and r recent ones leave at least n − r − 2h − 1 pairs of neighbours: a
    heavy one parts two sets. A budget must therefore be above r + 2h.

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
        if isinstance(self.budget, float) and self._given(float) >= self.budget:
            raise ValueError(
                f"recent + 2 · heavy must be below the budget {self.budget}, got recent="
                f"{self.recent} and heavy={self.heavy}"
            )

    minimum = property(lambda self: self._given(int) + 1)  # the smallest workable budget

    def _given(self, kind: type) -> float:
        """r + 2h of those that were given as a count, or as a share."""
        recent, heavy = (x if isinstance(x, kind) else 0 for x in (self.recent, self.heavy))
        return recent + 2 * heavy

    def counts(
        self, lengths: Int[np.ndarray, " L"]
    ) -> tuple[Int[np.ndarray, " L"], Int[np.ndarray, " L"]]:
        """Recent and heavy tokens of rows of these lengths, cut down to what the budget allows."""
        budget = None if self.budget is None else slots_for(self.budget, lengths, self.minimum)
        share = 0.5 if budget is None else budget / np.maximum(lengths, 1)

        def tokens(given: int | float | None, paper: tuple[float, ...]) -> np.ndarray:
            if given is not None and not isinstance(given, float):
                return np.full(lengths.shape, given)
            part = np.interp(share, BUDGETS, paper) if given is None else given
            return np.floor(part * lengths + ROUNDING).astype(np.int64)

        recent, heavy = tokens(self.recent, RECENT), tokens(self.heavy, HEAVY)
        if budget is not None:
            if self.recent is None:
                least = np.minimum(LEAST_RECENT, budget * 7 // 8)
                if self.heavy is not None:  # those that were asked for stay
                    least = np.minimum(least, budget - 1 - 2 * heavy)
                recent = np.maximum(recent, least)
            recent = np.clip(recent, 0, np.maximum(budget - 1, 0))
            heavy = np.clip(heavy, 0, np.maximum(budget - 1 - recent, 0) // 2)
        return recent, heavy
