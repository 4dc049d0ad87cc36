"""Compiles decode steps and prompts for TPUs that are not there: `make aot-tpu`.

    python -m tests.tpu.compile_for_tpus [--devices v5e v5p v6e] [--only TEXT] [--out FILE]
                                         [--hlo DIR]

`libtpu` compiles for a topology that it is given the name of. No TPU is needed, but jax 0.11 or
newer with libtpu is, and so Python 3.12 or newer: `pip install "jax[tpu]"`.

What is asked of each program:

- It compiles.
- Where it is by the kernel, the kernel is in it, and nothing beside it in a step makes an array as
  large as a store of keys or values, in any dtype: no copy, no conversion, no decoded rows. Rows
  may be written into it in place, and XLA may read a store into fast memory before the kernel.
- The donated cache comes out in its own memory.
- The host has no part in it: no callbacks, no feeds.

Temporary memory is reported. XLA lays a cache out anew for the length of a loop where that serves
what is in it, and takes fast memory where a device has it, which is not in the figure.

What is known to be wrong with a program is written beside it (`tests/tpu/tpu_programs.py`), is
reported as known, and must be so.

`read` is what XLA's cost analysis counts as bytes accessed, over the bytes of the arguments, which
are the cache but for one token. It is a count from the text of the program, not a measurement:

- A scatter counts the whole array that it writes into, and a condition counts both of its branches,
  of which the second sum of values runs only where the first is not finite.
- Of a loop, one round is counted, be it of steps or of blocks of slots. What XLA lays out anew
  before and after a loop of steps is counted beside it, as if it were done for every step.
- Of a kernel, what its call says is counted: every block that its grid can fetch, once.

Exit status: 0, 1 when something is not as asked, 2 when nothing can be compiled here.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from tests.support import ahead_of_time
from tests.support.ahead_of_time import SHOWN, Program, compiled, megabytes, mesh_of
from tests.support.hlo_text import Program as HLO
from tests.tpu.tpu_programs import programs

# What moves an array into fast memory or out of it, laid out the same, at once or in slices.
FETCH = re.compile(r"S\(1\).* (copy-start\(|custom-call\(.*\"ConcatBitcast\")")


class Device(NamedTuple):
    """A device that is compiled for: the name of a topology of one chip, and its cores."""

    topology: str
    cores: int


DEVICES = {
    "v5e": Device("v5e:1x1", 1),
    "v5p": Device("v5p:1x1x1", 2),
    "v6e": Device("v6e:1x1", 1),
}
# libtpu asks the machine for what a TPU's machine says, and waits for an answer.
NO_MACHINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


class Outcome(NamedTuple):
    """What became of a program; bytes are 0 where it does not compile."""

    faults: list[str]
    known: list[str]
    seconds: float
    argument_bytes: int = 0
    accessed_bytes: float = 0.0
    temporary_bytes: int = 0

    @property
    def read(self) -> float:
        """Bytes that are accessed for each byte of the arguments."""
        return self.accessed_bytes / max(self.argument_bytes, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles everything for every device."""
    parser = ahead_of_time.parser_of("tpu.compile_for_tpus", __doc__, list(DEVICES))
    parser.add_argument("--out", type=Path, help="a JSON file for the table")
    given = parser.parse_args(arguments)
    if reason := ahead_of_time.cannot("tpu", "TPU", ["libtpu"]):
        print(reason, file=sys.stderr)
        return 2
    os.environ.update({name: os.environ.get(name, value) for name, value in NO_MACHINE.items()})
    jax.config.update("jax_platforms", "cpu")
    rows, failed = [], 0
    for name in given.devices:
        try:
            mesh = describe(DEVICES[name])
        except Exception as error:
            print(f"libtpu cannot be used: {error}", file=sys.stderr)
            return 2
        print(f"{name}: {mesh.devices.flat[0].device_kind}", flush=True)
        for program in programs():
            if given.only in program.name:
                outcome = check(name, mesh, program, given.hlo)
                print("\n".join(lines(name, program, outcome)), flush=True)
                rows.append(row(name, program, outcome))
                failed += bool(outcome.faults)
    if given.out is not None:
        given.out.write_text(json.dumps(table(rows), indent=1) + "\n")
    print(f"{len(rows)} programs, {failed} not as they should be")
    return 1 if failed or not rows else 0


def describe(device: Device) -> Mesh:
    """A mesh of one chip that is not there."""
    from jax.experimental import topologies

    return mesh_of(
        topologies.get_topology_desc(device.topology, "tpu", chips_per_host_bounds=(1, 1, 1))
    )


def check(name: str, mesh: Mesh, program: Program, folder: Path | None = None) -> Outcome:
    """Compiles a program and asks of it what is to be asked."""
    found, text, seconds, faults = compiled(
        program, mesh, folder, name, platform="tpu", cores=DEVICES[name].cores
    )
    if faults:
        return Outcome(*divide(faults, program.known), seconds)
    memory = found.memory_analysis()
    return Outcome(
        *divide(list(faults_of(program, HLO(text), memory)), program.known),
        seconds,
        memory.argument_size_in_bytes,
        found.cost_analysis()["bytes accessed"],
        memory.temp_size_in_bytes,
    )


def faults_of(program: Program, hlo: HLO, memory) -> Iterator[str]:
    """What is not as asked."""
    if program.kernel is not None:
        if not hlo.kernels(program.kernel):
            yield f"no kernel {program.kernel} in it"
        for line in hlo.copies(program.store_elements, program.kernel, looped=True):
            if not FETCH.search(line):
                yield f"as large as a store: {line[:SHOWN]}"
    for line in hlo.talks():
        yield f"with the host: {line[:SHOWN]}"
    if memory.alias_size_in_bytes < program.store_bytes:
        yield (
            f"donated: {megabytes(memory.alias_size_in_bytes)} come out in their own memory, fewer "
            f"than the {megabytes(program.store_bytes)} of the stores"
        )


def divide(found: list[str], known: str | None) -> tuple[list[str], list[str]]:
    """Faults, and what is known; that something known is not so any more is a fault."""
    if known is None:
        return found, []
    there = [x for x in found if known in x]
    faults = [x for x in found if known not in x]
    return faults if there else [*faults, f"is well, but is said not to be: {known}"], there


def lines(name: str, program: Program, outcome: Outcome) -> Iterator[str]:
    """One line, and one for each fault."""
    mark = "FAIL" if outcome.faults else "known" if outcome.known else "ok"
    yield (
        f"{mark:5} {name} {program.name:58} {outcome.seconds:6.1f} s, read {outcome.read:5.2f} of "
        f"{megabytes(outcome.argument_bytes)}, temporary {megabytes(outcome.temporary_bytes)}"
    )
    yield from (f"       {fault}" for fault in outcome.faults + outcome.known)


def row(name: str, program: Program, outcome: Outcome) -> dict:
    """One entry of the JSON file."""
    rounded = {"seconds": round(outcome.seconds, 1), "read": round(outcome.read, 2)}
    return {"device": name, "program": program.name, **outcome._asdict(), **rounded}


def table(rows: list[dict]) -> dict:
    """What is written to the JSON file."""
    import libtpu

    return {"jax": jax.__version__, "libtpu": libtpu.__version__, "programs": rows}


if __name__ == "__main__":
    sys.exit(main())
