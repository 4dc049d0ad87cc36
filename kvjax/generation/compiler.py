"""Compiles functions before they are called, and tells how far a call is."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

import jax

from kvjax.checks import check_callable
from kvjax.compiled_code import leave_memory_maps


class Compiler:
    """Compiles jitted functions before they are called, and adds up the seconds that this takes.

    Where this process has too many compiled functions, kvjax's are dropped first.

    Args:
      on_compile: is told the name of each program that is about to be compiled; None: nobody is.
      on_layer: is told the number of each layer that has read a prompt, in order; None: nobody is.
    """

    def __init__(
        self,
        on_compile: Callable[[str], None] | None = None,
        on_layer: Callable[[int], None] | None = None,
    ) -> None:
        check_callable("on_compile", on_compile)
        check_callable("on_layer", on_layer)
        leave_memory_maps()
        self.seconds = 0.0
        self._on_compile, self._on_layer = on_compile, on_layer
        self._done: set[Hashable] = set()

    def compile(self, program: str, function: Any, *args: Any) -> None:
        """Compiles `function` for these arguments, unless that has been done for others like them.

        Args:
          program: what the program computes, in words for users.
        """
        key = _kind(function, args)
        if key in self._done:
            return
        if self._on_compile is not None:
            self._on_compile(program)
        start = time.perf_counter()
        self.compile_new(program, function, *args)
        self.seconds += time.perf_counter() - start
        self._done.add(key)

    def compile_new(self, program: str, function: Any, *args: Any) -> None:
        """Compiles `function` for arguments that are new: a place to look at what is compiled."""
        function.lower(*args).compile()

    def run(self, program: str, function: Any, *args: Any) -> Any:
        """Calls `function` with these arguments after `compile`, and returns what it returns."""
        self.compile(program, function, *args)
        return function(*args)

    def has_read(self, layer: int) -> None:
        """Notes that a layer has read a prompt."""
        if self._on_layer is not None:
            self._on_layer(layer)

    def trace(self, call: Callable[[Tracer], None]) -> None:
        """Lets `call` trace functions, and adds up the seconds that this takes.

        Functions that are traced here are not traced again when they are compiled. If one raises an
        error, none has been computed yet, and all that they donate is still there.
        """
        start = time.perf_counter()
        call(Tracer())
        self.seconds += time.perf_counter() - start


class Tracer:
    """Stands in for a `Compiler` where functions are traced and nothing is computed.

    Results are abstract arrays, in their kind of memory, and may be arguments again.
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, Any] = {}

    def run(self, program: str, function: Any, *args: Any) -> Any:
        """Traces `function`, unless done for arguments like these, and returns abstract arrays."""
        key = _kind(function, args)
        if key not in self._results:
            # JAX itself looks at an array's layout and devices as well, which takes longer.
            abstract = jax.tree.map(
                lambda x: jax.typeof(x) if isinstance(x, jax.Array) else x, args
            )
            traced = function.trace(*abstract)
            self._results[key] = jax.tree.unflatten(traced.out_tree, traced.jaxpr.out_avals)
        return self._results[key]

    compile = run

    def has_read(self, layer: int) -> None:
        """Nothing has been read."""


def _kind(function: Any, args: tuple) -> Hashable:
    """Returns a key that is equal for arguments that share compiled code; arrays count by shape."""
    leaves, tree = jax.tree.flatten(args)
    # A mesh has a shape and some methods have a dtype, and neither is an array.
    arrays = (hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves)
    kinds = ((x.shape, x.dtype) if a else x for x, a in zip(leaves, arrays, strict=True))
    return function, tree, tuple(kinds)


Programs = Compiler | Tracer  # runs functions, or finds out what they would return
