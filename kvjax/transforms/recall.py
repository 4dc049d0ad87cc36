"""Base of the methods that keep every token and attend to a selection of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.budgets.budgets import rows_budget
from kvjax.cache.slots import KVCache
from kvjax.checks import check_flag, check_layers
from kvjax.protocol import Full, KVTransform, Stage
from kvjax.transforms.held_budget import WithBudget


class Recall(WithBudget):
    """Base class of methods that attend to a selection of the slots in each decode step.

    A subclass has the fields `budget`, `per_query_head` and `dense_layers`.

    Class attributes:
      minimum: the smallest workable budget.
    """

    stage: ClassVar[Stage] = Stage.RECALL

    if TYPE_CHECKING:
        per_query_head: bool
        dense_layers: tuple[int, ...]

    def __post_init__(self):
        check_flag("per_query_head", self.per_query_head)
        check_layers("dense_layers", self.dense_layers)

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """Returns the method itself, or `Full` for a dense layer."""
        return Full() if layer in self.dense_layers else dataclasses.replace(self, dense_layers=())

    def with_lists(self, cache: KVCache, length: int) -> KVCache:
        """Prepares the cache for a selection of `length` slots per KV head, or per query head."""
        lists = cache.shape[1] * (cache.group if self.per_query_head else 1)
        return cache.replace(lists=(lists, length))

    def rows_budget(self, cache: KVCache) -> Int[Array, " B"]:
        """Returns the number of slots that each row attends to."""
        return rows_budget(self.budget, cache.length, cache.max_prompt, self.minimum)


def of_lists(x: Array, cache: KVCache) -> Array:
    """Repeats an array of KV heads, `[B, H, ...]`, for each of their lists: `[B, K, ...]`."""
    return jnp.repeat(x, cache.lists[0] // cache.heads, axis=1)
