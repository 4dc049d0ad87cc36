"""What the benchmarks share: interleaved timing, and a JSON file with device and versions."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jaxlib

import kvjax  # noqa: F401  (a benchmark of something that does not import is no benchmark)


def interleaved_medians(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each side. All sides run once per round, so that drift hits them alike."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():  # compile and warm up
        jax.block_until_ready(side())
    for _ in range(rounds):
        for name, side in sides.items():
            start = time.perf_counter()
            jax.block_until_ready(side())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in times.items()}


def environment() -> dict[str, object]:
    """Device and versions, to stand beside every figure."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
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


def save(path: str | None, result: dict[str, object]) -> str:
    """Writes a result where asked, and returns its text."""
    text = json.dumps({"environment": environment(), **result}, indent=2)
    if path is not None:
        Path(path).write_text(text + "\n")
    return text


def write(path: str | None, result: dict[str, object]) -> None:
    """Prints a result, and writes it where asked."""
    print(save(path, result))
