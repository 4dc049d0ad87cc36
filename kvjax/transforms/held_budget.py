"""Base classes of methods that meet a budget at a prompt's end alone, or while decoding too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.budgets.budgets import Budget, most_slots, rows_budget
from kvjax.budgets.heads import HeadShares
from kvjax.budgets.layers import Table, layer_table
from kvjax.cache.slots import KVCache
from kvjax.decisions import Decision
from kvjax.protocol import Extent, KVTransform, Step

Budgets = Int[Array, " B"]  # of each row

_NEEDED = {
    "budget": "a field such as `budget: int | float`",
    "minimum": "the smallest budget that works, such as `minimum = 1`",
}


def decoding_budget(budget: Budget, cache: KVCache, minimum: int) -> Int[Array, " B"]:
    """Returns the budget of each row for decoding, computed from its tokens so far.

    A row whose prompt is shorter than the smallest workable budget may still grow to that budget.
    No row gets more than a prompt of `max_prompt` tokens would.

    Args:
      budget: number of slots, or share of the tokens so far.
      cache: the cache whose rows have budgets.
      minimum: smallest workable number of slots.

    Example:
      >>> import kvjax
      >>> cache = kvjax.init_cache(kvjax.Full(), batch=2, kv_heads=1, head_dim=4, max_prompt=64,
      ...                          max_new=0).kv
      >>> kvjax.kit.decoding_budget(0.5, cache, minimum=8).tolist()  # of rows without a token
      [8, 8]
    """
    return jnp.maximum(rows_budget(budget, cache.length, cache.max_prompt, minimum), minimum)


def decoding_extent(extent: Extent, budget: Budget, minimum: int) -> Extent:
    """Returns the extent of a method that holds its budget while decoding.

    During a step there is one slot more, for the token that is being added.

    Args:
      extent: most prompt tokens and new tokens of a row.
      budget: number of slots, or share of the tokens so far.
      minimum: smallest workable number of slots.

    Example:
      >>> import kvjax
      >>> kvjax.kit.decoding_extent(kvjax.kit.Extent(prompt=4096, new=1000), 0.25, 8).total
      1025
    """
    most = max(most_slots(budget, extent.longest_prompt, minimum), minimum)
    return extent.keep(most).hold(most + 1)


class WithBudget(KVTransform):
    """Base class of methods with a field `budget` and an attribute `minimum`."""

    if TYPE_CHECKING:
        budget: Any  # a `Budget`; a subclass may allow None, or fewer kinds
        minimum: ClassVar[Any]  # an int, or a property of one
    else:

        def __getattr__(self, name: str) -> Any:
            """Says what a subclass lacks; Python calls this for attributes that are missing."""
            if name not in _NEEDED or hasattr(type(self), name):
                return object.__getattribute__(self, name)  # raises Python's own error
            raise TypeError(f"{type(self).__name__} has no {name}: it needs {_NEEDED[name]}")


class PromptBudget(WithBudget):
    """Base class of methods that compress the prompt and leave generated tokens alone.

    A subclass has a field `budget` and an attribute `minimum`, the smallest workable budget, and
    decides in `on_prompt`. The state is the layer's table of budgets over prompt lengths; it is
    empty where layers do not differ.

    Example:
      >>> from dataclasses import dataclass
      >>> import jax.numpy as jnp, kvjax
      >>> @dataclass(frozen=True)
      ... class SmallKeys(kvjax.kit.PromptBudget):
      ...     budget: kvjax.kit.Budget
      ...     minimum = 1
      ...     def on_prompt(self, cache, state, step):
      ...         norm = jnp.linalg.norm(step.keys, axis=-1)
      ...         return kvjax.kit.Keep(self.rows_budget(cache, state), -norm), state
      >>> SmallKeys(budget=0.25).extent(kvjax.kit.Extent(prompt=4096, new=100)).total
      1124
    """

    def extent(self, extent: Extent) -> Extent:
        """Bounds the prompt to the budget; new tokens come on top."""
        return extent.keep(most_slots(self.budget, extent.longest_prompt, self.minimum))

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, Table]:
        """Makes the layer's table of budgets."""
        table = layer_table(self.budget, layer, cache.max_prompt)
        if isinstance(self.budget, HeadShares):  # `foreseen` has one head
            table = table[: cache.shape[1]]
        return cache, table

    def rows_budget(self, cache: KVCache, table: Table = ()) -> Budgets:
        """Returns the number of prompt tokens that each row keeps."""
        return rows_budget(self.budget, cache.length, cache.max_prompt, self.minimum, table)


class HeldBudget(WithBudget):
    """Base class of methods that hold their budget from the prompt's end on.

    A subclass has a field `budget` and an attribute `minimum`, the smallest workable budget. The
    state is each row's budget, `[B]`. `on_step` decides what is kept after a step and after a
    prompt.

    Example:
      >>> from dataclasses import dataclass
      >>> import kvjax
      >>> @dataclass(frozen=True)
      ... class Newest(kvjax.kit.HeldBudget):
      ...     budget: kvjax.kit.Budget
      ...     minimum = 1
      ...     def on_step(self, cache, state, step):
      ...         return kvjax.kit.Keep(state, None, newest_first=True), state
      >>> Newest(budget=0.25).extent(kvjax.kit.Extent(prompt=4096, new=100)).total
      1025
    """

    def extent(self, extent: Extent) -> Extent:
        """Bounds the cache to the budget, plus one slot for the token that is being added."""
        return decoding_extent(extent, self.budget, self.minimum)

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, Budgets]:
        """Makes each row's budget; a share is fixed only when the prompt ends."""
        return cache, decoding_budget(self.budget, cache, self.minimum)

    def on_prompt(
        self, cache: KVCache, state: Budgets, step: Step
    ) -> tuple[Decision | None, Budgets]:
        """Fixes each row's budget, and keeps that many tokens of its prompt."""
        budget = step.of_rows(decoding_budget(self.budget, cache, self.minimum), state)
        return self.on_step(cache, budget, step)
