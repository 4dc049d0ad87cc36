"""What methods share that keep everything and attend to a selection of it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.budgets.budgets import Budget, rows_budget
from kvjax.cache.slots import KVCache
from kvjax.checks import check_flag, check_layers
from kvjax.protocol import Full, KVTransform, Stage


class Recall(KVTransform):
    """A method with the fields `budget`, `per_query_head` and `dense_layers`, and a `minimum`.

    Class attributes:
      minimum: the smallest workable budget.
    """

    stage: ClassVar[Stage] = Stage.RECALL
    minimum: ClassVar[int]

    if TYPE_CHECKING:
        budget: Budget
        per_query_head: bool
        dense_layers: tuple[int, ...]

    def __post_init__(self):
        check_flag("per_query_head", self.per_query_head)
        check_layers("dense_layers", self.dense_layers)

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """Itself, or `Full` for a dense layer."""
        return Full() if layer in self.dense_layers else dataclasses.replace(self, dense_layers=())

    def with_lists(self, cache: KVCache, length: int) -> KVCache:
        """The cache for a selection of `length` slots per KV head, or per query head."""
        lists = cache.shape[1] * (cache.group if self.per_query_head else 1)
        return cache.replace(lists=(lists, length))

    def rows_budget(self, cache: KVCache) -> Int[Array, " B"]:
        """Slots that each row attends to."""
        return rows_budget(self.budget, cache.length, cache.max_prompt, self.minimum)


def of_lists(x: Array, cache: KVCache) -> Array:
    """What KV heads have, `[B, H, ...]`, for every list of theirs."""
    return jnp.repeat(x, cache.lists[0] // cache.heads, axis=1)
