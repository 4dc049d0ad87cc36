"""Memory of this process: how much it takes, and how to give freed memory back."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax

from kvjax import compiled_code

T = TypeVar("T")

_FORGET = Path("/proc/self/clear_refs")  # writing "5" resets the peak of the resident memory
_STATUS, _MEMORY = Path("/proc/self/status"), Path("/proc/meminfo")


def free_memory() -> int | None:
    """Returns the bytes free for new arrays on the default device; None if that is unknown."""
    if jax.default_backend() != "cpu":
        stats = jax.devices()[0].memory_stats() or {}
        limit = stats.get("bytes_limit")
        return None if limit is None else limit - stats.get("bytes_in_use", 0)
    return _read_table(_MEMORY, "MemAvailable")


def resident(field: str) -> int:
    """Returns the resident memory of this process in bytes (Linux).

    Args:
      field: `"VmRSS"` for the current size, `"VmHWM"` for the peak since `forget_peak`.
    """
    size = _read_table(_STATUS, field)
    if size is None:
        raise ValueError(f"{_STATUS} has no {field}")
    return size


def forget_peak() -> None:
    """Resets the peak of this process's resident memory to its current size (Linux)."""
    _FORGET.write_text("5")


def with_peak(run: Callable[[], T]) -> tuple[T, int | None]:
    """Calls `run`; returns its result and the most bytes by which this process grew meanwhile.

    The growth is None if it cannot be measured: that takes Linux, and a CPU as the device. Memory
    that was freed before but kept by the C library is given back first, as far as possible.

    Example:
      >>> from kvjax.evaluation.memory import with_peak
      >>> size, grown = with_peak(lambda: len(b"a" * 2**26))
      >>> size == 2**26, grown is None or grown > 0
      (True, True)
    """
    if jax.default_backend() != "cpu" or not _FORGET.exists():
        return run(), None
    compiled_code.give_back_freed()
    try:
        forget_peak()
    except OSError:  # some containers forbid it
        return run(), None
    before = resident("VmRSS")
    result = run()
    return result, max(resident("VmHWM") - before, 0)


def drop_compiled_code() -> None:
    """Drops compiled code if this process has half of the machine's memory, or half of its maps.

    On a CPU, the code of a decode loop through many layers takes much memory, so that a comparison
    of many methods fills it with code. With a compilation cache, dropped code is read again.
    """
    total = _read_table(_MEMORY, "MemTotal")
    used = _read_table(_STATUS, "VmRSS")
    if used is not None and total is not None and used > total // 2:
        compiled_code.clear_compiled_functions()
        compiled_code.give_back_freed()
    else:
        compiled_code.leave_memory_maps()


def _read_table(file: Path, field: str) -> int | None:
    """Returns a figure of one of Linux's tables in bytes; None if the file or line is missing."""
    try:
        line = re.search(rf"^{field}:\s+(\d+) kB$", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if line is None else 1024 * int(line[1])
