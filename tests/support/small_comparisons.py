"""Small comparisons: their text, what is found in their cells, and what they print and write."""

from __future__ import annotations

import json
from pathlib import Path

from kvjax.evaluation import Grid, read_results
from kvjax.evaluation.cells.files import as_json
from kvjax.evaluation.cells.grid import Cell
from kvjax.evaluation.comparison.material import Material
from kvjax.models import load_tokenizer

ARTICLE = {"document": "Old boats lie in the harbour. ", "summary": "Boats lie in harbours."}
TEXT = "The harbour master kept a ledger of everything that came in. " * 40
CANDIDATES = [("full", None), ("h2o", 0.25), ("h2o", 0.5), ("streaming_llm(budget=64)", None)]


def material_of(folder: Path, **grid) -> Material:
    """The prompts of a small grid, for the model in a folder."""
    grid = {"lengths": [192], "tasks": ["needle"], "depths": [0.5], "cases": 2, **grid}
    return Material(Grid.of(**grid), load_tokenizer(folder), TEXT)


def made_up(cell: Cell) -> dict:
    """What is found in a cell: numbers that follow from it alone."""
    count = cell.stop - cell.first
    sizes = {"cache_bytes": int(1000 * (cell.budget or 1)), "full_cache_bytes": 1000}
    if cell.task == "attention":
        return {"recall": [0.5, 1.0], "error": [0.25, 0.125], "cases": count, "seconds": 0.5}
    if cell.task == "perplexity":
        more = 0.0 if cell.method == "full" else 0.001 * cell.length / 64
        losses = [2.0 + 0.1 * number + more for number in range(cell.first, cell.stop)]
        return {"scores": losses, "quarters": [1.0, 2.0, 3.0, 4.0], **sizes, "seconds": 0.25}
    share = 1.0 if cell.method == "full" else min(cell.budget or 0.0, 1.0)
    numbers = range(cell.first, cell.stop)
    return {
        "scores": [float((number % 4) < round(4 * share)) for number in numbers],
        "depths": [float(number % 2) for number in numbers],
        "texts": [f" {number}" for number in numbers], "prompt_tokens": [cell.length] * count,
        "new_tokens": [2] * count, "live_slots": 10.0, **sizes, "seconds": 0.125,
    }  # fmt: skip


def one_line(capsys) -> str:
    """The line of an error, where that is all that was printed."""
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("kvjax: error: ") and err.count("\n") == 1, (out, err)
    return err


def results(path: Path) -> dict:
    """Settings and rows of a folder's comparison."""
    return json.loads(json.dumps(as_json(read_results(path))))
