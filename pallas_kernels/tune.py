"""Finds the tile sizes of the kernels on the GPU that is there: `python -m pallas_kernels.tune`."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax

from pallas_kernels.attention.tuning import Attention
from pallas_kernels.base.dispatch import OLDEST_GPU, default_device, gpu_capability
from pallas_kernels.base.tiles import PATH, Tile, generation, table
from pallas_kernels.grouping.tuning import Grouping

TILE_BYTES, WARPS, STAGES = (4096, 8192, 16384, 32768), (4, 8), (2, 3, 4)
Work = Attention | Grouping  # a call that is measured

# Of few queries, stores are larger than any L2, so that what is measured is memory.
WORKS: dict[str, tuple[Work, ...]] = {
    "decode_attention": (Attention(1, 65_536), Attention(16, 16_384)),
    "gather_attention": (Attention(1, 131_072, listed=4096), Attention(16, 32_768, listed=2048)),
    "quantized_attention": (Attention(1, 131_072, "int8"), Attention(16, 32_768, "4 bits")),
    "codebook_attention": (Attention(1, 65_536, "codebook"), Attention(16, 16_384, "codebook")),
    "prompt_attention": (Attention(1, 8192, queries=8192), Attention(1, 32_768, queries=4096)),
    "column_sums": tuple(
        Attention(1, slots, queries=queries, sums=True)
        for slots, queries in ((8192, 8192), (32_768, 4096))
    ),
    # ClusterKV's chunks with 16 tokens a cluster, and Chelsea's; all keys of a head at once.
    "best_match": (Grouping(1, 65_536, 1024, 64), Grouping(1, 65_536, 256)),
    "kmeans": (
        Grouping(1, 65_536, 1024, 64, average=True), Grouping(1, 65_536, 65_536, 800, average=True)
    ),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures every candidate on every shape, and writes the best into the table."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tune", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=PATH, help="the table; by default the package's"
    )
    parser.add_argument("--rounds", type=int, default=5, help="times each candidate is measured")
    parser.add_argument("--operations", nargs="+", choices=list(WORKS), default=list(WORKS))
    given = parser.parse_args(arguments)
    capability = gpu_capability()
    if capability is None or capability < OLDEST_GPU:
        parser.exit(2, f"{parser.prog}: {refusal(capability)}\n")
    if given.rounds < 1:
        parser.exit(2, f"{parser.prog}: --rounds must be at least 1, got {given.rounds}\n")
    cores = default_device().core_count
    found = {}
    for operation in given.operations:
        works = WORKS[operation]
        times = measure_all(works, list(candidates(works[0], cores)), given.rounds)
        found[operation], seconds = best(times)
        for work, spent in zip(works, seconds, strict=True):
            rate = f"{work.bytes / spent / 1e9:,.0f} GB/s"
            print(f"{operation} {work}: {1e6 * spent:,.0f} microseconds, {rate}")
        print(f"{operation}: {found[operation]}")
    write(given.out, generation(capability), found)
    print(f"written: {given.out}")
    return 0


def refusal(capability: tuple[int, int] | None) -> str:
    """Why nothing can be measured here."""
    there = f"a GPU of {capability[0]}.{capability[1]}" if capability else jax.default_backend()
    return (
        f"needs a CUDA GPU of compute capability {OLDEST_GPU[0]}.{OLDEST_GPU[1]} or newer to "
        f"measure on, got {there}"
    )


def candidates(work: Work, cores: int) -> Iterable[Tile]:
    """Every tile that is tried."""
    for sizes in itertools.product(TILE_BYTES, WARPS, STAGES):
        for more in itertools.product(*work.tried.values()):
            yield Tile(*sizes, **dict(zip(work.tried, more, strict=True)), cores=cores)


def measure_all(
    works: Sequence[Work], tiles: Sequence[Tile], rounds: int
) -> dict[Tile, tuple[float, ...]]:
    """Median seconds of a call per work, of those tiles that can be compiled for every work.

    All candidates take turns: a GPU's clock drifts by more than what tells two of them apart.
    """
    calls: dict[Tile, list[Callable[[], float]]] = {}
    made = [(work.call, work.operands()) for work in works]
    for tile in tiles:
        try:
            calls[tile] = [timed(tile, call, arguments) for call, arguments in made]
        except jax.errors.JaxRuntimeError as error:  # more shared memory than there is
            print(f"left out {tile}: {str(error).splitlines()[0][:100]}", file=sys.stderr)
    seconds = {tile: [[] for _ in works] for tile in calls}
    for _ in range(rounds):
        for tile, own in calls.items():
            for call, into in zip(own, seconds[tile], strict=True):
                into.append(call())
    return {t: tuple(statistics.median(x) for x in each) for t, each in seconds.items()}


def best(times: dict[Tile, tuple[float, ...]]) -> tuple[Tile, tuple[float, ...]]:
    """The tile with the smallest product of times, so that no shape outweighs another."""
    if not times:
        raise RuntimeError("none of the candidates could be compiled for this GPU")
    return min(times.items(), key=lambda item: math.prod(item[1]))


def timed(
    tile: Tile, call: Callable[..., jax.Array], arguments: tuple, repeat: int = 50
) -> Callable[[], float]:
    """A function that runs a compiled loop of calls and returns the seconds that one takes.

    In a loop on the device, since a launch from Python takes as long as a call.
    """

    def calls(first, *rest):
        # Each call's first argument depends on the call before: none is left out, none overtakes.
        def once(_, x):
            out = call(x, *rest, tile=tile)
            own = out if out.shape in ((), x.shape) else out.ravel()[0]
            return x + 0 * own.astype(x.dtype)

        return jax.lax.fori_loop(0, repeat, once, first)

    compiled = jax.jit(calls).lower(*arguments).compile()
    compiled(*arguments).block_until_ready()

    def once() -> float:
        begin = time.perf_counter()
        compiled(*arguments).block_until_ready()
        return (time.perf_counter() - begin) / repeat

    return once


def write(path: Path, name: str, found: dict[str, Tile]) -> None:
    """Puts what was found into the table of `path`, or of the package where there is none yet."""
    new = json.loads(path.read_text()) if path.exists() else json.loads(json.dumps(table()))
    new.setdefault(name, {}).update({op: dataclasses.asdict(tile) for op, tile in found.items()})
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(new, indent=2, sort_keys=True) + "\n")
    beside.replace(path)


if __name__ == "__main__":
    sys.exit(main())
