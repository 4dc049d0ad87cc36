"""What a machine is, what it can do at best, and how much memory this process takes."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import jaxlib
from jax.typing import DTypeLike

T = TypeVar("T")

_READ_BYTES = 2**29  # of a float32 matrix, many times what a processor's own caches hold
_ROWS = 4096
_WIDTH = {"cpu": 2048}  # of the square matrices that are multiplied
_OTHER_WIDTH = 8192  # on devices that finish smaller ones before the next one is started
_ROUNDS = 5
_FORGET = Path("/proc/self/clear_refs")  # "5" forgets the greatest resident memory
_STATUS = Path("/proc/self/status")
_MEMORY = Path("/proc/meminfo")


class Machine(NamedTuple):
    """What a device does at best, measured.

    Args:
      bandwidth: bytes per second that it reads from its memory.
      products: floating-point operations per second in a product of matrices.
    """

    bandwidth: float
    products: float


def measure_machine(dtype: DTypeLike) -> Machine:
    """Measures the default device: the best of five rounds each, after one that compiles.

    The bandwidth is that of a matrix of 512 MiB in float32 times a vector, which reads the matrix
    once, as a decode step reads weights.

    Args:
      dtype: of the matrices that are multiplied.

    Example:
      >>> from kvjax.evaluation.speed.machine import measure_machine
      >>> machine = measure_machine("float32")
      >>> machine.bandwidth > 0, machine.products > 0
      (True, True)
    """
    matrix = jnp.ones((_ROWS, _READ_BYTES // 4 // _ROWS), jnp.float32)
    reading = _least_seconds(matrix, matrix[0])
    bandwidth, width = matrix.nbytes / reading, _WIDTH.get(jax.default_backend(), _OTHER_WIDTH)
    del matrix
    square = jnp.ones((width, width), dtype)
    return Machine(bandwidth, 2 * width**3 / _least_seconds(square, square))


def _least_seconds(a: jax.Array, b: jax.Array) -> float:
    """Seconds of the fastest of several products."""
    multiply, times = jax.jit(jnp.matmul), []
    for _ in range(1 + _ROUNDS):
        start = time.perf_counter()
        multiply(a, b).block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def environment() -> dict[str, Any]:
    """Device and versions, to stand beside every figure.

    Example:
      >>> from kvjax.evaluation.speed.machine import environment
      >>> list(environment())
      ['device', 'processor', 'cores', 'python', 'jax', 'jaxlib']
    """
    return {
        "device": jax.devices()[0].device_kind,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "")


def free_memory() -> int | None:
    """Bytes that new arrays on the default device may take; None where the system does not tell."""
    if jax.default_backend() != "cpu":
        known = jax.devices()[0].memory_stats() or {}
        limit = known.get("bytes_limit")
        return None if limit is None else limit - known.get("bytes_in_use", 0)
    return _kilobytes(_MEMORY, "MemAvailable")


def resident(what: str) -> int:
    """Bytes of this process in memory (Linux): `VmRSS` now, `VmHWM` at most since `forget_peak`."""
    found = _kilobytes(_STATUS, what)
    if found is None:
        raise ValueError(f"{_STATUS} says nothing of {what}")
    return found


def forget_peak() -> None:
    """Sets the greatest resident memory of this process to what it is now (Linux)."""
    _FORGET.write_text("5")


def with_peak(run: Callable[[], T]) -> tuple[T, int | None]:
    """What `run` returns, and by how many bytes this process grew at most meanwhile.

    The second is None where that is not known: it takes Linux and a CPU as the device. What the C
    library has kept of memory that was freed before is given back first, as far as it can.

    Example:
      >>> from kvjax.evaluation.speed.machine import with_peak
      >>> found, grown = with_peak(lambda: len(b"a" * 2**26))
      >>> found == 2**26, grown is None or grown > 0
      (True, True)
    """
    if jax.default_backend() != "cpu" or not _FORGET.exists():
        return run(), None
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if give_back is not None:
        give_back(0)
    try:
        forget_peak()
    except OSError:  # some containers forbid it
        return run(), None
    before = resident("VmRSS")
    found = run()
    return found, max(resident("VmHWM") - before, 0)


def _kilobytes(file: Path, what: str) -> int | None:
    """A figure of one of Linux's tables, in bytes; None where there is no such file or line."""
    try:
        found = re.search(rf"^{what}:\s+(\d+) kB$", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else 1024 * int(found[1])
