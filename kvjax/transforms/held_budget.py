"""Budgets of methods that hold them while decoding, one token out for every token in."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.budgets.budgets import Budget, most_slots, rows_budget
from kvjax.cache.slots import KVCache
from kvjax.protocol import Extent


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
