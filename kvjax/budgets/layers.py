"""How many tokens each layer holds, where layers differ: PyramidInfer's and SpindleKV's schedules.

A schedule is a function from prompt lengths `[L]` to the slots of all N layers, `[N, L]`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.budgets.budgets import Budget, slots_for

KINDS = 4  # of layers, at most
GENERATED_RATIO = 0.9  # of generated tokens, times a cosine from 1.0 ...
GENERATED_FLOOR = 0.1  # ... to this
ROUNDING = 1e-9  # a product that is a whole number but for rounding is that number

Slots = Int[np.ndarray, "N L"]
Table = Int[Array, " L"] | tuple[()]  # a layer's slots for prompts of 0, 1, ... tokens


@dataclass(frozen=True)
class LayerBudget:
    """The budgets of neighbouring layers, whose caches have room for the largest of them.

    What a cache has room for is static. What a layer keeps is a table in its transform's state
    (`layer_table`), so that these layers are equal values and share compiled code. Where budgets
    fall linearly, all layers together have at most a quarter more slots than they use.

    Args:
      schedule: budgets of all layers of the model.
      layers: the layers that this one stands for.

    Example:
      >>> import numpy as np
      >>> from kvjax.budgets.layers import CosineBudget, LayerBudget, layers_alike
      >>> budget = LayerBudget(CosineBudget(100, 10, num_layers=8), layers_alike(2, num_layers=8))
      >>> budget.layers, budget(np.array([1000])).tolist()
      (range(2, 4), [128])
    """

    schedule: Callable[[Int[np.ndarray, " L"]], Slots]
    layers: range

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        """The most slots that any of these layers keeps of prompts of these lengths."""
        return self.of_layers(lengths).max(0).reshape(np.shape(lengths))

    def of_layers(self, lengths: np.ndarray) -> Slots:
        """Slots of each of these layers."""
        flat = np.ascontiguousarray(lengths, np.int64).tobytes()  # hashes quickly
        return _all_layers(self.schedule, flat)[self.layers.start : self.layers.stop]


@functools.lru_cache(maxsize=2)
def _all_layers(schedule: Callable[[np.ndarray], Slots], lengths: bytes) -> Slots:
    return schedule(np.frombuffer(lengths, np.int64))


def layers_alike(layer: int, num_layers: int) -> range:
    """The layers that have as much room as this one: neighbours, about a quarter of all."""
    kind = layer * KINDS // num_layers
    return range(*(-(-number * num_layers // KINDS) for number in (kind, kind + 1)))


def layer_table(budget: Budget | None, layer: int, max_length: int) -> Table:
    """One layer's slots, for a transform's state; empty where layers do not differ.

    The table ends where no layer's slots change any more, and has the smallest sufficient type.
    """
    if not isinstance(budget, LayerBudget):
        return ()
    slots = budget.of_layers(np.arange(max_length + 1))
    changes = np.flatnonzero((slots != slots[:, -1:]).any(0))
    own = slots[budget.layers.index(layer), : changes.max(initial=-1) + 2]
    return jnp.asarray(own.astype(np.min_scalar_type(slots.max())))


def layers_of(transform: object) -> range | None:
    """The layers that a transform with layer budgets stands for; None: any."""
    if isinstance(transform, LayerBudget):
        return transform.layers
    inner = transform if isinstance(transform, tuple) else ()
    if dataclasses.is_dataclass(transform):
        inner = [getattr(transform, field.name) for field in dataclasses.fields(transform)]
    return next(filter(None, map(layers_of, inner)), None)


@dataclass(frozen=True)
class TokensEntering:
    """Prompt tokens that enter PyramidInfer's layers at the paper's ratios, and leave the last one.

    Fields are those of `PyramidInfer`. For N layers the result has N + 1 rows.

    Example:
      >>> import numpy as np
      >>> from kvjax.budgets.layers import TokensEntering
      >>> TokensEntering(0.2, 0.9, 64, num_layers=4)(np.array([1000])).ravel().tolist()
      [1000, 1000, 988, 948, 884]
    """

    newest: float
    ratio: float
    context: int
    num_layers: int

    def __call__(self, lengths: Int[np.ndarray, " L"]) -> Slots:
        """Tokens of prompts of these lengths."""
        window = np.minimum(1 + np.floor(self.newest * lengths).astype(np.int64), lengths)
        context = lengths - window
        entering = [lengths]
        for layer in range(self.num_layers):
            ratio = self.ratio + (1 - self.ratio) * _cosine(layer, self.num_layers)
            passed = np.floor(context * ratio + ROUNDING).astype(np.int64)
            context = np.where(passed > self.context, passed, context)
            entering.append(window + context)
        return np.stack(entering)


@dataclass(frozen=True)
class CosineBudget:
    """Layer l's part of an average budget b: `b + a · cos(π(l + ½)/N)`, `a = min(b, L - b)/2`.

    Rounded so that layers 0 … l together hold the whole part of their sum, and all N of them
    exactly N · b. A prompt of up to b tokens has b slots in every layer.

    Args:
      average: slots per layer on average, or a share of the prompt.
      minimum: smallest workable average.
      num_layers: N.

    Example:
      >>> import numpy as np
      >>> from kvjax.budgets.layers import CosineBudget
      >>> CosineBudget(100, 10, num_layers=4)(np.array([1000])).ravel().tolist()
      [146, 119, 81, 54]
    """

    average: Budget
    minimum: int
    num_layers: int

    def __call__(self, lengths: Int[np.ndarray, " L"]) -> Slots:
        """Slots of all layers for prompts of these lengths."""
        mean = slots_for(self.average, lengths, self.minimum)
        reach = np.maximum(np.minimum(mean, lengths - mean), 0) / 2
        layer = np.arange(self.num_layers + 1)[:, None]
        # The cosines of the layers before a layer add up to a sine.
        sine = np.sin(math.pi * layer / self.num_layers)
        cosines = sine / (2 * math.sin(math.pi / (2 * self.num_layers)))
        before = np.floor(mean * layer + reach * cosines + ROUNDING).astype(np.int64)
        return np.diff(before, axis=0)


@dataclass(frozen=True)
class SpindleBudget:
    """SpindleKV's slots of layer l: the window, and its part of the context, rounded down.

    The layers' mean falls short of the reserve of a prompt by less than a token, but for prompts
    whose reserve is less than the window. Shares are read as the nearest fraction with a
    denominator up to a million, and the arithmetic is exact. Fields are those of
    `LayerBudgetEviction`, and the number of layers.

    Example:
      >>> import numpy as np
      >>> from kvjax.budgets.layers import SpindleBudget
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


def generated_kept(interval: int, num_layers: int, layer: int) -> int:
    """Generated tokens that PyramidInfer keeps of every `interval`, fewer in each layer.

    Example:
      >>> from kvjax.budgets.layers import generated_kept
      >>> [generated_kept(16, num_layers=4, layer=i) for i in range(4)]
      [14, 12, 7, 3]
    """
    falling = GENERATED_FLOOR + (1 - GENERATED_FLOOR) * _cosine(layer, num_layers)
    return max(math.floor(interval * GENERATED_RATIO * falling + ROUNDING), 1)


def _cosine(layer: int, num_layers: int) -> float:
    """From 1 in layer 0 to 0 beyond the last."""
    return (1 + math.cos(math.pi * layer / num_layers)) / 2
