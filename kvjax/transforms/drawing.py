"""Wrappers that draw random numbers."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array

from kvjax.cache.slots import KVCache
from kvjax.decisions import Decision
from kvjax.protocol import Moment, State, Step, View, Wrapper
from kvjax.transforms.random import layer_key


class Drawn(NamedTuple):
    """The key of the draws (None where nothing is drawn), and the base's state."""

    key: Array | None
    base: State


class DrawingWrapper(Wrapper):
    """A wrapper with a field `seed`, whose state is a key and its base's state."""

    draws: bool  # whether it draws anything
    inner = property(lambda self: self.base)  # what is asked: the base, with whatever budget

    def decide(
        self, moment: Moment, cache: KVCache, state: Drawn, step: Step
    ) -> tuple[Decision | None, Drawn]:
        """The base's decision."""
        decision, base = getattr(self.inner, f"on_{moment}")(cache, state.base, step)
        return decision, state._replace(base=base)

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, Drawn]:
        """The key of the draws, and the base's state."""
        cache, base = self.inner.init(cache, layer)
        return cache, Drawn(layer_key(self.seed, layer) if self.draws else None, base)

    def select(self, view: View, state: Drawn, query: Array) -> tuple[View, Drawn]:
        """The base's."""
        view, base = self.inner.select(view, state.base, query)
        return view, state._replace(base=base)

    def on_flush(self, cache: KVCache, state: Drawn, step: Step) -> tuple[Decision | None, Drawn]:
        """The base's."""
        return self.decide("flush", cache, state, step)

    def on_step(self, cache: KVCache, state: Drawn, step: Step) -> tuple[Decision | None, Drawn]:
        """The base's."""
        return self.decide("step", cache, state, step)
