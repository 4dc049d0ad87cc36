"""Drops compiled code before there is too much of it, and gives freed memory back to the system.

Linux gives a process some 65,000 memory maps, and LLVM makes a new map for every piece of code that
it compiles. With a small model, each method at each length of prompts takes 700 to 4,500 maps. When
no map is left, LLVM ends the process.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

_MAPS, _MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
_COMPILED = "/jax/core/compile/backend_compile_duration"  # JAX's name of what it reports

_functions: list[Any] = []
_compiled_since = threading.Event()  # set when something is compiled after the last count of maps


def compiled(**options: Any) -> Callable[[Callable], Any]:
    """Decorates a function of this package with `jax.jit`, so that its code can be dropped.

    Args:
      options: those of `jax.jit`.

    Example:
      >>> from kvjax.compiled_code import compiled
      >>> @compiled(static_argnums=0)
      ... def power(n, x):
      ...     return x**n
      >>> power(2, 3)
      Array(9, dtype=int32, weak_type=True)
    """

    def register(function: Callable) -> Any:
        jitted = jax.jit(function, **options)
        _functions.append(jitted)
        return jitted

    return register


def clear_compiled_functions() -> None:
    """Drops the code of all functions that are `compiled`. They compile again when called."""
    for function in _functions:
        function.clear_cache()


def leave_memory_maps() -> None:
    """Drops kvjax's compiled code if this process has more than half of its memory maps.

    Maps are counted only if something has been compiled since the last count. If other code than
    kvjax's takes them, a warning says how to drop it.
    """
    if not _compiled_since.is_set() or not _maps_run_out():
        return
    clear_compiled_functions()
    if _maps_run_out():
        warnings.warn(
            f"this process has more than half of the memory maps that {_MOST_MAPS} gives it, most"
            " of them for compiled code of other functions than kvjax's; where none is left, Linux"
            " ends the process: jax.clear_caches() drops all compiled code",
            RuntimeWarning,
            stacklevel=3,
        )


def give_back_freed() -> None:
    """Returns to the system freed memory that the C library holds, as far as possible."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)


def memory_maps() -> int:
    """Returns the number of memory maps of this process (Linux)."""
    with open(_MAPS, "rb") as maps:
        return sum(1 for _ in maps)


def _maps_run_out() -> bool:
    """Returns whether this process has more than half of its memory maps; False off Linux."""
    if not _MOST_MAPS.exists():
        return False
    _compiled_since.clear()
    return memory_maps() > int(_MOST_MAPS.read_text()) // 2


def _notice(event: str, *_: Any, **__: Any) -> None:
    """Notes that JAX has compiled something, kvjax's or not."""
    if event == _COMPILED:
        _compiled_since.set()


jax.monitoring.register_event_duration_secs_listener(_notice)
