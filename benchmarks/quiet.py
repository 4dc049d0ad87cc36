"""How much of the processor other processes took while a benchmark measured (Linux).

Threads that wait for each other in a loop, as those of OpenMP do, become many times as slow when
another process wants one of their cores. A figure that was measured then says nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

TRIES, PAUSE = 200, 5.0  # measurements before giving up, and seconds between them

_TICKS = os.sysconf("SC_CLK_TCK")
_IDLE = slice(3, 5)  # of the first eight numbers of /proc/stat: idle, and waiting for a disk

Result = TypeVar("Result")


def busy_seconds(stat: str) -> float:
    """Seconds that all cores have worked, from the text of /proc/stat.

    Example:
      >>> busy_seconds("cpu  700 0 200 5000 40 0 100 0 0 0") * _TICKS
      1000.0
    """
    counts = [int(count) for count in stat.split("\n", 1)[0].split()[1:9]]
    return (sum(counts) - sum(counts[_IDLE])) / _TICKS


def process_seconds(stat: str) -> float:
    """Seconds that a process has worked, from the text of its /proc/PID/stat.

    Example:
      >>> process_seconds("12 (a (b) c) S 1 1 1 0 -1 0 0 0 0 0 150 50 0 0") * _TICKS
      200.0
    """
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def others_seconds(pids: Sequence[int]) -> float:
    """Seconds that all processes but these have worked."""
    own = (process_seconds(Path(f"/proc/{pid}/stat").read_text()) for pid in pids)
    return busy_seconds(Path("/proc/stat").read_text()) - sum(own)


def when_quiet(
    measure: Callable[[], Result], pids: Sequence[int], most: float
) -> tuple[Result, float]:
    """What `measure` returns when others took next to nothing, and which share of the cores it was.

    Args:
      measure: is called until that is so.
      pids: processes that belong to the measurement.
      most: share of the cores that others may take.

    Raises:
      SystemExit: they always took more.
    """
    for _ in range(TRIES):
        before, start = others_seconds(pids), time.perf_counter()
        result = measure()
        seconds = time.perf_counter() - start
        share = (others_seconds(pids) - before) / (seconds * os.cpu_count())
        if share <= most:
            return result, max(share, 0.0)
        time.sleep(PAUSE)
    raise SystemExit(f"other processes took more than {most:.0%} of the cores {TRIES} times")
