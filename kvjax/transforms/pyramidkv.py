"""PyramidKV: SnapKV with more slots in the lower layers (arXiv 2406.02069)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal, get_args

import numpy as np

from kvjax.budgets.budgets import Budget, check_budget, check_choice, slots_for
from kvjax.protocol import GroupReduce, KVTransform
from kvjax.transforms.snapkv import SnapKV, check_observation


@dataclass(frozen=True)
class PyramidKV(KVTransform):
    """SnapKV with a budget per layer that falls linearly from the first layer to the last.

    With `base = budget - W` slots for prefix tokens on average, the last layer gets `base / beta`
    and the first `2·base - base / beta`; where that is more than a prompt's prefix of `L - W`
    tokens, the first layer gets the whole prefix and the last `2·base - (L - W)`. Layers in between
    are linear, rounded by largest remainder, so that they add up to `num_layers · budget` exactly.
    Layer l is a `SnapKV` with its budget: give the transform to `bind`.

    Args:
      budget: average slots per layer and KV head, window included; a float is a share of each
        row's prompt.
      window: observation window W, 8 as in the authors' code.
      kernel, pooling, group_reduce: as in `SnapKV`.
      beta: how steep the pyramid is, 20 as in the authors' code; 1 is uniform. It is read as the
        nearest fraction with a denominator up to 1,000.

    Raises:
      TypeError, ValueError: as `SnapKV`; `beta` below 1.

    Example:
      >>> import kvjax
      >>> layers = kvjax.bind(kvjax.PyramidKV(budget=128), num_layers=4)
      >>> [layer.extent(kvjax.Extent(4096, 0)).prompt for layer in layers]
      [242, 166, 128, 128]

    References:
      Cai et al., PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling,
      arXiv 2406.02069.

    Deviations from the paper:
      Layer budgets add up exactly (the authors' code rounds down, overshoots, and is uniform for
      prompts shorter than twice the budget). A layer's static capacity is the most that any prompt
      which fits keeps there, so the last layers hold `budget` slots: a prompt of that length is
      kept whole. Grouped queries as in `SnapKV`.
    """

    budget: Budget
    window: int = 8
    kernel: int = 7
    pooling: Literal["max", "avg"] = "max"
    group_reduce: GroupReduce = "mean"
    beta: float = 20.0

    paper: ClassVar[str] = "PyramidKV, arXiv 2406.02069"

    def __post_init__(self):
        check_observation(self.window, self.kernel, self.pooling)
        check_choice("group_reduce", self.group_reduce, get_args(GroupReduce))
        check_budget(self.budget, self.window + 1, "window + 1")
        if not isinstance(self.beta, int | float) or isinstance(self.beta, bool):
            raise TypeError(f"beta must be a number, got {self.beta!r}")
        if not 1 <= self.beta < math.inf:
            raise ValueError(f"beta must be a finite number of at least 1, got {self.beta}")

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """SnapKV with this layer's budget."""
        budget = LayerBudget(self.budget, self.window, self.beta, layer, num_layers)
        return SnapKV(budget, self.window, self.kernel, self.pooling, self.group_reduce)


@dataclass(frozen=True)
class LayerBudget:
    """PyramidKV's budget of one layer, as a function of prompt lengths.

    Args:
      average: slots per layer on average, or a share of the prompt.
      window, beta: as in `PyramidKV`.
      layer, num_layers: which layer of how many.
    """

    average: Budget
    window: int
    beta: float
    layer: int
    num_layers: int

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        """Slots of this layer for prompts of these lengths."""
        flat = np.ascontiguousarray(lengths, np.int64).tobytes()  # hashes quickly
        slots = pyramid(self.average, self.window, self.beta, self.num_layers, flat)
        return slots[:, self.layer].reshape(lengths.shape)


@functools.lru_cache(maxsize=2)
def pyramid(
    average: Budget, window: int, beta: float, num_layers: int, lengths: bytes
) -> np.ndarray:
    """Slots per prompt length and layer, `[len(lengths), num_layers]`, for int64 `lengths`.

    Each row adds up to `num_layers` times the average budget of its length; where that is no more
    than the window, every layer has the window. A prompt within the average budget is left alone
    in every layer, each of which then has that budget.
    """
    length, layer = np.frombuffer(lengths, np.int64), np.arange(num_layers)
    base = np.maximum(slots_for(average, length, window + 1) - window, 0)[:, None]
    prefix = np.maximum(length - window, 0)[:, None]
    if num_layers == 1:
        return base + window
    # Fractions as integers: rounding noise must not decide which layer gets a slot.
    p, q = Fraction(beta).limit_denominator(1000).as_integer_ratio()
    steps = num_layers - 1
    # high = base · (2p - q) / p and low = base · q / p, weighted by the distance from both ends.
    slots, rest = np.divmod(base * ((2 * p - q) * (steps - layer) + q * layer), p * steps)
    whole = base * (2 * p - q) > prefix * p
    capped = np.divmod(prefix * (steps - layer) + (2 * base - prefix) * layer, steps)
    slots, rest = np.where(whole, capped[0], slots), np.where(whole, capped[1], rest)
    missing = num_layers * base - slots.sum(1, keepdims=True)
    rank = np.argsort(np.argsort(-rest, axis=1, kind="stable"), axis=1)
    return np.where(prefix <= base, base, slots + (rank < missing)) + window
