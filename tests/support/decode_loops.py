"""Decode steps, with everything that a selecting method did on record."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

import kvjax
from kvjax.protocol import Wrapper
from kvjax.storage.offload.transform import Resident
from kvjax.transforms.clusterkv.clusters import Clusters
from tests.support.attending import flushed


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


class Steps(NamedTuple):
    """What T steps did; the first axis counts them.

    index, seen: slots and positions of the lists, [T, B, K, N]; clustered: how many slots the index
    had then, [T, B, H]; the others: after the step, and the flush where one follows it.
    """

    out: np.ndarray
    index: np.ndarray
    seen: np.ndarray
    clustered: np.ndarray
    position: np.ndarray
    dropped: np.ndarray
    clusters: Clusters
    resident: object


def found(tree, kind):
    """The one value of a class in a pytree, or None."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return next((x for x in leaves if isinstance(x, kind)), None)


@functools.partial(jax.jit, static_argnums=0)
def read_prompt(transform, cache, q, k, v, positions):
    """A prompt in one piece."""
    return kvjax.attend(transform, cache, q, k, v, positions, phase="prompt")


def is_seen(x) -> bool:
    return isinstance(x, Seen)


def unseen(cache):
    """The cache without what its `Watched` listed, as it was before the step."""
    return jax.tree.map(lambda x: Seen(x.base) if is_seen(x) else x, cache, is_leaf=is_seen)


@functools.partial(jax.jit, static_argnums=0)
def _step(transform, cache, *tokens):
    clusters = found(cache, Clusters)
    out, cache = kvjax.attend(transform, cache, *tokens, phase="decode")
    seen = found(cache, Seen)
    clustered = None if clusters is None else clusters.clustered
    return unseen(cache), (out, seen.index, seen.positions, clustered)


@jax.jit
def _after(cache):
    resident = found(cache, Resident)
    if resident is not None:
        resident = tuple(x.sum(1) for x in (resident.selected, resident.found, resident.fetched))
    return cache.kv.position, cache.kv.dropped, found(cache, Clusters), resident


def decode_loop(transform, cache, tokens, since=0) -> tuple[object, Steps]:
    """Steps with `tokens` = q, k, v [T, B, heads, 1, D] and positions [T, B, 1].

    The cache is flushed as often as it must be; `since` counts the steps after its prompt so far.
    """
    steps = []
    for number, step in enumerate(zip(*map(np.asarray, tokens), strict=True)):
        cache, done = _step(transform, cache, *step)
        cache = flushed(cache, since + number + 1)
        steps.append(jax.device_get(Steps(*done, *_after(cache))))
    return cache, jax.tree.map(lambda *x: np.stack(x), *steps)


def listed(entries: np.ndarray) -> list[int]:
    """A list without its empty places."""
    return entries[entries >= 0].tolist()
