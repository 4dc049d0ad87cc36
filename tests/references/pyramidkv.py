"""PyramidKV (arXiv 2406.02069): SnapKV with a budget that falls from layer to layer."""

from __future__ import annotations

import math
from fractions import Fraction

from .budgets import rows_budget
from .snapkv import SnapKV


def layer_budgets(budget: int, window: int, beta: float, length: int, num_layers: int) -> list[int]:
    """The budgets of all layers, for a row of `length` tokens; they add up to num_layers * budget.

        base = B - W       min = base / beta       max = 2 base - min
        where max > L - W:  max = L - W            min = 2 base - max
        share[l] = max - (max - min) * l / (num_layers - 1)        one layer: base

    Integers by largest remainder: every share is rounded down, and what is missing goes, one
    each, to the largest fractional parts, ties to the lower layer.  Budgets are W + share.
    Exact rational arithmetic throughout; beta is the nearest fraction with a
    denominator up to 1000.  A row
    of at most W tokens has no prefix (L - W counts as 0), and a budget below W counts as W: such
    rows are shorter than every layer's budget.
    """
    if length <= budget:  # the prompt is left alone in every layer
        return [max(budget, window)] * num_layers
    base, prefix = max(budget - window, 0), max(length - window, 0)
    low = base / Fraction(beta).limit_denominator(1000)
    high = 2 * base - low
    if high > prefix:
        high = Fraction(prefix)
        low = 2 * base - high
    steps = max(num_layers - 1, 1)
    shares = [high - (high - low) * Fraction(layer, steps) for layer in range(num_layers)]
    if num_layers == 1:
        shares = [Fraction(base)]
    whole = [math.floor(share) for share in shares]
    missing = num_layers * base - sum(whole)
    by_remainder = sorted(range(num_layers), key=lambda i: (whole[i] - shares[i], i))
    for layer in by_remainder[:missing]:
        whole[layer] += 1
    return [window + share for share in whole]


class PyramidKV(SnapKV):
    """SnapKV with W = 8 and the budget of one layer, computed from the row's tokens so far."""

    def __init__(
        self,
        budget: int | float,
        layer: int,
        num_layers: int,
        observation: int = 8,
        beta: float = 20,
        **options,
    ) -> None:
        super().__init__(budget, observation=observation, **options)
        self.layer, self.num_layers, self.beta = layer, num_layers, beta

    def row_budget(self, length: int) -> int:
        """This layer's budget for a row of `length` tokens so far."""
        mean = rows_budget(self.budget, length, self.observation + 1)
        return layer_budgets(mean, self.observation, self.beta, length, self.num_layers)[self.layer]
