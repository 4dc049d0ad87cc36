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
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention.forms import Rows, codebook_rows, dense_rows, quantized_rows
from pallas_kernels.attention.kernel import Slots, split_attention
from pallas_kernels.attention.rotation import Turn
from pallas_kernels.base.dispatch import OLDEST_GPU, default_device, gpu_capability
from pallas_kernels.base.tiles import PATH, Tile, generation, table
from pallas_kernels.formats.bits import Encoded
from pallas_kernels.formats.codebook import References

GROUP = 32  # values of a group of 4 bits
TILE_BYTES, WARPS, STAGES, PROGRAMS = (4096, 8192, 16384, 32768), (4, 8), (2, 3, 4), (1, 2, 4)


class Work(NamedTuple):
    """One call that is measured: heads of 128 channels, four query heads each."""

    rows: int
    slots: int
    form: str = "dense"  # or "int8", "4 bits", "codebook"
    listed: int | None = None  # how many slots are gathered; None: all are read
    heads: int = 8
    group: int = 4
    channels: int = 128
    dtype: str = "bfloat16"

    @property
    def bytes(self) -> int:
        """What must be read: keys, values, and of each place its bias, position and entry."""
        places = self.rows * self.heads * (self.listed or self.slots)
        per_place = 8 if self.listed is None else 12
        stored = jax.eval_shape(lambda: operands(self)[1])
        # A list reads its share of the store, a codebook's entries are read once.
        share = 1 if self.listed is None else self.listed / self.slots
        return places * per_place + int(
            2 * share * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(stored))
        )


# Larger than any L2, so that what is measured is memory.
WORKS = {
    "decode_attention": (Work(1, 65_536), Work(16, 16_384)),
    "gather_attention": (Work(1, 131_072, listed=4096), Work(16, 32_768, listed=2048)),
    "quantized_attention": (Work(1, 131_072, "int8"), Work(16, 32_768, "4 bits")),
    "codebook_attention": (Work(1, 65_536, "codebook"), Work(16, 16_384, "codebook")),
}


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
        times = measure_all(WORKS[operation], list(candidates(cores)), given.rounds)
        found[operation], seconds = best(times)
        for work, spent in zip(WORKS[operation], seconds, strict=True):
            print(f"{operation} {work}: {work.bytes / spent / 1e9:,.0f} GB/s")
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


def candidates(cores: int) -> Iterable[Tile]:
    """Every tile that is tried."""
    for sizes in itertools.product(TILE_BYTES, WARPS, STAGES, PROGRAMS):
        yield Tile(*sizes, cores=cores)


def measure_all(
    works: Sequence[Work], tiles: Sequence[Tile], rounds: int
) -> dict[Tile, tuple[float, ...]]:
    """Median seconds of a call per work, of those tiles that can be compiled for every work.

    All candidates take turns: a GPU's clock drifts by more than what tells two of them apart.
    """
    calls: dict[Tile, list[Callable[[], float]]] = {}
    arguments = [operands(work) for work in works]
    for tile in tiles:
        try:
            calls[tile] = [timed(tile, x) for x in arguments]
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


def operands(work: Work) -> tuple:
    """Random arguments of `attention` for a work."""
    keys = jax.random.split(jax.random.key(0), 4)
    store = (work.rows, work.heads, work.slots, work.channels)
    q = jax.random.normal(keys[0], (work.rows, work.heads, work.group, 1, work.channels))
    k, v = (_stored(key, store, work) for key in keys[1:3])
    bias = jnp.zeros(store[:3], jnp.float32)
    position = jnp.broadcast_to(jnp.arange(work.slots, dtype=jnp.int32)[None, None], store[:3])
    places, index = work.slots, None
    if work.listed is not None:
        places = work.listed
        index = jax.random.randint(keys[3], (*store[:2], places), 0, work.slots, jnp.int32)
    end = jnp.full(store[:2], places, jnp.int32)
    query = jnp.full((work.rows, 1), work.slots - 1, jnp.int32)
    slots = Slots(bias, position, end, index=index)
    turn = None
    if work.form == "codebook":  # whose keys are stored unrotated
        turn = 1 / 500_000.0 ** (jnp.arange(0, work.channels, 2) / work.channels)[None]
    return q.astype(work.dtype), k, v, slots, query, turn


def _stored(key: jax.Array, store: tuple[int, ...], work: Work) -> jax.Array | Encoded | References:
    """Random keys or values in the form of a work."""
    if work.form == "dense":
        return jax.random.normal(key, store, work.dtype)
    if work.form == "int8":
        values = jax.random.randint(key, store, -127, 128, jnp.int8)
        return Encoded(values, jnp.full(store[:3], 0.01, jnp.float32))
    if work.form == "4 bits":
        half, groups = ((*store[:3], store[3] // n) for n in (2, GROUP))
        values = jax.random.randint(key, half, 0, 256, jnp.uint8)
        return Encoded(values, *(jnp.full(groups, x, work.dtype) for x in (0.1, -0.7)))
    entries = min(work.heads * work.slots // 4, 2**16)
    book = jax.random.normal(key, (work.rows, 1, entries, work.channels), work.dtype)
    index = jax.random.randint(key, store[:3], 0, entries, jnp.int32).astype(jnp.uint16)
    return References(book, index, jnp.ones(store[:3], work.dtype))


def attention(
    q: jax.Array, k, v, slots: Slots, query, frequencies, tile: Tile, interpret: bool = False
) -> jax.Array:
    """The call that is measured."""
    turn = None if frequencies is None else Turn(frequencies, slots.position)
    return split_attention(
        q, _rows(k, q.dtype), _rows(v, q.dtype), slots, query, scale=q.shape[-1] ** -0.5,
        window=None, soft_cap=None, tile=tile, with_logits=False, interpret=interpret,
        dtype=q.dtype, turn=turn,
    )[0]  # fmt: skip


def _rows(x: jax.Array | Encoded | References, dtype: jnp.dtype) -> Rows:
    if isinstance(x, Encoded):
        return quantized_rows(x, dtype)
    return codebook_rows(x) if isinstance(x, References) else dense_rows(x)


def timed(tile: Tile, arguments: tuple, repeat: int = 50) -> Callable[[], float]:
    """A function that runs a compiled loop of calls and returns the seconds that one takes.

    In a loop on the device, since a launch from Python takes as long as a call.
    """

    def calls(q, *rest):
        # Each call's query depends on the call before: none is left out, none overtakes.
        return jax.lax.fori_loop(
            0, repeat, lambda _, x: x + 0 * attention(x, *rest, tile=tile).astype(x.dtype), q
        )

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
