"""What the pictures show: the bundled model, a prompt with a hidden number, caches and steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.evaluation import Haystack
from kvjax.kit import State, View, Wrapper
from kvjax.models import Decoder, demo, from_pretrained, load_tokenizer

TOKENS, DEPTH, STEPS = 512, 0.4, 16
BUDGET = 0.2


class Material(NamedTuple):
    """What all pictures are drawn from.

    Args:
      model: the bundled one.
      prompt: token ids.
      answer: the first and the last position of the number that is asked for.
    """

    model: Decoder
    prompt: list[int]
    answer: tuple[int, int]

    @classmethod
    def load(cls) -> Material:
        """Loads the model and hides the number."""
        model, tokenizer = from_pretrained(demo.directory()), load_tokenizer(demo.directory())
        haystack = Haystack(tokenizer, demo.held_out_text())
        case = haystack.case("needle", length=TOKENS, depth=DEPTH, seed=1)
        number = tokenizer(f" {case.answers[0]}", add_special_tokens=False).input_ids
        starts = range(len(case.prompt) - len(number))
        first = next(i for i in starts if list(case.prompt[i : i + len(number)]) == number)
        return cls(model, list(case.prompt), (first, first + len(number) - 1))

    def caches(self, transform: kvjax.KVTransform) -> Sequence[Any]:
        """The caches of all layers after the prompt."""
        return kvjax.read(self.model, [self.prompt], transform=transform, max_new=STEPS + 1).caches


class Seen(NamedTuple):
    """The base's state, and the positions that the last step attended to, -1 for none."""

    base: State
    positions: jax.Array


@dataclasses.dataclass(frozen=True)
class Observed(Wrapper):
    """A method that leaves what each step attends to in its state."""

    def init(self, cache: kvjax.KVCache, layer: int) -> tuple[kvjax.KVCache, Seen]:
        """No step yet."""
        cache, base = self.base.init(cache, layer)
        return cache, Seen(base, jnp.full((cache.shape[0], *cache.lists), -1, jnp.int32))

    def select(self, view: View, state: Seen, query: jax.Array) -> tuple[View, Seen]:
        """What the base selects, written down."""
        view, state = super().select(view, state, query)
        length = state.positions.shape[2]
        return view, state._replace(positions=view.per_slot(view.cache.position, -1)[:, :, :length])


def steps_of(material: Material, transform: kvjax.KVTransform, steps: int) -> tuple[list, Any]:
    """Positions that each step attended to, by layer (None: dense ones), and the last context."""
    context = kvjax.read(material.model, [material.prompt], transform=transform, max_new=STEPS + 1)
    seen = []
    for _ in range(steps):
        context = kvjax.generate(
            material.model, None, context=context, max_new_tokens=1, end_tokens=()
        ).context
        states = [cache.state for cache in context.caches]
        seen.append([
            np.asarray(state.positions[0]) if isinstance(state, Seen) else None for state in states
        ])  # fmt: skip
    return seen, context


def marks_of(positions: np.ndarray) -> np.ndarray:
    """1 at each row's positions; -1 is none."""
    marks = np.zeros((len(positions), TOKENS + STEPS), int)
    for mark, own in zip(marks, np.asarray(positions), strict=True):
        mark[own[own >= 0]] = 1
    return marks
