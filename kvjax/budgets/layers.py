"""How many tokens each layer holds, as functions of prompt lengths: PyramidInfer and SpindleKV."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from jaxtyping import Int

from kvjax.budgets.budgets import Budget, slots_for

GENERATED_RATIO = 0.9  # of generated tokens, times a cosine from 1.0 ...
GENERATED_FLOOR = 0.1  # ... to this
_ROUNDING = 1e-9  # a product that is a whole number but for rounding is that number


@dataclass(frozen=True)
class TokensEntering:
    """Prompt tokens that enter a layer of PyramidInfer at the paper's ratios.

    Args:
      newest, ratio, context: as in `PyramidInfer`.
      num_layers: N.
      layer: which layer; N stands for what the last one passes on.

    Example:
      >>> import numpy as np
      >>> from kvjax.budgets.layers import TokensEntering
      >>> layers = [TokensEntering(0.2, 0.9, 64, num_layers=4, layer=i) for i in range(5)]
      >>> [int(entering(np.array(1000))) for entering in layers]
      [1000, 1000, 988, 948, 884]
    """

    newest: float
    ratio: float
    context: int
    num_layers: int
    layer: int

    def __call__(self, lengths: Int[np.ndarray, " L"]) -> Int[np.ndarray, " L"]:
        """Tokens of prompts of these lengths."""
        window = np.minimum(1 + np.floor(self.newest * lengths).astype(np.int64), lengths)
        context = lengths - window
        for layer in range(self.layer):
            ratio = self.ratio + (1 - self.ratio) * _cosine(layer, self.num_layers)
            passed = np.floor(context * ratio + _ROUNDING).astype(np.int64)
            context = np.where(passed > self.context, passed, context)
        return window + context


@dataclass(frozen=True)
class CosineBudget:
    """A layer's part of an average budget b: `b + a · cos(π(l + ½)/N)`, `a = min(b, L - b)/2`.

    Rounded so that layers 0 … l together hold the whole part of their sum, and all N of them
    exactly N · b. A prompt of up to b tokens has b slots in every layer.

    Args:
      average: slots per layer on average, or a share of the prompt.
      minimum: smallest workable average.
      num_layers, layer: N and l.

    Example:
      >>> import numpy as np
      >>> from kvjax.budgets.layers import CosineBudget
      >>> [int(CosineBudget(100, 10, num_layers=4, layer=i)(np.array(1000))) for i in range(4)]
      [146, 119, 81, 54]
    """

    average: Budget
    minimum: int
    num_layers: int
    layer: int

    def __call__(self, lengths: Int[np.ndarray, " L"]) -> Int[np.ndarray, " L"]:
        """Slots of this layer for prompts of these lengths."""
        mean = slots_for(self.average, lengths, self.minimum)
        reach = np.maximum(np.minimum(mean, lengths - mean), 0) / 2

        def before(layer: int) -> np.ndarray:
            """Slots of the layers before this one: their cosines add up to a sine."""
            sine = math.sin(math.pi * layer / self.num_layers)
            cosines = sine / (2 * math.sin(math.pi / (2 * self.num_layers)))
            return np.floor(mean * layer + reach * cosines + _ROUNDING).astype(np.int64)

        return before(self.layer + 1) - before(self.layer)


@dataclass(frozen=True)
class SpindleBudget:
    """SpindleKV's slots of one layer: the window, and its part of the context, rounded down.

    The layers' mean falls short of the reserve of a prompt by less than a token, but for prompts
    whose reserve is less than the window. Shares are read as the nearest fraction with a
    denominator up to a million, and the arithmetic is exact.

    Args:
      reserve, window, beta: as in `LayerBudgetEviction`.
      num_layers, layer: N and l.

    Example:
      >>> import numpy as np
      >>> from kvjax.budgets.layers import SpindleBudget
      >>> layers = [SpindleBudget(0.5, 32, 0.05, num_layers=3, layer=i) for i in range(3)]
      >>> [int(slots(np.array([132]))[0]) for slots in layers]
      [95, 66, 37]
    """

    reserve: float
    window: int
    beta: float
    num_layers: int
    layer: int

    def __call__(self, lengths: Int[np.ndarray, " L"]) -> Int[np.ndarray, " L"]:
        """Slots of this layer for prompts of these lengths."""
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
        kept = (first * (last_layer - self.layer) + last * self.layer) // (q * of * last_layer)
        even = (mean <= least) | (self.num_layers == 1)
        kept = np.where(even, mean // (q * of), kept)
        return self.window + np.where(context > 0, kept, 0).astype(np.int64)


def generated_kept(interval: int, num_layers: int, layer: int) -> int:
    """Generated tokens that PyramidInfer keeps of every `interval`, fewer in each layer.

    Example:
      >>> from kvjax.budgets.layers import generated_kept
      >>> [generated_kept(16, num_layers=4, layer=i) for i in range(4)]
      [14, 12, 7, 3]
    """
    falling = GENERATED_FLOOR + (1 - GENERATED_FLOOR) * _cosine(layer, num_layers)
    return max(math.floor(interval * GENERATED_RATIO * falling + _ROUNDING), 1)


def _cosine(layer: int, num_layers: int) -> float:
    """From 1 in layer 0 to 0 beyond the last."""
    return (1 + math.cos(math.pi * layer / num_layers)) / 2
