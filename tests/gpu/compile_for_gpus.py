"""Compiles every kernel, the decode loop and prompts for GPUs that are not there: `make aot`.

    python -m tests.gpu.compile_for_gpus [--devices h200 a100 l4] [--only TEXT] [--hlo DIR]

XLA compiles for a device that it is given a description of (`tests/gpus`, facts of the devices).
No GPU and no driver is needed, but the CUDA plugin of jax 0.11 or newer is, and so Python 3.12 or
newer: `pip install "jax[cuda13]"`, several gigabytes. `JAX_PLATFORMS=cpu` is set here: the plugin
would look for a driver otherwise. Where it does not find the libraries that were installed with
it, set `LD_LIBRARY_PATH` to the `lib` folder of `nvidia/cu13` in `site-packages`.

What is asked of each program:

- It compiles: its shared memory fits the device.
- Its kernel is in it.
- Nothing beside the kernel makes an array as large as a store of keys or values, in any dtype: no
  copy, no conversion, no decoded rows. Rows may be written into it in place. At the end of a prompt
  that is compressed, each store may be copied once.
- Its temporary memory is below a third of what keys and values take when they are decoded; the
  outputs of parts of the slots are in it.
- A donated store comes out in its own memory.
- Of a program that makes other keys and values, as merging at a prompt's end does, neither copies
  nor temporary memory are asked about.
- The host has no part in it: no callbacks, no feeds, nothing that goes to host memory but the rows
  that an offloaded cache moves there.
- Where a program must not wait, as a prompt must not, no loop or branch in it depends on what the
  device alone knows.

Programs that name no kernel are XLA's: of them, and beside each kernel, is told what they take (how
many operations the host launches, temporary memory), so that it can be seen whether a kernel is
worth having. Nothing else is asked of them but that they compile.

In loops of decode steps, inner loops whose length is known on the device alone are counted (`inner
loops`): where XLA runs them from the host, which is its default, it waits for such a loop's
predicate, a byte, before each round. `XLA_FLAGS=--xla_gpu_enable_command_buffer=+WHILE` lets it put
a whole loop of steps into one graph, in which nothing waits (`--xla_dump_to` shows it:
`thunk_sequence_after_thunk_passes`).

Exit status: 0, 1 when something is not as asked, 2 when nothing can be compiled here.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from pallas_kernels.base import tiles
from tests.gpu.gpu_programs import programs
from tests.support import ahead_of_time
from tests.support.ahead_of_time import SHOWN, Program, compiled, megabytes, mesh_of
from tests.support.hlo_text import Program as HLO

GPUS = Path(__file__).parent / "gpus"
TEMPORARY = 0.33  # of the bytes of decoded keys and values: half of them are the keys
PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


class Device(NamedTuple):
    """A device that is compiled for."""

    name: str
    capability: tuple[int, int]
    mesh: Mesh


class Outcome(NamedTuple):
    """What became of a program."""

    faults: list[str]
    seconds: float
    temporary: int = 0
    launches: int = 0
    inner_loops: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles everything for every device."""
    known = sorted(path.stem for path in GPUS.glob("*.txtpb"))
    parser = ahead_of_time.parser_of("gpu.compile_for_gpus", __doc__, known)
    given = parser.parse_args(arguments)
    if reason := ahead_of_time.cannot("cuda13", "GPU", PLUGINS):
        print(reason, file=sys.stderr)
        return 2
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # of a driver that is not used
    jax.config.update("jax_platforms", "cpu")
    count = failed = 0
    for name in given.devices:
        try:
            device = describe(name)
        except Exception as error:
            print(f"the CUDA plugin cannot be used: {error}", file=sys.stderr)
            return 2
        with tiles_of(device) as generation:
            kind = device.mesh.devices.flat[0].device_kind
            print(f"{name}: {kind}, tiles of {generation}", flush=True)
            for program in programs():
                if given.only in program.name:
                    outcome = check(device, program, given.hlo)
                    report(device, program, outcome)
                    count, failed = count + 1, failed + bool(outcome.faults)
    print(f"{count} programs, {failed} not as they should be")
    return 1 if failed or not count else 0


def describe(name: str) -> Device:
    """The device of a description."""
    from jax.experimental import topologies

    text = (GPUS / f"{name}.txtpb").read_text()
    topology = topologies.get_topology_desc("", "cuda", target_config=text, topology="1x1x1")
    number = re.search(r"cuda_compute_capability \{ major: (\d+) minor: (\d+) \}", text)
    return Device(name, tuple(int(x) for x in number.groups()), mesh_of(topology))


@contextlib.contextmanager
def tiles_of(device: Device) -> Iterator[str]:
    """The tile sizes of the device's generation: where there is no GPU, one is the default."""
    before, tiles.DEFAULT = tiles.DEFAULT, tiles.generation(device.capability)
    jax.clear_caches()  # what was traced knows the tiles of another
    try:
        yield tiles.DEFAULT
    finally:
        tiles.DEFAULT = before


def check(device: Device, program: Program, folder: Path | None = None) -> Outcome:
    """Compiles a program and asks of it what is to be asked."""
    found, text, seconds, faults = compiled(
        program, device.mesh, folder, device.name, platform="cuda"
    )
    if faults:
        return Outcome(faults, seconds)
    hlo, memory = HLO(text), found.memory_analysis()
    faults = list(faults_of(program, hlo, memory)) if program.kernel else []
    return Outcome(faults, seconds, memory.temp_size_in_bytes, hlo.launches(), len(hlo.waits()))


def faults_of(program: Program, hlo: HLO, memory) -> Iterator[str]:
    """What is not as asked in the text of a program, and in the memory that it takes."""
    if not hlo.kernels(program.kernel):
        yield f"no kernel {program.kernel} in it"
    copies = hlo.copies(program.store_elements, program.kernel)
    for line in copies if len(copies) > program.copied and not program.rewrites else ():
        yield f"as large as a store: {line[:SHOWN]}"
    copied, updated = hlo.to_host()
    for line in copied if program.to_host else copied + updated:
        yield f"to host memory: {line[:SHOWN]}"
    for line in () if program.waits else hlo.waits():
        yield f"waits for the device: {line[:SHOWN]}"
    for line in hlo.talks():
        yield f"with the host: {line[:SHOWN]}"
    limit = TEMPORARY * program.decoded_bytes
    limit += program.copied * program.store_bytes / len(program.stores)
    if memory.temp_size_in_bytes > limit and not program.rewrites:
        yield (
            f"temporary memory: {megabytes(memory.temp_size_in_bytes)}, more than "
            f"{megabytes(limit)}, {TEMPORARY:.0%} of what is decoded"
        )
    kept = memory.alias_size_in_bytes + memory.host_alias_size_in_bytes
    if program.donated and kept < program.store_bytes:
        yield (
            f"donated: {megabytes(kept)} come out in their own memory, fewer than the "
            f"{megabytes(program.store_bytes)} of the stores"
        )


def report(device: Device, program: Program, outcome: Outcome) -> None:
    """One line, and one for each fault."""
    loops = f", inner loops {outcome.inner_loops}" if outcome.inner_loops else ""
    print(
        f"{'FAIL' if outcome.faults else 'ok  '} {device.name:5} {program.name:60} "
        f"{outcome.seconds:5.1f} s, {outcome.launches} launches, temporary "
        f"{megabytes(outcome.temporary)} of {megabytes(program.store_bytes)}{loops}",
        flush=True,
    )
    for fault in outcome.faults:
        print(f"       {fault}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
