"""Reports from a compiled prompt pass: which layers have read the prompt."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.attention.layer import Cache, layer_caches


class _Listener:
    """What one call of `generate` listens with: every layer once, in order.

    XLA may run callbacks late and in any order. A callback of layer i runs when layers 0 to i have
    read the prompt, so it reports all of these that have not been reported yet.

    An exception of `on_layer` ends the reports. It is kept, because raised in a callback it would
    reach whichever thread waits for the device.
    """

    def __init__(self, on_layer: Callable[[int], None]) -> None:
        self.error: BaseException | None = None
        self._on_layer, self._lock, self._next = on_layer, threading.Lock(), 0

    def read_up_to(self, layer: int) -> None:
        """Reports the layers up to `layer` that have not been reported."""
        with self._lock:
            try:
                while self._next <= layer and self.error is None:
                    self._next += 1
                    self._on_layer(self._next - 1)
            except BaseException as error:
                self.error = error


# Compiled code knows a listener by its number only, so one prompt pass serves all of them.
_listeners: dict[int, _Listener] = {}
_numbers = itertools.count()


@contextlib.contextmanager
def listening(on_layer: Callable[[int], None] | None) -> Iterator[Int[Array, ""] | None]:
    """Gives `on_layer` a number, and sends it the reports of the block's thread for that number.

    Args:
      on_layer: is called with the number of each layer; None: nobody listens, the number is None.

    Raises:
      BaseException: at the end of the block, what `on_layer` raised.
    """
    if on_layer is None:
        yield None
        return
    number = next(_numbers) % 2**31
    listener = _listeners[number] = _Listener(on_layer)
    try:
        yield jnp.int32(number)
        jax.effects_barrier()
    finally:
        del _listeners[number]
    if listener.error is not None:
        raise listener.error


def report_layers(caches: Sequence[Cache], number: Int[Array, ""]) -> None:
    """Within compiled code: tells a listener of each layer when its cache holds the prompt.

    Args:
      caches: of all layers, as the model returns them.
      number: of the listener, from `listening`.
    """
    mark = jnp.zeros((), jnp.int32)
    for layer, cache in enumerate(caches):
        mark = mark + _mark(cache)  # depends on the caches of all layers so far
        jax.debug.callback(functools.partial(_report, layer), number, mark)


def _mark(cache: Cache) -> Int[Array, ""]:
    """A number that cannot be computed before the cache is complete."""
    mark = jnp.zeros((), jnp.int32)
    for kv in (group.kv for group in layer_caches(cache)):
        # Which slots are used may not depend on the layers below; a key does.
        key = kv.k.read(jnp.zeros((*kv.shape[:2], 1), jnp.int32))[..., 0]
        mark += kv.used.sum(dtype=jnp.int32) + jnp.isfinite(key).sum(dtype=jnp.int32)
    return mark


def _report(layer: int, number: Array, mark: Array) -> None:
    listener = _listeners.get(int(number))
    if listener is not None:
        listener.read_up_to(layer)
