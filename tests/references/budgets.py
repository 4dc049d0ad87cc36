"""How a budget is read."""

from __future__ import annotations

import math


def rows_budget(budget: int | float, length: int, minimum: int) -> int:
    """Slots that a row of `length` tokens may keep.

    An int is the number itself.  A float f is a share of the row's tokens so far (L = 1 + newest
    position): B = min(L, max(floor(f * L), m)), where m is the smallest budget that the method
    works with.  f * L is the double-precision product.
    """
    if isinstance(budget, int):
        return budget
    return min(length, max(math.floor(budget * length), minimum))
