"""Operations of compressed caches, in bytes per second over the bandwidth of a copy.

    python benchmarks/kernels.py --out benchmarks/results/kernels_h200.json

On a GPU, in under ten minutes; on CPU with `--small`, which says nothing about speed. One table of
shapes: a layer of Llama-3.1-8B and one of GLM-4-9B, 8,192 to 131,072 tokens, 1 to 32 rows, what
fits in memory, bfloat16. Each operation runs by its kernel and by XLA; dense attention also by
`jax.nn.dot_product_attention` (cuDNN) and, where installed, PyTorch and FlashInfer.

A measurement is a loop of calls on the device. The sides of a group take turns, round after round,
and a copy with them: `share_of_copy` is the median rate of a side over that of the copy in the same
rounds. A side's bytes are those that must move (`bytes` in the result says which), whatever it
moves besides. A copy is `y = -x` over an array much larger than any cache, bytes read and written.

The largest shapes come first, so that what the time does not suffice for are rounds, or else the
smallest shapes. What was left out, and why, is in the result; so are sides that failed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import gc
import importlib.metadata
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from common import write
from kernel_shapes import FORMULAS, LARGE, MODELS, SIZES, SMALL, Inputs, Shape, inputs
from kernel_sides import GROUPS, ROOM, Run, Side, copy
from other_attention import other_sides

from pallas_kernels.base.dispatch import OLDEST_GPU, gpu_capability

ROUNDS, FEWEST = 10, 3
SECONDS = 480  # of all; compiling what was begun comes on top
MEASURED = 4e-3  # seconds that a measurement takes at least, if a call moves its bytes alone
MOST_CALLS, CALLS_OF_OTHERS = 400, 10  # of a measurement; of XLA, which may be slow
LEAST = 1.5  # seconds of rounds of a group, while there is time at all
SLOW = 1.5  # seconds of one side in a group, from which on it is measured no more often
PARTS_OF_MEMORY = 4  # a shape's keys and values, and what is made of them, at most
HOST_BYTES = 2**30  # of stores in host memory


class Failure(NamedTuple):
    """A side that did not run."""

    shape: str
    operation: str
    implementation: str
    options: dict[str, object]
    reason: str


class Benchmark:
    """What was measured so far, and for how long there is time."""

    def __init__(self, small: bool, rounds: int, seconds: float):
        self.small, self.rounds = small, rounds
        self.names = implementations()
        self.end = time.perf_counter() + seconds
        self.results: list[dict] = []
        self.failed: list[Failure] = []
        self.left_out: list[dict] = []
        self.copied = 2**16 if small else 2**30
        self.guess = 1e12 if small else self.measure_copy()

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.perf_counter()

    def measure_copy(self) -> float:
        """Bytes per second, about: what decides how many calls are made."""
        side, calls = copy(self.copied), 10
        run = side.make(calls)
        run()
        begin = time.perf_counter()
        run()
        return calls * side.bytes / (time.perf_counter() - begin)

    def run(self, shapes: Sequence[Shape], save: Callable[[], object]) -> None:
        """Measures one shape after the other, and saves what there is after each."""
        for number, shape in enumerate(shapes):
            if self.left <= 0:
                self.leave_out(str(shape), "everything", "no time left")
                continue
            # Later shapes take less; what one does not use, the others have.
            share = 2 * self.left / (len(shapes) - number + 1)
            try:
                self.shape(shape, time.perf_counter() + share)
            except Exception as error:
                self.leave_out(str(shape), "what is missing", _first_line(error))
            save()

    def shape(self, shape: Shape, end: float) -> None:
        """Measures all groups of one shape."""
        x = jax.block_until_ready(inputs(shape))
        groups = [name for name in GROUPS if name != "host" or self.has_host(shape)]
        for number, group in enumerate(groups):
            now = time.perf_counter()
            until = now + (end - now) / (len(groups) - number)
            if self.left <= 0:
                self.leave_out(str(shape), group, "no time left")
                continue
            try:
                self.group(shape, group, x, until)
            except Exception as error:  # arguments that do not fit in memory, mostly
                self.leave_out(str(shape), group, _first_line(error))
            gc.collect()

    def has_host(self, shape: Shape) -> bool:
        """Whether keys and values can be kept in host memory."""
        kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
        fits = self.small or (shape.batch == 1 and shape.dense <= HOST_BYTES)
        return "pinned_host" in kinds and fits

    def group(self, shape: Shape, group: str, x: Inputs, until: float) -> None:
        """Measures one group of sides, which take turns with a copy."""
        sides = [copy(self.copied), *GROUPS[group](shape, x, self.names)]
        if group == "dense" and "xla" in self.names and not self.small:
            sides += other_sides(shape, x)
        calls = [self.calls(side) for side in sides]
        runs = self.made(shape, sides, calls)
        outs = self.warmed(shape, sides, runs)
        until = max(until, time.perf_counter() + LEAST)  # compiling may have taken all of it
        times = {number: [] for number in runs}
        for done in range(self.rounds):
            for number, run in runs.items():
                enough = sum(times[number]) > SLOW or time.perf_counter() > until
                if done < (1 if sum(times[number]) > SLOW else FEWEST) or not enough:
                    begin = time.perf_counter()
                    run()
                    times[number].append(time.perf_counter() - begin)
        fewer = {
            s.operation for n, s in enumerate(sides) if 0 < len(times.get(n, ())) < self.rounds
        }
        if fewer:
            made = min(len(each) for each in times.values())
            self.leave_out(str(shape), group, f"rounds: {made} to {self.rounds} of {self.rounds}")
        self.note(shape, group, sides, calls, times, outs)

    def calls(self, side: Side) -> int:
        """Of one measurement."""
        if side.calls is not None:
            return side.calls
        if self.small:
            return 2
        most = MOST_CALLS if side.implementation in ("pallas", "interpret") else CALLS_OF_OTHERS
        return max(2, min(most, round(MEASURED * self.guess / side.bytes)))

    def made(self, shape: Shape, sides: Sequence[Side], calls: Sequence[int]) -> dict[int, Run]:
        """Compiled loops by number of side; those that cannot be compiled are noted."""
        runs = {}

        def make(number: int) -> None:
            side = sides[number]
            try:
                runs[number] = side.make(calls[number])
            except Exception as error:  # of libraries that are not ours, too
                self.fail(shape, side, error)

        beside = [n for n, side in enumerate(sides) if side.threads]
        with concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
            list(pool.map(make, beside))
        for number in set(range(len(sides))) - set(beside):
            make(number)
        return dict(sorted(runs.items()))

    def warmed(
        self, shape: Shape, sides: Sequence[Side], runs: dict[int, Run]
    ) -> dict[int, np.ndarray]:
        """What each side computes; those that cannot run are noted and taken out."""
        outs = {}
        for number, run in list(runs.items()):
            try:
                outs[number] = _numbers(run())
            except Exception as error:
                self.fail(shape, sides[number], error)
                del runs[number]
        return outs

    def note(self, shape: Shape, group: str, sides, calls, times, outs) -> None:
        """Rows of the result."""
        rates = {
            number: calls[number] * side.bytes / statistics.median(times[number])
            for number, side in enumerate(sides)
            if times.get(number)
        }
        yardsticks = {s.operation: rates[n] for n, s in enumerate(sides) if n in rates}
        if "copy" in yardsticks:
            self.guess = yardsticks["copy"]
        references = {s.compared: outs.get(n) for n, s in enumerate(sides)
                      if s.implementation == "xla"}  # fmt: skip
        for number, side in enumerate(sides):
            if number not in rates:
                continue
            rate, over = rates[number], yardsticks.get(side.over)
            row = {
                "model": shape.model.name, "tokens": shape.tokens, "batch": shape.batch,
                "group": group, "operation": side.operation, **side.options,
                "implementation": side.implementation,
                "microseconds": round(1e6 * side.bytes / rate, 2),
                "bytes": side.bytes,
                "gigabytes_per_second": round(rate / 1e9, 1),
                f"share_of_{side.over}": None if over is None else round(rate / over, 3),
                "rounds": len(times[number]), "calls": calls[number],
                "larger_than_caches": side.bytes >= LARGE,
                "difference_from_xla": _difference(outs[number], references.get(side.compared)),
            }  # fmt: skip
            self.results.append(row)

    def fail(self, shape: Shape, side: Side, error: Exception) -> None:
        """Notes a side that did not run."""
        self.failed.append(
            Failure(
                str(shape), side.operation, side.implementation, side.options, _first_line(error)
            )
        )

    def leave_out(self, shape: str, what: str, why: str) -> None:
        """Notes what was not measured, or less often."""
        self.left_out.append({"shape": shape, "what": what, "why": why})


def implementations() -> tuple[str, ...]:
    """Of operations that have a kernel: what can run here."""
    capability = gpu_capability()
    return ("pallas", "xla") if capability and capability >= OLDEST_GPU else ("xla",)


def _numbers(out) -> np.ndarray:
    """All that a call gave, as float32."""
    leaves = [x if isinstance(x, jax.Array) else x.float().cpu().numpy()
              for x in jax.tree.leaves(out)]  # fmt: skip
    return np.concatenate([np.asarray(x, np.float32).reshape(-1) for x in leaves] or [np.zeros(0)])


def _difference(out: np.ndarray, reference: np.ndarray | None) -> float | None:
    """Of what was computed, over the reference's norm."""
    if reference is None or out.shape != reference.shape or not out.size:
        return None
    norm = np.linalg.norm(reference)
    return float(f"{np.linalg.norm(out - reference) / (norm or 1):.2g}")


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


# --- targets --------------------------------------------------------------------------------------


def targets(results: Sequence[dict], failed: Sequence[Failure]) -> list[dict]:
    """What is aimed at, and what was measured: the least, or the most, of all that count.

    None where nothing that counts was measured. A target is not met while a kernel that counts has
    failed at a shape.
    """
    large = [r for r in results if r["larger_than_caches"] and r["implementation"] == "pallas"]

    def shares(operation: str, **options) -> list[float]:
        return [
            r["share_of_copy"]
            for r in large
            if r["operation"] == operation and options.items() <= r.items() and r["share_of_copy"]
        ]

    def target(what: str, aim: float, found: list[float], worst, *operations, **options) -> dict:
        lost = [
            f
            for f in failed
            if f.implementation == "pallas" and f.operation in operations
            and options.items() <= f.options.items()
        ]  # fmt: skip
        return _target(what, aim, found, worst, len(lost))

    lists = [s for rows in (1024, 2048, 4096) for s in shares("gather_attention", rows=rows)]
    return [
        target("decode_attention in bfloat16, share of the copy bandwidth, large shapes, least",
               0.85, shares("decode_attention"), min, "decode_attention"),
        target("quantized_attention in int8, share of the copy bandwidth, large shapes, least",
               0.75, shares("quantized_attention", form="int8"), min, "quantized_attention",
               form="int8"),
        target("gather_attention of 1,024 to 4,096 rows, share of the copy bandwidth, large "
               "shapes, least", 0.60, lists, min, "gather_attention"),
        target("codebook_attention at 40 % reserve (half of the slots with 0.8 entries for each, "
               "or 0.8 with 0.5), time over that of decode_attention to all slots, large shapes, "
               "most", 1.0, _times(results, "codebook_attention", "decode_attention", "codebook"),
               max, "codebook_attention"),
        target("ranking and indexing, share of a step of ClusterKV, all shapes, most", 0.10,
               _times(results, "choosing", "clusterkv step", "step", small=True), max,
               "choosing", "clusterkv step"),
    ]  # fmt: skip


def _target(what: str, target: float, measured: list[float], worst, failed: int) -> dict:
    found = worst(measured) if measured else None
    met = None if found is None else (found >= target if worst is min else found <= target)
    return {
        "what": what, "target": target, "measured": found, "met": met and not failed,
        "shapes": len(measured), "failed": failed,
    }  # fmt: skip


def _times(results, one: str, other: str, group: str, small: bool = False) -> list[float]:
    """Time of one operation's kernel over that of another, in the same rounds."""
    kernels = [r for r in results if r["group"] == group and r["implementation"] == "pallas"]

    def where(row: dict) -> tuple:
        return row["model"], row["tokens"], row["batch"]

    others = {where(r): r for r in kernels if r["operation"] == other}
    return [
        round(r["microseconds"] / others[where(r)]["microseconds"], 3)
        for r in kernels
        if r["operation"] == one and where(r) in others
        and (small or others[where(r)]["larger_than_caches"])
    ]  # fmt: skip


# --- the table ------------------------------------------------------------------------------------


def table(small: bool) -> tuple[list[Shape], list[Shape]]:
    """Shapes that fit in memory, the largest first, and those that do not."""
    if small:
        return [Shape(model, 256, 2, "float32") for model in SMALL], []
    shapes = [Shape(model, *size) for model in MODELS for size in SIZES]
    shapes.sort(key=lambda s: -s.dense)
    stats = jax.devices()[0].memory_stats() or {}
    room = stats.get("bytes_limit", float("inf"))
    fit = [s for s in shapes if PARTS_OF_MEMORY * s.dense + 2**32 <= room]
    return fit, [s for s in shapes if s not in fit]


def versions() -> dict[str, str | None]:
    """Of what else decides."""
    found: dict[str, str | None] = {"platform": jax.devices()[0].client.platform_version}
    for name in ("torch", "flashinfer-python", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def main(arguments: Iterable[str] | None = None) -> dict:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all of it")
    parser.add_argument("--small", action="store_true", help="small shapes, on any device")
    parser.add_argument("--out")
    args = parser.parse_args(arguments)
    if not 1 <= args.rounds <= ROOM - 1:
        parser.error(f"--rounds must be 1 to {ROOM - 1}, got {args.rounds}")
    if args.seconds <= 0:
        parser.error(f"--seconds must be above 0, got {args.seconds}")
    names = implementations()
    if "pallas" not in names and not args.small:
        parser.error(
            f"needs a CUDA GPU of compute capability {OLDEST_GPU[0]}.{OLDEST_GPU[1]} or newer, or "
            f"--small; got {jax.devices()[0].device_kind}"
        )
    shapes, too_large = table(args.small)
    benchmark = Benchmark(args.small, args.rounds, args.seconds)
    begin = time.perf_counter()
    for shape in too_large:
        benchmark.leave_out(str(shape), "everything", "does not fit in the device's memory")

    def result() -> dict:
        return {
            "benchmark": "kernels",
            "versions": versions(),
            "small": args.small,
            "seconds": round(time.perf_counter() - begin, 1),
            "rounds": args.rounds,
            "bytes": FORMULAS,
            "targets": targets(benchmark.results, benchmark.failed),
            "failed": [failure._asdict() for failure in benchmark.failed],
            "left_out": benchmark.left_out,
            "results": benchmark.results,
        }

    def save() -> None:  # a device that is lost, or time that is up, must not lose it all
        if args.out:
            with contextlib.redirect_stdout(None):
                write(args.out, result())

    benchmark.run(shapes, save)
    write(args.out, result())
    return result()


if __name__ == "__main__":
    main()
