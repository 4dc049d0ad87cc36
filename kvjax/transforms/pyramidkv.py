"""PyramidKV: SnapKV with more slots in the lower layers (arXiv 2406.02069)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from jaxtyping import Int

from kvjax.budgets.budgets import Budget, slots_for
from kvjax.budgets.layers import LayerBudget, layers_alike
from kvjax.checks import MOST_COUNT
from kvjax.messages import brief
from kvjax.protocol import Card, GroupReduce, KVTransform
from kvjax.serialization import named, static_value
from kvjax.transforms.pooling import Pooling
from kvjax.transforms.snapkv import SnapKV


@named("pyramidkv")
@dataclass(frozen=True)
class PyramidKV(KVTransform):
    """SnapKV with a budget per layer that falls linearly from the first layer to the last.

    On average a layer has `base = budget - W` slots for prefix tokens. The last layer gets
    `base / beta` of them and the first `2·base - base / beta`. Where that is more than a prompt's
    prefix of `L - W` tokens, the first layer gets the whole prefix and the last `2·base - (L - W)`.
    Layers in between lie on the line, rounded by largest remainder, so that all layers add up to
    `num_layers · budget` exactly. Layer l is a `SnapKV` with its budget: pass the transform to
    `bind`.

    Args:
      budget: average slots per layer and KV head, window included; a float is a share of each
        row's prompt.
      window: observation window W, 8 as in the authors' code.
      kernel, pooling, group_reduce: as in `SnapKV`.
      beta: steepness of the pyramid, 20 as in the authors' code. 1 makes all layers equal, which
        may suit a small model better (RESULTS.md has figures). It is read as the nearest fraction
        with a denominator up to 1,000.

    Raises:
      TypeError, ValueError: as in `SnapKV`; `beta` below 1.

    Example:
      >>> import kvjax
      >>> layers = kvjax.bind(kvjax.PyramidKV(budget=128), num_layers=4)
      >>> [layer.extent(kvjax.kit.Extent(4096, 0)).prompt for layer in layers]
      [242, 166, 128, 128]

    References:
      Cai et al., PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling,
      arXiv 2406.02069.

    Deviations from the paper:
      Layer budgets add up exactly. The authors' code rounds down, overshoots, and is uniform for
      prompts shorter than twice the budget. A layer's static capacity is the largest number of
      tokens that any prompt of at most `max_prompt` tokens keeps in a layer of its quarter of the
      model. So even the last layers have room for `budget` tokens, since a prompt of that length is
      kept whole. A model of 30 layers has 8.5 % more slots under a budget of 512, and 21 % more
      under one of 0.2, than it would with a capacity for each layer. Grouped queries are
      handled as in `SnapKV`.
    """

    budget: Budget
    window: int = 8
    kernel: int = 7
    pooling: Pooling = "max"
    group_reduce: GroupReduce = "mean"
    beta: float = 20.0

    card = Card(
        acts="prompt", paper="PyramidKV, arXiv 2406.02069", when="now",
        small={"window": 4, "kernel": 3},
    )  # fmt: skip
    minimum = property(lambda self: self.window + 1)  # the smallest workable budget

    def __post_init__(self):
        self._snapkv(self.budget)
        if not isinstance(self.beta, int | float) or isinstance(self.beta, bool):
            raise TypeError(f"beta must be a number, got {brief(self.beta)}")
        if not 1 <= self.beta <= MOST_COUNT:
            raise ValueError(
                f"beta must be a number of at least 1 and at most {MOST_COUNT}, "
                f"got {brief(self.beta)}"
            )

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """Returns `SnapKV` with this layer's budget."""
        schedule = PyramidBudget(self.budget, self.window, self.beta, num_layers)
        return self._snapkv(LayerBudget(schedule, layers_alike(layer, num_layers)))

    def _snapkv(self, budget: Budget) -> SnapKV:
        """Makes a `SnapKV` with this budget, which checks the options."""
        return SnapKV(budget, self.window, self.kernel, self.pooling, self.group_reduce)


@static_value
@dataclass(frozen=True)
class PyramidBudget:
    """PyramidKV's schedule: the budgets of all layers by prompt length.

    They add up to `num_layers` times the average budget of that length. Where the average does
    not exceed the window, every layer has the window. A prompt within the average budget is left
    alone in every layer, each of which then has that budget.

    Args:
      average: slots per layer on average, or a share of the prompt.
      window, beta: as in `PyramidKV`.
      num_layers: N, the number of layers of the model.

    Example:
      >>> import numpy as np
      >>> from kvjax.transforms.pyramidkv import PyramidBudget
      >>> PyramidBudget(128, window=8, beta=20, num_layers=4)(np.array([4096])).ravel().tolist()
      [242, 166, 90, 14]
    """

    average: Budget
    window: int
    beta: float
    num_layers: int

    def __call__(self, lengths: Int[np.ndarray, " L"]) -> Int[np.ndarray, "N L"]:
        """Returns the slots of all layers for prompts of these lengths."""
        base = np.maximum(slots_for(self.average, lengths, self.window + 1) - self.window, 0)
        prefix = np.maximum(lengths - self.window, 0)
        if self.num_layers == 1:
            return base[None] + self.window
        # beta = p / q in integers: rounding noise must not decide which layer gets a slot.
        p, q = Fraction(self.beta).limit_denominator(1000).as_integer_ratio()
        layer, steps = np.arange(self.num_layers)[:, None], self.num_layers - 1
        # The first layer has base · (2p - q) / p and the last base · q / p; a layer weighs both by
        # its distance from the other end.
        slots, remainder = np.divmod(base * ((2 * p - q) * (steps - layer) + q * layer), p * steps)
        # Where the first layer would get more than the prefix, it gets all of the prefix.
        capped = base * (2 * p - q) > prefix * p
        flatter = np.divmod(prefix * (steps - layer) + (2 * base - prefix) * layer, steps)
        slots = np.where(capped, flatter[0], slots)
        remainder = np.where(capped, flatter[1], remainder)
        # The slots that rounding down has left over go to the layers with the largest remainders.
        missing = self.num_layers * base - slots.sum(0)
        rank = np.argsort(np.argsort(-remainder, axis=0, kind="stable"), axis=0)
        return np.where(prefix <= base, base, slots + (rank < missing)) + self.window
