"""Schedule of SpindleKV: the number of slots that each layer keeps."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from jaxtyping import Int

from kvjax.budgets.layers import Slots
from kvjax.serialization import static_value


@static_value
@dataclass(frozen=True)
class SpindleBudget:
    """Slots of each layer: the window, and the layer's part of the context, rounded down.

    The mean over the layers is less than a token below a prompt's reserve, except for prompts whose
    reserve is less than the window. Shares are read as the nearest fraction with a denominator up
    to a million, and the arithmetic is exact. Fields are those of `LayerBudgetEviction`, and the
    number of layers.

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
        """Returns the slots of all layers for prompts of these lengths."""
        # reserve = p / q and beta = a / b
        p, q = Fraction(self.reserve).limit_denominator(10**6).as_integer_ratio()
        a, b = Fraction(self.beta).limit_denominator(10**6).as_integer_ratio()
        last_layer = max(self.num_layers - 1, 1)
        # Where products may exceed 64 bits, NumPy computes with Python's integers.
        largest = 4 * q * b * last_layer * max(int(np.max(lengths, initial=1)), self.window)
        lengths = np.asarray(lengths, np.int64 if largest < 2**63 else object)
        context = np.maximum(lengths - self.window, 0)
        # Numbers of context tokens as multiples of 1 / (q · b): r_c · (L - W), L - W, β · (L - W)
        mean = np.maximum(p * lengths - self.window * q, 0) * b
        all_of_it, least = context * (q * b), context * (q * a)
        below_alpha = 2 * mean <= all_of_it + least
        first = np.where(below_alpha, np.minimum(all_of_it, 2 * mean - least), all_of_it)
        last = np.where(below_alpha, least, 2 * mean - all_of_it)
        layer = np.arange(self.num_layers)[:, None]
        kept = (first * (last_layer - layer) + last * layer) // (q * b * last_layer)
        even = (mean <= least) | (self.num_layers == 1)
        kept = np.where(even, mean // (q * b), kept)
        return self.window + np.where(context > 0, kept, 0).astype(np.int64)
