"""Description of the machine, and its best rates."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import jaxlib
from jax.typing import DTypeLike

T = TypeVar("T")

_READ_BYTES = 2**29  # bytes of a float32 matrix, many times the size of a processor's own caches
_ROWS = 4096
_WIDTH = {"cpu": 2048}  # width of the square matrices that are multiplied
_OTHER_WIDTH = 8192  # other devices finish smaller products before the host can start the next
_ROUNDS = 5


class Machine(NamedTuple):
    """Best rates of a device, as measured.

    Args:
      bandwidth: bytes per second that it reads from its memory.
      products: floating-point operations per second in matrix products.
    """

    bandwidth: float
    products: float


def measure_machine(dtype: DTypeLike) -> Machine:
    """Measures the default device: the best of five rounds each, after one that compiles.

    The bandwidth is measured in the product of a float32 matrix of 512 MiB and a vector. It reads
    the matrix once, as a decode step reads weights.

    Args:
      dtype: dtype of the matrices that are multiplied.

    Example:
      >>> from kvjax.evaluation.speed.machine import measure_machine
      >>> machine = measure_machine("float32")
      >>> machine.bandwidth > 0, machine.products > 0
      (True, True)
    """
    matrix = jnp.ones((_ROWS, _READ_BYTES // 4 // _ROWS), jnp.float32)
    reading = _least_seconds(matrix, matrix[0])
    bandwidth, width = matrix.nbytes / reading, _WIDTH.get(jax.default_backend(), _OTHER_WIDTH)
    del matrix  # frees its memory before the squares are made
    square = jnp.ones((width, width), dtype)
    return Machine(bandwidth, 2 * width**3 / _least_seconds(square, square))


def _least_seconds(a: jax.Array, b: jax.Array) -> float:
    """Returns the seconds of the fastest of several products."""
    multiply, times = jax.jit(jnp.matmul), []
    for _ in range(1 + _ROUNDS):
        start = time.perf_counter()
        multiply(a, b).block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times[1:])  # the first product includes compilation


def environment() -> dict[str, Any]:
    """Returns device and versions, which are printed with every figure.

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
