"""Operations of compressed caches, in bytes per second over the bandwidth of a copy.

    python benchmarks/kernels.py --out benchmarks/results/kernels_h200.json

On a GPU, in under ten minutes; on CPU with `--small`, which says nothing about speed. Each
operation runs by its kernel and by XLA at layers of Llama-3.1-8B and GLM-4-9B; dense attention also
by cuDNN and by XLA as `jax.nn` calls them.

A measurement is a loop of calls on the device. The sides of a group take turns, round after round,
and a copy with them; a side whose calls take seconds has one round. `share_of_copy` is the median
rate of a side over that of the copy. A side's bytes are those that must move: of the arrays that it
takes and gives, each once, and of a store that it reads by a list, the part that is listed. Where
products take the time, as in a prompt, their operations are given too. A copy is `y = -x` over an
array much larger than any cache, bytes read and written.

`missed` in the result are kernels that stay behind their target where calls are large, `failed`
those that did not run, `left_out` what did not fit in memory or time.
"""

from __future__ import annotations

import concurrent.futures
import gc
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from common import parser_of, save, write
from kernel_shapes import SHAPES, SMALL, Shape, inputs
from kernel_sides import GROUPS, Run, Side, copy

from pallas_kernels.base.dispatch import OLDEST_GPU, gpu_capability

ROUNDS = 10
SECONDS = 480  # after which nothing more is begun
MEASURED = 16e9  # bytes of the calls of a measurement: 4 ms where memory moves 4 TB/s
MOST_CALLS, CALLS_OF_XLA = 400, 10  # of a measurement; XLA may be slow
BY_XLA = "xla", "jax.nn"
PER_BYTE = 150  # operations that a GPU makes, about, while it moves a byte
SLOW = 2.0  # seconds of the first round of a side, from which on it has only one more
LARGE = 128e6  # bytes of a call, from which on what it reads comes from memory and not from L2


def main(arguments: Iterable[str] | None = None) -> dict:
    """Measures every group at every shape, and saves what there is after each."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all of it")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--small", action="store_true", help="a small shape, on any device")
    parser.add_argument("--out")
    args = parser.parse_args(arguments)
    if args.rounds < 1 or args.seconds <= 0:
        parser.error("--rounds and --seconds must be above 0")
    if "pallas" not in implementations() and not args.small:
        parser.error(
            f"needs a CUDA GPU of compute capability {OLDEST_GPU[0]}.{OLDEST_GPU[1]} or newer, or "
            f"--small; got {jax.devices()[0].device_kind}"
        )
    begin = time.perf_counter()
    results, failed, left_out = [], [], []

    def result() -> dict:
        return {
            "benchmark": "kernels",
            "platform": jax.devices()[0].client.platform_version,
            "small": args.small,
            "seconds": round(time.perf_counter() - begin, 1),
            "missed": [r for r in results if r.get("met") is False],
            "failed": failed,
            "left_out": left_out,
            "results": results,
        }

    todo = [(s, group) for s in ([SMALL] if args.small else SHAPES) for group in args.groups]
    for shape, group in todo:
        where = {"model": shape.model, "tokens": shape.tokens, "batch": shape.batch}
        where["group"] = group
        try:
            if time.perf_counter() - begin > args.seconds:
                raise TimeoutError("no time left")
            for row in rows_of(shape, group, args.rounds, args.small, implementations()):
                (failed if "reason" in row else results).append(where | row)
        except Exception as error:  # arguments that do not fit in memory, mostly
            left_out.append(where | {"reason": said(error)})
        gc.collect()
        save(args.out, result())  # a device that is lost must not lose it all
    write(args.out, result())
    return result()


def implementations() -> tuple[str, ...]:
    """Of operations that have a kernel: what can run here."""
    capability = gpu_capability()
    return ("pallas", "xla") if capability and capability >= OLDEST_GPU else ("xla",)


def said(error: Exception) -> str:
    """The beginning of what an error says."""
    return f"{type(error).__name__}: {str(error).strip()[:200]}"


# --- one group ------------------------------------------------------------------------------------


class Ran(NamedTuple):
    """A side, compiled, and what came of it."""

    side: Side
    calls: int  # of a round
    run: Run
    out: np.ndarray
    is_slow: bool  # has one round
    times: list[float]  # seconds of rounds

    @property
    def seconds(self) -> float:
        """Of a call, the median."""
        return statistics.median(self.times) / self.calls


def rows_of(
    shape: Shape, group: str, rounds: int, small: bool, names: tuple[str, ...]
) -> list[dict]:
    """A row for each side of a group and for the copy: figures, or the reason why it failed."""
    x = jax.block_until_ready(inputs(shape))
    sides = [copy(2**16 if small else 2**30), *GROUPS[group](shape, x, names)]
    with concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        tried = list(pool.map(lambda side: warmed(side, small), sides))
    ran = [each for each in tried if isinstance(each, Ran)]
    if not isinstance(tried[0], Ran):
        raise RuntimeError(f"the copy did not run: {tried[0]['reason']}")
    for number in range(rounds):
        for each in ran:
            if number and each.is_slow:
                continue
            begin = time.perf_counter()
            each.run()
            each.times.append(time.perf_counter() - begin)
    return [row(each, ran) if isinstance(each, Ran) else each for each in tried]


def warmed(side: Side, small: bool) -> Ran | dict:
    """The side, compiled and run once; or why it could not be."""
    most = CALLS_OF_XLA if side.implementation in BY_XLA else MOST_CALLS
    moved = max(side.bytes, side.operations / PER_BYTE)
    calls = 2 if small else max(2, min(most, round(MEASURED / moved)))
    try:
        run = side.make(calls)
        begin = time.perf_counter()
        out = [np.zeros(0), *(np.asarray(x, np.float32).ravel() for x in jax.tree.leaves(run()))]
        is_slow = time.perf_counter() - begin > SLOW
        return Ran(side, calls, run, np.concatenate(out), is_slow, [])
    except Exception as error:  # of libraries that are not ours, too
        return about(side) | {"reason": said(error)}


def about(side: Side) -> dict[str, object]:
    """What tells a row from others."""
    return {"operation": side.operation, **side.options, "implementation": side.implementation}


def row(own: Ran, ran: Sequence[Ran]) -> dict[str, object]:
    """What is said of a side, beside the others of its group, of which the copy is the first."""
    side, copied, rate = own.side, ran[0], own.side.bytes / own.seconds
    beside = next((each for each in ran if each.side.operation == side.beside), None)
    xla = about(side) | {"implementation": "xla"}
    differences = [difference(own.out, each.out) for each in ran if about(each.side) == xla]
    found = {
        "microseconds": round(1e6 * own.seconds, 2),
        "bytes": side.bytes,
        "gigabytes_per_second": round(rate / 1e9, 1),
        "share_of_copy": round(rate / copied.side.bytes * copied.seconds, 3),
        "larger_than_caches": (beside or own).side.bytes >= LARGE,
        "difference_from_xla": differences[0] if differences else None,
        "rounds": len(own.times),
        "calls": own.calls,
    }
    if side.operations:
        found["teraoperations_per_second"] = round(side.operations / own.seconds / 1e12, 2)
    if beside:
        found[f"time_over_{side.beside}"] = round(own.seconds / beside.seconds, 3)
    if side.aim is not None and side.implementation == "pallas" and found["larger_than_caches"]:
        if side.beside is None:
            met = found["share_of_copy"] >= side.aim
        else:
            met = beside is not None and own.seconds <= side.aim * beside.seconds
        found |= {"target": side.aim, "met": met}
    return about(side) | found


def difference(out: np.ndarray, reference: np.ndarray) -> float:
    """Of what was computed, over the reference's norm."""
    return float(f"{np.linalg.norm(out - reference) / (np.linalg.norm(reference) or 1):.2g}")


if __name__ == "__main__":
    main()
