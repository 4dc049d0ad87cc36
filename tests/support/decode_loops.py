"""Decode steps in one compiled loop, with everything that a selecting method did on record."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.transforms.clusterkv.clusterkv import Clusters
from tests.support.attending import OPTIONS


@dataclass(frozen=True)
class Watched(kvjax.KVTransform):
    """A method that indexes, and beside its state the slots that it listed and their positions."""

    base: kvjax.KVTransform

    needs = property(lambda self: self.base.needs)
    merges = property(lambda self: self.base.merges)
    indexes = property(lambda self: self.base.indexes)

    def extent(self, extent):
        return self.base.extent(extent)

    def init(self, cache):
        cache, state = self.base.init(cache)
        lists, length = cache.tail.lists
        none = (cache.shape[0], lists, length + cache.tail_slots)
        seen = tuple(jnp.full(none, -1, jnp.int32) + i for i in (0, 0))
        return cache, (state, seen, jnp.zeros((), jnp.int32))

    def read(self, view, state, query):
        view, inner = self.base.read(view, state[0], query)
        seen = view.index, view.per_slot(view.cache.position, -1)
        return view, (inner, seen, view.cache.tail.start + 0)

    def update(self, cache, state, step):
        cache, inner = self.base.update(cache, state[0], step)
        return cache, (inner, *state[1:])


class Steps(NamedTuple):
    """What T steps did; the first axis counts them.

    index, seen: slots and positions of the lists, [T, B, K, N]; start: where the tail began then.
    position [T, B, H, S], clusters and resident: after the step.
    """

    out: np.ndarray
    index: np.ndarray
    seen: np.ndarray
    start: np.ndarray
    position: np.ndarray
    dropped: np.ndarray
    clusters: Clusters
    resident: object


def found(tree, kind):
    """The one value of a class in a pytree, or None."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return next((x for x in leaves if isinstance(x, kind)), None)


@functools.partial(jax.jit, static_argnums=0, compiler_options=OPTIONS)
def read_prompt(transform, cache, q, k, v, positions):
    """A prompt in one piece."""
    return kvjax.attend(transform, cache, q, k, v, positions, phase="prompt")


@functools.partial(jax.jit, static_argnums=0, compiler_options=OPTIONS)
def _loop(transform, cache, tokens):
    def step(cache, x):
        out, cache = kvjax.attend(transform, cache, *x, phase="decode")
        inner, (index, seen), start = cache.state
        resident = found(inner, kvjax.offload.Resident)
        if resident is not None:
            resident = resident.selected, resident.found, resident.fetched
        clusters = found(inner, Clusters)
        kv = cache.kv
        return cache, Steps(out, index, seen, start, kv.position, kv.dropped, clusters, resident)

    return jax.lax.scan(step, cache, tokens)


def decode_loop(transform, cache, tokens) -> tuple[object, Steps]:
    """Steps with `tokens` = q, k, v [T, B, heads, 1, D] and positions [T, B, 1]."""
    cache, steps = _loop(transform, cache, tokens)
    return cache, jax.tree.map(np.asarray, steps)


def listed(entries: np.ndarray) -> list[int]:
    """A list without its empty places."""
    return entries[entries >= 0].tolist()
