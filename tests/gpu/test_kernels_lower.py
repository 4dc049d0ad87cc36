"""Every kernel lowers for CUDA, and nothing beside it touches the keys and values that it reads."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from kvjax.storage.offload.payload import HOST_MEMORY, memory_kinds
from tests.gpu import gpu_programs
from tests.gpu.gpu_programs import SLOTS, Heads, kernels, merging
from tests.support.ahead_of_time import Program
from tests.support.lowering import KERNEL, lower_for_cuda

ODD = Heads(2, 7, 80, "float16")  # no powers of 2
HEADS = [
    ODD, Heads(8, 1, 64, "bfloat16"), Heads(2, 16, 96, "bfloat16"), Heads(1, 64, 256, "float32"),
    Heads(1, 5, 6, "float32"),
]  # fmt: skip
# How many kernels a program has, and how many loops are around them; of all others, one and none.
COUNTS = {
    "decode": (2, 0), "gather": (2, 0), "quantized": (2, 0), "codebook": (2, 0),
    "rank_clusters": (2, 0), "kmeans": (3, 1), "greedy_cover": (4, 3),
}  # fmt: skip
SELECTING = "rank_clusters", "build_indices", "page_scores"
# Lines that pass an array on, also as pairs of its numbers: the same bytes, as `make aot` shows.
PASSED_ON = re.compile(
    rf"{re.escape(KERNEL)}|func\.(func|call)|^ *\S*return "
    r"|stablehlo\.(while|reshape|bitcast_convert)"
)


def first_word(program: Program) -> str:
    return re.split(r"[ ,]", program.name)[0]


def cases() -> Iterator:
    for heads in HEADS:
        for program in (*kernels(heads), *merging(heads)):
            if program.kernel is not None:
                marks = [pytest.mark.slow] * (heads is not ODD)
                yield pytest.param(program, id=program.name, marks=marks)


@pytest.mark.parametrize("program", list(cases()))
def test_a_kernel_lowers_for_cuda(program):
    name = first_word(program)
    if name == "host_rows" and HOST_MEMORY not in memory_kinds():
        pytest.skip("no host memory")
    text = lower_for_cuda(program.function, *program.args)
    calls = text.count(KERNEL) - ("attention and" in program.name)  # two kernels
    split_up = program.name.startswith("prompt's") and calls == 2  # few queries
    assert (calls - split_up, text.count("stablehlo.while")) == COUNTS.get(name, (1, 0))
    assert program.kernel in text
    assert not touched(text, program), "nothing beside the kernels reads a store"
    if name in ("quantized", "codebook"):
        dim = program.args[0].q.shape[-1]
        assert not re.search(rf"x{SLOTS}x{dim}x(bf16|f16|f32)", text), "decoded rows"
    if name in SELECTING:
        operations = set(re.findall(r"(?:stablehlo|chlo)\.(\w+)", text))
        assert operations <= {"custom_call", "reshape", "mesh", "constant"}
    if name == "kmeans":
        assert "stablehlo.dot" not in text
    if name.startswith("segment"):
        scatters = text.split('"stablehlo.scatter"')[1:]
        assert len(scatters) == 2
        assert not any("stablehlo.add" in x[:900] for x in scatters), "sums in any order"


def touched(text: str, program: Program) -> list[str]:
    """Lines that make or read a store, other than calls of kernels."""
    shapes = {f"tensor<{'x'.join(map(str, store.shape))}x" for store in program.stores}
    lines = [x for x in text.splitlines() if any(shape in x for shape in shapes)]
    return [x for x in lines if not PASSED_ON.search(x)]


@pytest.mark.parametrize("name", ["decode", "gather"])
def test_offsets_of_64_bits_lower_for_cuda(name, monkeypatch):
    monkeypatch.setattr(gpu_programs, "SLOTS", 4_200_001)
    programs = kernels(Heads(8, 4, 128, "bfloat16"))
    program = next(x for x in programs if first_word(x) == name)
    text = lower_for_cuda(program.function, *program.args)
    assert text.count(KERNEL) == 2 and not touched(text, program)


def test_rows_from_host_memory_are_filled_in_place():
    program = next(x for x in kernels(ODD) if first_word(x) == "host_rows")
    text = lower_for_cuda(program.function, *program.args)
    for store, row in ((3, 0), (4, 1)):
        alias = rf"output_tuple_indices = \[{row}\],\s*operand_index = {store}"
        assert re.search(alias, text)
