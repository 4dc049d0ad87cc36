"""Splitting the budget of the method that KVCrush wraps."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from kvjax.budgets.budgets import Budget, Share
from kvjax.budgets.layers import LayerBudget
from kvjax.checks import check_count
from kvjax.protocol import KVTransform


def split_budget(base: Any, share: float) -> tuple[KVTransform, Budget]:
    """Returns the base without a share of its budget B, and that share, `round(share · B)`.

    Where B depends on the prompt's length, the base keeps at least its smallest workable budget.

    Raises:
      ValueError: the base has no budget, or the share leaves it too little.

    Example:
      >>> import kvjax
      >>> from kvjax.transforms.kvcrush.base import split_budget
      >>> split_budget(kvjax.Every(kvjax.SnapKV(budget=64), steps=8), 0.25)[1]
      16
    """
    if hasattr(base, "base"):
        inner, taken = split_budget(base.base, share)
        return dataclasses.replace(base, base=inner), taken
    if not hasattr(base, "budget"):
        raise ValueError(
            f"share= divides the budget of the base, and {base!r} has none: give representatives="
        )
    budget = base.budget
    if not isinstance(budget, int | np.integer):
        by_layer, minimum = isinstance(budget, LayerBudget), getattr(base, "minimum", 1)
        total = budget.schedule if by_layer else budget
        parts = [Share(total, share, minimum, rest) for rest in (False, True)]
        if by_layer:
            parts = [dataclasses.replace(budget, schedule=part) for part in parts]
        taken, remaining = parts
        return dataclasses.replace(base, budget=remaining), taken
    taken = round(share * budget)
    try:
        return dataclasses.replace(base, budget=budget - taken), taken
    except ValueError as error:
        raise ValueError(f"share={share} of {base!r} leaves it too little: {error}") from None


def check_share(number: int | None, share: float | None) -> None:
    """Raises unless at most one is given: a positive int `number`, or a `share` in (0, 1)."""
    if number is not None and share is not None:
        raise ValueError(f"give representatives or share, not both: got {number!r} and {share!r}")
    if number is not None:
        check_count("representatives", number, 1)
    if share is not None:
        if isinstance(share, bool) or not isinstance(share, int | float | np.floating):
            raise TypeError(f"share must be a number, got {share!r}")
        if not 0 < share < 1:
            raise ValueError(f"share must lie in (0, 1), got {share}")
