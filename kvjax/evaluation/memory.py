"""How much memory this process takes, and what it can give back."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax

from kvjax import compiled_code

T = TypeVar("T")

_FORGET = Path("/proc/self/clear_refs")  # "5" forgets the greatest resident memory
_STATUS, _MEMORY = Path("/proc/self/status"), Path("/proc/meminfo")


def free_memory() -> int | None:
    """Bytes that new arrays on the default device may take; None where the system does not tell."""
    if jax.default_backend() != "cpu":
        known = jax.devices()[0].memory_stats() or {}
        limit = known.get("bytes_limit")
        return None if limit is None else limit - known.get("bytes_in_use", 0)
    return _kilobytes(_MEMORY, "MemAvailable")


def resident(what: str) -> int:
    """Bytes of this process in memory (Linux): `VmRSS` now, `VmHWM` at most since `forget_peak`."""
    size = _kilobytes(_STATUS, what)
    if size is None:
        raise ValueError(f"{_STATUS} says nothing of {what}")
    return size


def forget_peak() -> None:
    """Sets the greatest resident memory of this process to what it is now (Linux)."""
    _FORGET.write_text("5")


def with_peak(run: Callable[[], T]) -> tuple[T, int | None]:
    """What `run` returns, and by how many bytes this process grew at most meanwhile.

    The second is None where that is not known: it takes Linux and a CPU as the device. What the C
    library has kept of memory that was freed before is given back first, as far as it can.

    Example:
      >>> from kvjax.evaluation.memory import with_peak
      >>> size, grown = with_peak(lambda: len(b"a" * 2**26))
      >>> size == 2**26, grown is None or grown > 0
      (True, True)
    """
    if jax.default_backend() != "cpu" or not _FORGET.exists():
        return run(), None
    give_back_freed()
    try:
        forget_peak()
    except OSError:  # some containers forbid it
        return run(), None
    before = resident("VmRSS")
    result = run()
    return result, max(resident("VmHWM") - before, 0)


def give_back_freed() -> None:
    """Gives what the C library has kept of freed memory back to the system, as far as it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)


def drop_compiled_code() -> None:
    """Drops compiled code where this process has half of the machine's memory, or of its maps.

    On a CPU, a loop of decode steps through 30 layers takes some 100 MB, so that a comparison of
    many methods fills the memory with code. With a compilation cache, code that was dropped is read
    again, which takes a second or two.
    """
    total = _kilobytes(_MEMORY, "MemTotal")
    used = _kilobytes(_STATUS, "VmRSS")
    if None not in (used, total) and used > total // 2:
        compiled_code.clear_compiled_functions()
        give_back_freed()
    else:
        compiled_code.leave_memory_maps()


def _kilobytes(file: Path, what: str) -> int | None:
    """A figure of one of Linux's tables, in bytes; None where there is no such file or line."""
    try:
        line = re.search(rf"^{what}:\s+(\d+) kB$", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if line is None else 1024 * int(line[1])
