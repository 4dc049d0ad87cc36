"""PyramidInfer's schedules: how many tokens enter each layer, and how many it keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from kvjax.budgets.budgets import Budget, slots_for
from kvjax.budgets.heads import ROUNDING
from kvjax.budgets.layers import Slots
from kvjax.serialization import static_value

GENERATED_RATIO = 0.9  # share of generated tokens that stays, times a cosine from 1.0 ...
GENERATED_FLOOR = 0.1  # ... to this


@static_value
@dataclass(frozen=True)
class TokensEntering:
    """Numbers of prompt tokens that enter each layer at the paper's ratios, and leave the last one.

    Fields are those of `PyramidInfer`. For N layers the result has N + 1 rows.

    Example:
      >>> import numpy as np
      >>> from kvjax.transforms.pyramidinfer.schedule import TokensEntering
      >>> TokensEntering(0.2, 0.9, 64, num_layers=4)(np.array([1000])).ravel().tolist()
      [1000, 1000, 988, 948, 884]
    """

    newest: float
    ratio: float
    context: int
    num_layers: int

    def __call__(self, lengths: Int[np.ndarray, " L"]) -> Slots:
        """Returns the tokens entering each layer, for prompts of these lengths."""
        window = np.minimum(1 + np.floor(self.newest * lengths).astype(np.int64), lengths)
        context = lengths - window
        entering = [lengths]
        for layer in range(self.num_layers):
            ratio = self.ratio + (1 - self.ratio) * _cosine(layer, self.num_layers)
            passed = np.floor(context * ratio + ROUNDING).astype(np.int64)
            context = np.where(passed > self.context, passed, context)
            entering.append(window + context)
        return np.stack(entering)


@static_value
@dataclass(frozen=True)
class CosineBudget:
    """Parts of the layers in an average budget b, falling by a cosine from the first to the last.

    Layer l has `b + a · cos(π(l + ½)/N)` slots, with `a = min(b, L - b)/2`. Layers 0 … l together
    hold the floor of their sum, and all N of them exactly N · b. A prompt of up to b tokens has b
    slots in every layer.

    Args:
      average: slots per layer on average, or a share of the prompt.
      minimum: smallest workable average.
      num_layers: N.

    Example:
      >>> import numpy as np
      >>> from kvjax.transforms.pyramidinfer.schedule import CosineBudget
      >>> CosineBudget(100, 10, num_layers=4)(np.array([1000])).ravel().tolist()
      [146, 119, 81, 54]
    """

    average: Budget
    minimum: int
    num_layers: int

    def __call__(self, lengths: Int[np.ndarray, " L"]) -> Slots:
        """Returns the slots of all layers for prompts of these lengths."""
        mean = slots_for(self.average, lengths, self.minimum)
        amplitude = np.maximum(np.minimum(mean, lengths - mean), 0) / 2
        layer = np.arange(self.num_layers + 1)[:, None]
        # Σ_{j < l} cos(π(j + ½)/N) = sin(πl/N) / (2 sin(π/2N))
        sine = np.sin(math.pi * layer / self.num_layers)
        cosines = sine / (2 * math.sin(math.pi / (2 * self.num_layers)))
        total_before = np.floor(mean * layer + amplitude * cosines + ROUNDING).astype(np.int64)
        return np.diff(total_before, axis=0)


def generated_kept(interval: int, num_layers: int, layer: int) -> int:
    """Returns how many of every `interval` generated tokens a layer keeps, fewer in deeper layers.

    Example:
      >>> from kvjax.transforms.pyramidinfer.schedule import generated_kept
      >>> [generated_kept(16, num_layers=4, layer=i) for i in range(4)]
      [14, 12, 7, 3]
    """
    falling = GENERATED_FLOOR + (1 - GENERATED_FLOOR) * _cosine(layer, num_layers)
    return max(math.floor(interval * GENERATED_RATIO * falling + ROUNDING), 1)


def _cosine(layer: int, num_layers: int) -> float:
    """Falls from 1 in layer 0 to 0 behind the last layer."""
    return (1 + math.cos(math.pi * layer / num_layers)) / 2
