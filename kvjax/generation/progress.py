"""Reports from inside a compiled prompt pass: which layer has been read."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
from jaxtyping import Array

from kvjax.attention.layer import Cache, LayerCache
from kvjax.cache.slots import KVCache
from kvjax.compose.wrappers import HeadGroups
from kvjax.protocol import Extent, KVTransform, State, Step

# The listener lives on the host and not in the compiled code, so that one compiled prompt pass
# serves every call that wants reports.
_listeners: list[Callable[[int], None]] = []


@contextlib.contextmanager
def listening(on_layer: Callable[[int], None] | None) -> Iterator[None]:
    """Sends the layer numbers of watched transforms to `on_layer` while the block runs."""
    if on_layer is None:
        yield
        return
    _listeners.append(on_layer)
    try:
        yield
        jax.effects_barrier()
    finally:
        _listeners.remove(on_layer)


def _report(layer: int, *_: Array) -> None:
    for listener in tuple(_listeners):
        listener(layer)


@dataclass(frozen=True)
class Watched(KVTransform):
    """A layer's transform that also reports when the layer's prompt has been read."""

    base: KVTransform
    layer: int

    needs = property(lambda self: self.base.needs)
    frees_while_decoding = property(lambda self: self.base.frees_while_decoding)

    def extent(self, extent: Extent) -> Extent:
        """The base's."""
        return self.base.extent(extent)

    def init(self, cache: KVCache) -> tuple[KVCache, State]:
        """The base's."""
        return self.base.init(cache)

    def update(self, cache: KVCache, state: State, step: Step) -> tuple[KVCache, State]:
        """The base's, and a report."""
        cache, state = self.base.update(cache, state, step)
        # Operands of the layer itself keep the report from running ahead of it: a key, since what
        # the full cache does with its slots does not depend on the layers below.
        jax.debug.callback(
            functools.partial(_report, self.layer), cache.used, step.keys[:, :, 0, 0]
        )
        return cache, state


def watch(layers: tuple[KVTransform, ...]) -> tuple[KVTransform, ...]:
    """The same layers, each reporting its number when its prompt has been read."""

    def wrap(transform: KVTransform, layer: int) -> KVTransform:
        if not isinstance(transform, HeadGroups):
            return Watched(transform, layer)
        (heads, first), *others = transform.groups
        return HeadGroups(((heads, Watched(first, layer)), *others))

    return tuple(wrap(transform, layer) for layer, transform in enumerate(layers))


def unwatch(caches: tuple[Cache, ...]) -> tuple[Cache, ...]:
    """Caches that `watch`ed layers made, as their own transforms would have made them."""

    def strip(cache: Cache) -> Cache:
        if not isinstance(cache, LayerCache):
            return tuple(strip(group) for group in cache)
        if not isinstance(cache.transform, Watched):
            return cache
        return dataclasses.replace(cache, transform=cache.transform.base)

    return tuple(strip(cache) for cache in caches)
