"""A method that selects, with what it listed in its steps on record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from kvjax.protocol import Wrapper


class Seen(NamedTuple):
    """State of a `Watched`: that of its base, and what it listed in a step."""

    base: object
    index: jax.Array | None = None
    positions: jax.Array | None = None


@dataclass(frozen=True)
class Watched(Wrapper):
    """A method that selects, and beside its state the slots that it listed and their positions."""

    stage = property(lambda self: self.base.stage)

    def init(self, cache, layer):
        cache, state = super().init(cache, layer)
        return cache, Seen(state.base)

    def select(self, view, state, query):
        view, state = super().select(view, state, query)
        return view, Seen(state.base, view.index, view.per_slot(view.cache.position, -1))

    def on_prompt(self, cache, state, step):
        decision, state = super().on_prompt(cache, state, step)
        return decision, Seen(state.base)

    on_flush = on_prompt


def found(tree, kind):
    """The one value of a class in a pytree, or None."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return next((x for x in leaves if isinstance(x, kind)), None)


def is_seen(x) -> bool:
    return isinstance(x, Seen)


def unseen(cache):
    """The cache without what its `Watched` listed, as it was before the step."""
    return jax.tree.map(lambda x: Seen(x.base) if is_seen(x) else x, cache, is_leaf=is_seen)


def listed(entries: np.ndarray) -> list[int]:
    """A list without its empty places."""
    return entries[entries >= 0].tolist()
