"""Finds the tile sizes of the kernels on the GPU that is there: `python -m pallas_kernels.tune`."""

from __future__ import annotations

import argparse
import concurrent.futures
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

from pallas_kernels.attention.prompt_kernel import REDUCTIONS
from pallas_kernels.attention.tuning import Attention
from pallas_kernels.base.dispatch import OLDEST_GPU, default_device, gpu_capability
from pallas_kernels.base.tiles import PATH, Tile, generation, table
from pallas_kernels.grouping.tuning import Grouping

TILE_BYTES, WARPS, STAGES = (4096, 8192, 16384, 32768), (4, 8), (2, 3, 4)
Work = Attention | Grouping  # a measured call

# Stores for few queries are larger than any L2 cache, so that memory is what is measured.
WORKS: dict[str, tuple[Work, ...]] = {
    "decode_attention": (Attention(1, 65_536), Attention(16, 16_384)),
    "gather_attention": (Attention(1, 131_072, listed=4096), Attention(16, 32_768, listed=2048)),
    "quantized_attention": (Attention(1, 131_072, "int8"), Attention(16, 32_768, "4 bits")),
    "codebook_attention": (Attention(1, 65_536, "codebook"), Attention(16, 16_384, "codebook")),
    "prompt_attention": (Attention(1, 8192, queries=8192), Attention(1, 32_768, queries=4096)),
    **{
        operation: tuple(
            Attention(1, slots, queries=queries, columns=operation)
            for slots, queries in ((8192, 8192), (32_768, 4096))
        )
        for operation in REDUCTIONS
    },
    # Chunks of ClusterKV with 16 tokens per cluster, and chunks of Chelsea.
    "best_match": (Grouping(1, 65_536, 1024, 64), Grouping(1, 65_536, 256)),
    # Chunks of ClusterKV, and all keys of a head at once.
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
    options = parser.parse_args(arguments)
    capability = gpu_capability()
    if capability is None or capability < OLDEST_GPU:
        parser.exit(2, f"{parser.prog}: {refusal(capability)}\n")
    if options.rounds < 1:
        parser.exit(2, f"{parser.prog}: --rounds must be at least 1, got {options.rounds}\n")
    cores = default_device().core_count
    tiles = {}
    for operation in options.operations:
        works = WORKS[operation]
        times = measure_all(works, list(candidates(works[0], cores)), options.rounds)
        tiles[operation], seconds = best(times)
        for work, spent in zip(works, seconds, strict=True):
            rate = f"{work.bytes / spent / 1e9:,.0f} GB/s"
            print(f"{operation} {work}: {1e6 * spent:,.0f} microseconds, {rate}")
        print(f"{operation}: {tiles[operation]}")
    write(options.out, generation(capability), tiles)
    print(f"written: {options.out}")
    return 0


def refusal(capability: tuple[int, int] | None) -> str:
    """Returns the message that says why nothing can be measured here."""
    device = f"a GPU of {capability[0]}.{capability[1]}" if capability else jax.default_backend()
    return (
        f"needs a CUDA GPU of compute capability {OLDEST_GPU[0]}.{OLDEST_GPU[1]} or newer to "
        f"measure on, got {device}"
    )


def candidates(work: Work, cores: int) -> Iterable[Tile]:
    """Yields each tile to try."""
    for sizes in itertools.product(TILE_BYTES, WARPS, STAGES):
        for values in itertools.product(*work.tried.values()):
            yield Tile(*sizes, **dict(zip(work.tried, values, strict=True)), cores=cores)


def measure_all(
    works: Sequence[Work], tiles: Sequence[Tile], rounds: int
) -> dict[Tile, tuple[float, ...]]:
    """Returns a call's median seconds per work, for tiles that compile for every work.

    All candidates take turns, since a GPU's clock drifts by more than two candidates differ.
    """
    prepared = [(work.call, work.operands()) for work in works]

    def compiled(tile: Tile) -> list[Callable[[], float]] | None:
        try:
            return [timed(tile, call, arguments) for call, arguments in prepared]
        except jax.errors.JaxRuntimeError as error:  # more shared memory than there is
            print(f"left out {tile}: {str(error).splitlines()[0][:100]}", file=sys.stderr)
            return None

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        calls = {tile: c for tile, c in zip(tiles, pool.map(compiled, tiles), strict=True) if c}
    seconds = {tile: [[] for _ in works] for tile in calls}
    for _ in range(rounds):
        for tile, timed_calls in calls.items():
            for call, times in zip(timed_calls, seconds[tile], strict=True):
                times.append(call())
    return {t: tuple(map(statistics.median, per_work)) for t, per_work in seconds.items()}


def best(times: dict[Tile, tuple[float, ...]]) -> tuple[Tile, tuple[float, ...]]:
    """Returns the tile with the smallest product of times, so that no shape outweighs another."""
    if not times:
        raise RuntimeError("none of the candidates could be compiled for this GPU")
    return min(times.items(), key=lambda item: math.prod(item[1]))


def timed(
    tile: Tile, call: Callable[..., jax.Array], arguments: tuple, repeat: int = 50
) -> Callable[[], float]:
    """Returns a function that runs a compiled loop of calls and returns the seconds per call.

    The loop runs on the device, since a launch from Python takes as long as a call.
    """

    def calls(first, *rest):
        # Each call's first argument depends on the call before: none is left out or reordered.
        def once(_, x):
            out = call(x, *rest, tile=tile)
            dependence = out if out.shape in ((), x.shape) else out.ravel()[0]
            return x + 0 * dependence.astype(x.dtype)

        return jax.lax.fori_loop(0, repeat, once, first)

    compiled = jax.jit(calls).lower(*arguments).compile()
    compiled(*arguments).block_until_ready()

    def once() -> float:
        begin = time.perf_counter()
        compiled(*arguments).block_until_ready()
        return (time.perf_counter() - begin) / repeat

    return once


def write(path: Path, name: str, tiles: dict[str, Tile]) -> None:
    """Puts the tiles into the table at `path`, or into a copy of the package's table there."""
    contents = json.loads(path.read_text()) if path.exists() else json.loads(json.dumps(table()))
    contents.setdefault(name, {}).update(
        {op: dataclasses.asdict(tile) for op, tile in tiles.items()}
    )
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(contents, indent=2, sort_keys=True) + "\n")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
