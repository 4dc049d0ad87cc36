"""Results of comparisons that were never run: every figure follows from its cell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax.evaluation import MEASURES, Cell, Estimate, Results
from kvjax.evaluation.cells import files
from kvjax.evaluation.report import plots
from kvjax.evaluation.tasks import NATS

FULL = "full", None
LONG = "chain(kvcrush(snapkv), every(quantize(bits=4, group=64), steps=128), offload)"
CANDIDATES = [
    FULL, ("h2o", 0.25), ("h2o", 0.5), ("h2o", 32), (LONG, 0.25), (LONG, 0.5), (LONG, 32),
    ("infinigen", None),
]  # fmt: skip
CASES = 20
FAILED = Cell("needle", 256, "after", 0, CASES, "h2o", 0.5)
REASON = "ValueError: no <b>luck</b> with $this$ & that"
TASKS = ("needle", "niah_multivalue", "vt", "perplexity", "attention")
FULL_LOSS = 2.5
DEPTHS = [round(number / 9, 3) for number in range(10)]


def comparison(
    tasks: Sequence[str] = TASKS,
    lengths: Sequence[int] = (128, 256),
    candidates: Sequence[tuple[str, int | float | None]] = CANDIDATES,
    questions: Sequence[str] = ("inside", "after"),
    model: str = "SmolLM2",
) -> Results:
    """Tasks of several kinds: `vt` is at the floor, and the cell `FAILED` failed.

    A budget that is a share b of the prompt finds b of the needles with the question inside, half
    as many with the question after, and costs 0.1/b nats; its attention has the error 1 - b and the
    recall b. The full cache finds all, and so does what has no budget.
    """
    asked = {
        "model": model, "seed": 3, "methods": [list(one) for one in candidates],
        "lengths": list(lengths), "questions": list(questions), "cases": CASES,
        "tasks": {task: {"metric": _metric(task), "floor": _floor(task)} for task in tasks},
    }  # fmt: skip
    cells = [
        Cell(task, length, question, 0, CASES, method, budget)
        for task in tasks
        for length in lengths
        for question in ((None,) if task in MEASURES else questions)
        for method, budget in candidates
    ]
    return Results(asked, {cell: record(cell) for cell in cells})


def _metric(task: str) -> str:
    return NATS if task == "perplexity" else "accuracy"


def _floor(task: str) -> float | None:
    return None if task in MEASURES else 0.0


def share(cell: Cell) -> float:
    """The budget as a share of the prompt."""
    budget = cell.budget
    if budget is None:
        return 1.0
    return budget / cell.length if isinstance(budget, int) else budget


def record(cell: Cell) -> dict[str, Any]:
    """What was found in a cell."""
    if cell == FAILED:
        return {"failed": REASON, "seconds": 0.0}
    kept = share(cell)
    sizes = {
        "cache_bytes": round(1000 * kept * cell.length), "full_cache_bytes": 1000 * cell.length,
        "seconds": 0.5,
    }  # fmt: skip
    if cell.task == "perplexity":
        loss = FULL_LOSS if cell.method == "full" else FULL_LOSS + 0.1 / kept
        scores = [loss + 0.01 * (number % 2 - 0.5) * (loss - 2) for number in range(CASES)]
        return {"scores": scores, "quarters": [loss + 0.1 * n * kept for n in range(4)], **sizes}
    if cell.task == "attention":
        error = [1 - kept, (1 - kept) / 2]
        return {"recall": [kept, kept], "error": error, "cases": 4, "seconds": 0.5}
    right = round(CASES * kept / (2 if cell.question == "after" and cell.method == "h2o" else 1))
    scores = [float(number < right) for number in range(CASES)]
    if cell.task == "niah_multivalue":
        scores = [kept if number % 2 else 1.0 for number in range(CASES)]
    if cell.task == "vt":
        scores = [0.0] * CASES
    depths = [None if cell.task == "vt" else DEPTHS[n % len(DEPTHS)] for n in range(CASES)]
    return {
        "scores": scores, "depths": depths, "texts": ["7"] * CASES,
        "prompt_tokens": [cell.length] * CASES, "new_tokens": [4] * CASES,
        "live_slots": kept * cell.length, **sizes,
    }  # fmt: skip


def share_interval(right: int, cases: int) -> tuple[float, float]:
    """The interval of a share of right answers."""
    return Estimate.of([1.0] * right + [0.0] * (cases - right))[1:3]


def write_journal(results: Results, folder: Path) -> Path:
    """The folder of a comparison with these results, as a run leaves it."""
    names = ("methods", "tasks", "lengths", "questions", "cases")
    settings = {name: one for name, one in results.settings.items() if name not in names}
    journal = files.Journal(folder, settings, {name: results.settings[name] for name in names})
    for cell, found in results.records.items():
        journal.add(cell, found)
    return folder


def draw_nothing(monkeypatch) -> None:
    """Pictures take longer than all else that is written."""
    monkeypatch.setattr(plots, "figures", lambda results: {})
