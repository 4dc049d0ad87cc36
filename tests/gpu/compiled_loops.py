"""Counts what the loops of attention's kernels do, in the machine code of GPUs that are not there.

    python -m tests.gpu.compiled_loops [--devices h200 a100 l4] [--only TEXT] [--out FILE]

Needs what `make aot` needs, and NVIDIA's disassembler: `pip install nvidia-cuda-nvdisasm`. XLA is
given a folder of CUDA in which `ptxas` keeps what it makes. Of each kernel, the loops over tiles of
slots are counted. A prompt's kernel has two of them, the first for tiles that need no mask.

The file has, for each loop: instructions of a warp for each slot, so that loops over tiles of
different sizes can be compared (of a prompt, for 128 query rows); conversions of numbers of all
threads for each slot; registers of a thread, and bytes that did not fit into them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import run
from typing import NamedTuple
from unittest import mock

import jax

from pallas_kernels.base.tiles import Tile
from tests.gpu.compile_for_gpus import GPUS, PLUGINS, Device, describe, tiles_of
from tests.gpu.gpu_programs import programs
from tests.support import ahead_of_time
from tests.support.ahead_of_time import Program, compile_for

HEADS = "bfloat16 8 x 4 x 128"
NAMES = (
    "decode", "quantized int8", "quantized float8", "quantized 4 bits per token",
    "quantized 4 bits per channel", "prompt's attention", "prompt's column_sums",
    "prompt's column_maxima",
)  # fmt: skip
WARP = 32
SHORTEST = 20  # instructions of a loop over tiles: a jump to itself ends every program
# It compiles as the real one does, which it calls, and keeps the machine code and what is said.
PTXAS = """#!/bin/sh
real={real}
[ "$1" = --version ] && exec "$real" "$@"
"$real" -v "$@" 2>"{kept}/$$.log" || {{ cat "{kept}/$$.log" >&2; exit 1; }}
cp "$1" "{kept}/$$.ptx"
while [ "$1" != -o ]; do shift; done
cp "$2" "{kept}/$$.cubin"
"""
# Instructions that turn a number of one kind into one of another.
CONVERSION = re.compile(r"I2F|F2I|F2F|I2I|HADD2\.F32 ")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?(.*?) ?;")
LABEL = re.compile(r"^\s*(\.L_\w+):")
JUMP = re.compile(r"^BRA.*`\((\.L_\w+)\)")


class Loop(NamedTuple):
    """A loop of a kernel: its instructions, without the conditions under which they run."""

    instructions: list[str]

    @property
    def conversions(self) -> int:
        """How many of them convert numbers."""
        return sum(bool(CONVERSION.match(line)) for line in self.instructions)


def loops(text: str) -> list[Loop]:
    """The innermost loops in the text of a disassembled kernel, in their order."""
    lines, labels, found = [], {}, []
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(lines)
        elif instruction := INSTRUCTION.match(line):
            lines.append(instruction[1])
    for end, line in enumerate(lines):
        jump = JUMP.match(line)
        if jump and labels.get(jump[1], len(lines)) <= end - SHORTEST:
            found.append((labels[jump[1]], end))
    inner = [a for a in found if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in found)]
    return [Loop(lines[start : end + 1]) for start, end in inner]


def main(arguments: Sequence[str] | None = None) -> int:
    """Counts the loops of every kernel for every device."""
    known = sorted(path.stem for path in GPUS.glob("*.txtpb"))
    parser = ahead_of_time.parser_of("gpu.compiled_loops", __doc__, known)
    parser.add_argument("--out", type=Path, help="a file for the counts")
    given = parser.parse_args(arguments)
    if reason := ahead_of_time.cannot("cuda13", "GPU", PLUGINS):
        print(reason, file=sys.stderr)
        return 2
    tools = Path(importlib.util.find_spec("nvidia").submodule_search_locations[0], "cu13", "bin")
    if not (tools / "nvdisasm").exists():
        print("needs a disassembler: pip install nvidia-cuda-nvdisasm", file=sys.stderr)
        return 2
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # of a driver that is not used
    jax.config.update("jax_platforms", "cpu")
    rows = []
    for name in given.devices:
        device = describe(name)
        with tiles_of(device):
            for program in programs():
                kind, _, heads = program.name.partition(", ")
                if heads == HEADS and kind in NAMES and given.only in program.name:
                    rows += counted(device, kind, program, tools)
    result = {"benchmark": "gpu_loops", "jax": jax.__version__, "heads": HEADS, "rows": rows}
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def counted(device: Device, kind: str, program: Program, tools: Path) -> Iterator[dict]:
    """A row for each loop of a program's kernel."""
    blocks, block_of = [], Tile.block

    def noted(*args) -> int:
        blocks.append(block_of(*args))
        return blocks[-1]

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(Tile, "block", noted):
        for name in ("kept", "bin"):
            Path(folder, name).mkdir()
        ptxas = Path(folder, "bin", "ptxas")
        ptxas.write_text(PTXAS.format(real=tools / "ptxas", kept=Path(folder, "kept")))
        ptxas.chmod(0o755)
        Path(folder, "nvvm").symlink_to(tools.parent / "nvvm")
        options = {"xla_gpu_cuda_data_dir": folder, "xla_gpu_enable_libnvptxcompiler": False}
        compile_for(
            device.mesh, program.function, program.args, donated=program.donated, platform="cuda",
            options=options,
        )  # fmt: skip
        text, said, ptx = kernel_of(program.kernel, Path(folder, "kept"), tools)
    registers = int(re.search(r"Used (\d+) registers", said)[1])
    warps = int(re.search(r"\.reqntid (\d+)", ptx)[1]) // WARP
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    for number, loop in enumerate(loops(text)):
        row = {
            "device": device.name, "kernel": kind, "loop": number, "slots": blocks[-1],
            "warps": warps, "instructions": len(loop.instructions),
            "instructions_per_slot": round(len(loop.instructions) * warps / blocks[-1], 1),
            "conversions_per_slot": round(loop.conversions * warps * WARP / blocks[-1], 1),
            "registers": registers, "spilled_bytes": spilled,
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        yield row


def kernel_of(name: str, kept: Path, tools: Path) -> tuple[str, ...]:
    """The text of a kernel among what `ptxas` has made, what it said of it, and its PTX."""
    for code in kept.glob("*.cubin"):
        text = run([tools / "nvdisasm", "-c", code], capture_output=True, text=True, check=True)
        if f".text.{name}" in text.stdout:
            return text.stdout, *(code.with_suffix(x).read_text() for x in (".log", ".ptx"))
    raise RuntimeError(f"no kernel {name} among {len(list(kept.iterdir()))} files")


if __name__ == "__main__":
    sys.exit(main())
