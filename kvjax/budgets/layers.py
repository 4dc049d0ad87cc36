"""How many tokens each layer holds, where layers differ: PyramidInfer's and SpindleKV's schedules.

A schedule is a function from prompt lengths `[L]` to the slots of all N layers, `[N, L]`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.budgets.budgets import Budget

KINDS = 4  # of layers, at most


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
      >>> from kvjax.budgets.layers import LayerBudget, layers_alike
      >>> from kvjax.transforms.pyramidinfer.schedule import CosineBudget
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
