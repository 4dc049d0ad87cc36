"""Budgets of conversations: shares of a text as numbers of slots."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from kvjax.budgets.budgets import slots_for
from kvjax.checks import check_count
from kvjax.compose.by_head import ByHead
from kvjax.compose.walks import map_methods, walk
from kvjax.protocol import KVTransform, MethodHeads, check_transform


def in_slots(transform: KVTransform, tokens: int) -> KVTransform:
    """Returns the composition with a number of slots for every `budget` that is a share.

    A share is taken of the tokens that a row has so far. A conversation begins with few tokens, of
    which a share is next to nothing, while most slots of its cache stay empty. With the number of
    slots that the share comes to in the end, nothing is evicted before these slots are full. The
    cache takes no more bytes.

    `reserve` of `LayerBudgetEviction` and `SpindleKV`, `PyramidInfer` without a budget, and the
    budget that `ByHead` shares among heads are shares by definition and stay as they are.

    Args:
      transform: any.
      tokens: number of tokens that shares are taken of: the `max_prompt` of the conversation.

    Raises:
      TypeError, ValueError: `transform` is not a transform, or `tokens` is below 1.

    Example:
      >>> import kvjax
      >>> kvjax.unparse(kvjax.kit.in_slots(kvjax.Every(kvjax.SnapKV(0.2), steps=64), tokens=4096))
      'every(snapkv(budget=819), steps=64)'
    """
    check_transform(transform, "in_slots")
    check_count("tokens", tokens, 1)
    shared = frozenset(part.method for part in walk(transform) if isinstance(part, ByHead))
    return map_methods(_InSlots(tokens, shared), transform)


@dataclass(frozen=True)
class _InSlots:
    """Gives a method the slots that its share of so many tokens comes to: for `map_methods`."""

    tokens: int
    shared: frozenset[KVTransform]  # by `ByHead`

    def __call__(self, method: KVTransform, heads: MethodHeads) -> KVTransform:
        budget = getattr(method, "budget", None)
        if not isinstance(budget, float | np.floating) or method in self.shared:
            return method
        minimum = getattr(method, "minimum", 1)
        slots = max(int(slots_for(budget, self.tokens, minimum)), minimum)  # pyright: ignore[reportArgumentType]  # a float of NumPy is none for the checker
        slots -= slots % getattr(method, "page", 1)  # Quest takes whole pages
        return dataclasses.replace(method, budget=slots)
