"""SpindleKV's schedule: how many slots each layer keeps."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from jaxtyping import Int

from kvjax.budgets.layers import Slots


@dataclass(frozen=True)
class SpindleBudget:
    """SpindleKV's slots of layer l: the window, and its part of the context, rounded down.

    The layers' mean falls short of the reserve of a prompt by less than a token, but for prompts
    whose reserve is less than the window. Shares are read as the nearest fraction with a
    denominator up to a million, and the arithmetic is exact. Fields are those of
    `LayerBudgetEviction`, and the number of layers.

    Example:
      >>> import numpy as np
      >>> from kvjax.transforms.spindlekv.schedule import SpindleBudget
      >>> SpindleBudget(0.5, 32, 0.05, num_layers=3)(np.array([132])).ravel().tolist()
      [95, 66, 37]
    """

    reserve: float
    window: int
    beta: float
    num_layers: int

    def __call__(self, lengths: Int[np.ndarray, " L"]) -> Slots:
        """Slots of all layers for prompts of these lengths."""
        p, q = Fraction(self.reserve).limit_denominator(10**6).as_integer_ratio()
        low, of = Fraction(self.beta).limit_denominator(10**6).as_integer_ratio()
        last_layer = max(self.num_layers - 1, 1)
        largest = 4 * q * of * last_layer * max(int(np.max(lengths, initial=1)), self.window)
        lengths = np.asarray(lengths, np.int64 if largest < 2**63 else object)
        context = np.maximum(lengths - self.window, 0)
        # r_c · (L - W), the whole context and β times it, as multiples of 1 / (q · of)
        mean = np.maximum(p * lengths - self.window * q, 0) * of
        whole, least = context * (q * of), context * (q * low)
        below = 2 * mean <= whole + least
        first = np.where(below, np.minimum(whole, 2 * mean - least), whole)
        last = np.where(below, least, 2 * mean - whole)
        layer = np.arange(self.num_layers)[:, None]
        kept = (first * (last_layer - layer) + last * layer) // (q * of * last_layer)
        even = (mean <= least) | (self.num_layers == 1)
        kept = np.where(even, mean // (q * of), kept)
        return self.window + np.where(context > 0, kept, 0).astype(np.int64)
