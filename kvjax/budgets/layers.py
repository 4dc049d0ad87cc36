"""Budgets that differ by layer.

A schedule is a function from prompt lengths `[L]` to the slots of all N layers, `[N, L]`. Methods
such as PyramidKV, PyramidInfer and SpindleKV have schedules of their own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.budgets.budgets import Budget
from kvjax.budgets.heads import HeadShares
from kvjax.serialization import static_value

KINDS = 4  # largest number of different capacities of layers, each of which is compiled once

Slots = Int[np.ndarray, "N L"]
# A layer's slots for prompts of 0, 1, ... tokens, or the shares of its heads.
Table = Int[Array, " L"] | Float[Array, " H"] | tuple[()]


@static_value
@dataclass(frozen=True)
class LayerBudget:
    """Budgets of neighbouring layers, whose caches have room for the largest of them.

    The capacity of a cache is static. The budget of one layer is a table in its transform's state
    (`layer_table`), so that neighbouring layers are equal values and share compiled code. Where
    budgets fall linearly, all layers together have at most a quarter more slots than they use.

    Args:
      schedule: budgets of all layers of the model.
      layers: the neighbouring layers.

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
        """Returns the most slots that a layer keeps, for prompts of these lengths."""
        return self.of_layers(lengths).max(0).reshape(np.shape(lengths))

    def of_layers(self, lengths: np.ndarray) -> Slots:
        """Returns the slots of each of these layers."""
        flat = np.ascontiguousarray(lengths, np.int64).tobytes()  # hashable, for the cache
        return _all_layers(self.schedule, flat)[self.layers.start : self.layers.stop]


@functools.lru_cache(maxsize=2)
def _all_layers(schedule: Callable[[np.ndarray], Slots], lengths: bytes) -> Slots:
    """Evaluates a schedule once for all layers of a model, which ask one after the other."""
    return schedule(np.frombuffer(lengths, np.int64))


def layers_alike(layer: int, num_layers: int) -> range:
    """Returns the neighbouring layers with the same capacity, about a quarter of all."""
    quarter = layer * KINDS // num_layers
    return range(*(-(-number * num_layers // KINDS) for number in (quarter, quarter + 1)))


def layer_table(budget: Budget | None, layer: int, max_length: int) -> Table:
    """Returns one layer's slots for each prompt length; empty where layers do not differ.

    It becomes part of a transform's state. The table ends where no layer's slots change any more,
    and has the smallest sufficient type.
    """
    if isinstance(budget, HeadShares):
        return budget.of_layer(layer)
    if not isinstance(budget, LayerBudget):
        return ()
    slots = budget.of_layers(np.arange(max_length + 1))
    changes = np.flatnonzero((slots != slots[:, -1:]).any(0))
    table = slots[budget.layers.index(layer), : changes.max(initial=-1) + 2]
    return jnp.asarray(table.astype(np.min_scalar_type(slots.max())))


def layers_of(transform: object) -> Sequence[int] | None:
    """Returns the layers for which a transform with layer budgets was made; None: any layer."""
    if isinstance(transform, LayerBudget | HeadShares):
        return transform.layers
    # Budgets may lie deep inside: in parts of a chain, or in the base of a wrapper.
    members = transform if isinstance(transform, tuple) else ()
    if dataclasses.is_dataclass(transform):
        members = [getattr(transform, field.name) for field in dataclasses.fields(transform)]
    return next(filter(None, map(layers_of, members)), None)
