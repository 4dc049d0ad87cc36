"""What `device.py` measures: the list of entries, the most valuable first.

A new entry is a call of `Entry`; one of a new kind is a function of `device_work.WORK` as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HOME = Path(__file__).resolve().parents[1]
LIMIT = 60.0  # seconds of an entry, compiling included

METHODS = (
    "full", "snapkv(budget=0.1)", "by_head(kvzip(budget=0.05, room=64))", "clusterkv(budget=0.05)",
    "quest(budget=0.05)", "quantize", "quantize(bits=4)", "chain(clusterkv(budget=0.05), offload)",
)  # fmt: skip
MODELS = {"KVJAX_SMOLLM2": ("SmolLM2-135M", 7936), "KVJAX_QWEN": ("Qwen2.5-Coder-0.5B", 16_384)}
MODEL_METHODS = METHODS[:4] + METHODS[5:6]
# Rooms of `tests` whose code chooses its kernels by itself; `tests/kernels` names them.
ROOMS = "storage", "cache", "attention", "generation", "transforms", "compose"
TUNED = (
    "decode_attention", "quantized_attention", "prompt_attention", "column_maxima", "column_sums",
    "gather_attention", "codebook_attention", "kmeans", "best_match",
)  # fmt: skip
# Kernels that are new and were never run; with the selections, they fit into a first run.
NEW_KERNELS = (
    (131_072, 8, "8 bits"), (8192, 1, "prompt"), (131_072, 8, "4 bits"), (32_768, 1, "prompt"),
    (32_768, 8, "8 bits"), (32_768, 8, "4 bits"), (8192, 1, "8 bits"), (8192, 1, "4 bits"),
)  # fmt: skip
KERNELS = (
    (131_072, 8, "listed"), (131_072, 8, "selection"), (8192, 1, "host"), (131_072, 8, "codebook"),
    (131_072, 8, "grouping"), (131_072, 8, "merging"), (131_072, 8, "covering"),
)  # fmt: skip
# The full cache first; Quest by the paper's bounds, too.
SELECTIONS = (
    "full", "quest(budget=0.1, spread=None)", "quest(budget=0.1)", "clusterkv(budget=0.1)",
)  # fmt: skip
SELECTED = (131_072, 1), (32_768, 8), (8192, 1), (32_768, 1), (8192, 8)


class Entry(NamedTuple):
    """Something to measure.

    Args:
      name: names it among all.
      kind: the function of `device_work.WORK` that measures it; `"tests"` is pytest's.
      options: what the function is given.
      together: whether other such entries may run at the same time: nothing is timed.
    """

    name: str
    kind: str
    options: dict[str, Any]
    together: bool = False


def entries(tiny: bool) -> list[Entry]:
    """All entries, or some of each kind at tiny sizes."""
    return list(_tiny() if tiny else _all())


def _all() -> Iterator[Entry]:
    yield Entry("rates of the device", "rates", {})
    yield from first()
    # A long context, many rows, and then what users have most often.
    yield from _models((131_072, 1), (32_768, 8))
    yield from _first_tokens((8192, 1), (32_768, 1))
    yield from tests(*ROOMS)
    for variable, (model, tokens) in MODELS.items():
        for method in MODEL_METHODS:
            options = {"variable": variable, "method": method, "tokens": tokens}
            yield Entry(f"{model}: {method}", "model", options)
    yield from _models((32_768, 1), (131_072, 8), (8192, 1), (8192, 8))
    yield from _first_tokens((8192, 8), (131_072, 1))
    for tokens, rows, group in KERNELS:
        yield kernels(tokens, rows, group)
    for operation in TUNED:
        yield Entry(f"tiles of {operation}", "tiles", {"operation": operation})
    yield answers("KVJAX_SMOLLM2", 2048, 5)


def first() -> Iterator[Entry]:
    """What is new: kernels of fewer bits and of prompts, and steps of selections."""
    (longest, *others), (large, *small) = NEW_KERNELS, SELECTED
    yield kernels(*longest)
    yield selections(*large)
    for size in others:
        yield kernels(*size)
    for size in small:
        yield selections(*size)


def selections(tokens: int, rows: int) -> Entry:
    """Steps of one layer by methods that read a selection."""
    options = {"methods": list(SELECTIONS), "tokens": tokens, "rows": rows}
    return Entry(f"selections, {tokens:,} tokens x {rows}", "selections", options)


def _models(*sizes: tuple[int, int]) -> Iterator[Entry]:
    """Decode steps of Llama's shape, and attention of one of its layers beside cuDNN's."""
    for tokens, rows in sizes:
        yield kernels(tokens, rows, "dense")
        for method in METHODS:
            yield on_shape("steps", method, tokens, rows)


def _first_tokens(*sizes: tuple[int, int]) -> Iterator[Entry]:
    """First tokens of Llama's shape."""
    for tokens, rows in sizes:
        for method in METHODS:
            yield on_shape("first token", method, tokens, rows)


def on_shape(kind: str, method: str, tokens: int, rows: int) -> Entry:
    """Steps or the first token of a model of Llama's shape."""
    options = {"method": method, "tokens": tokens, "rows": rows}
    return Entry(f"{kind}, {tokens:,} tokens x {rows}: {method}", kind, options)


def kernels(tokens: int, rows: int, group: str) -> Entry:
    """A group of `kernels.py` at a layer of Llama's shape."""
    options = {"tokens": tokens, "rows": rows, "group": group}
    return Entry(f"kernels, {tokens:,} tokens x {rows}: {group}", "kernels", options)


def tests(*rooms: str) -> Iterator[Entry]:
    """Each file of tests of some rooms."""
    for room in rooms:
        for path in sorted((HOME / "tests" / room).rglob("test_*.py")):
            yield test_file(path.relative_to(HOME).as_posix())


def test_file(path: str) -> Entry:
    """The fast tests of a file."""
    return Entry(path, "tests", {"path": path}, together=True)


def answers(variable: str, tokens: int, cases: int) -> Entry:
    """Needles that a model finds, by `kvjax eval`."""
    options = {"variable": variable, "tokens": tokens, "cases": cases}
    return Entry(f"answers of {variable}, {tokens:,} tokens", "answers", options)


def _tiny() -> Iterator[Entry]:
    yield Entry("rates of the device", "rates", {})
    yield kernels(256, 2, "dense")
    for method in (METHODS[2], METHODS[7]):
        yield on_shape("steps", method, 512, 2)
    yield on_shape("first token", METHODS[1], 512, 1)
    yield test_file("tests/storage/test_many_turns.py")
    options = {"variable": "", "method": METHODS[2], "tokens": 256}
    yield Entry(f"the bundled model: {METHODS[2]}", "model", options)
    yield kernels(256, 2, "8 bits")
    yield selections(512, 2)
    yield Entry("tiles of decode_attention", "tiles", {"operation": "decode_attention"})
    yield answers("", 256, 1)
