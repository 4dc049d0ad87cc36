"""Budgets of methods that hold them at a prompt's end alone, or while decoding too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.budgets.budgets import Budget, most_slots, rows_budget
from kvjax.budgets.layers import Table, layer_table
from kvjax.cache.slots import KVCache
from kvjax.decisions import Keep
from kvjax.protocol import Extent, KVTransform, Step

Budgets = Int[Array, " B"]  # of each row


def decoding_budget(budget: Budget, cache: KVCache, minimum: int) -> Int[Array, " B"]:
    """What a method that compresses while decoding holds per row, from its tokens so far.

    A prompt shorter than the smallest workable budget may still grow to that budget. No row gets
    more than a prompt of `max_prompt` tokens would.
    """
    return jnp.maximum(rows_budget(budget, cache.length, cache.max_prompt, minimum), minimum)


def decoding_extent(extent: Extent, budget: Budget, minimum: int) -> Extent:
    """Slots of a method that holds its budget while decoding: one more during a step."""
    most = max(most_slots(budget, extent.longest_prompt, minimum), minimum)
    return extent.keep(most).hold(most + 1)


class PromptBudget(KVTransform):
    """A method with a field `budget` and a `minimum`, which compresses prompts alone.

    Its state is the table of the layer's own budgets.
    """

    if TYPE_CHECKING:
        budget: Budget
        minimum: int

    def extent(self, extent: Extent) -> Extent:
        """The budget of the prompt; new tokens come on top."""
        return extent.keep(most_slots(self.budget, extent.longest_prompt, self.minimum))

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, Table]:
        """The table of the layer's own budgets."""
        return cache, layer_table(self.budget, layer, cache.max_prompt)

    def rows_budget(self, cache: KVCache, table: Table = ()) -> Budgets:
        """Prompt tokens that each row keeps."""
        return rows_budget(self.budget, cache.length, cache.max_prompt, self.minimum, table)


class HeldBudget(KVTransform):
    """A method with a field `budget` and a `minimum`, which it holds from a prompt's end on.

    Its state is each row's budget. A prompt is treated as a step is: `on_step` says what is kept.
    """

    if TYPE_CHECKING:
        budget: Budget
        minimum: int

    def extent(self, extent: Extent) -> Extent:
        """The budget, and one slot for the token that is being added."""
        return decoding_extent(extent, self.budget, self.minimum)

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, Budgets]:
        """Each row's budget; a share is known when the prompt ends."""
        return cache, decoding_budget(self.budget, cache, self.minimum)

    def on_prompt(self, cache: KVCache, state: Budgets, step: Step) -> tuple[Keep, Budgets]:
        """Keeps each row's budget of its prompt."""
        budget = step.of_rows(decoding_budget(self.budget, cache, self.minimum), state)
        return self.on_step(cache, budget, step)
