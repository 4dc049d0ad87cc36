"""What a comparison found: a row for each method on each task."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from kvjax.evaluation.tasks import MEASURES

from .estimates import Estimate
from .grid import Cell

_FLOOR_MARGIN = 0.05  # above a task's floor, below which the full cache has shown nothing


class Row(NamedTuple):
    """A method on one task, over all cases. None: it was not measured, or does not apply.

    Args:
      task, length, question: the prompts, as in `Unit`.
      method, budget: the candidate.
      score: mean of the scores: 0 to 1 for answers, nats per token for `perplexity`, the error for
        `attention`.
      difference: the same of its scores minus those of the full cache, case by case.
      prompt_tokens: of a prompt, question included: a mean.
      slots: the budget as slots of such a prompt, rounded down; None where the method has none.
      live_slots: that held something after the prompt: a mean over layers, rows and lists.
      cache_bytes, full_cache_bytes: of a prompt's cache, and of the full cache: means.
      dropped: tokens that found no free slot.
      depths: depth → its cases alone.
      quarters: of perplexity, nats per token of each quarter of what follows the prompt.
      recall: of attention, the mean share of the tokens with the most attention that were kept.
      layer_recall, layer_error: of attention, for each layer.
      failed: why some cases have no result, in one line; None if all have one.
    """

    task: str
    length: int
    question: str | None
    method: str
    budget: int | float | None
    score: Estimate | None = None
    difference: Estimate | None = None
    prompt_tokens: float | None = None
    slots: int | None = None
    live_slots: float | None = None
    cache_bytes: int | None = None
    full_cache_bytes: int | None = None
    dropped: int = 0
    depths: Mapping[float, Estimate] | None = None
    quarters: tuple[float, ...] | None = None
    recall: float | None = None
    layer_recall: tuple[float, ...] | None = None
    layer_error: tuple[float, ...] | None = None
    failed: str | None = None

    @property
    def candidate(self) -> tuple[str, int | float | None]:
        """Method and budget."""
        return self.method, self.budget

    @property
    def panel(self) -> tuple[str, int, str | None]:
        """Task, length and question: what rows are compared within."""
        return self.task, self.length, self.question

    @property
    def share(self) -> float | None:
        """Bytes as a share of the full cache's."""
        return None if self.cache_bytes is None else self.cache_bytes / self.full_cache_bytes


@dataclass(frozen=True)
class Results:
    """What `kvjax.evaluation.compare` found.

    Args:
      settings: everything that determines the results, and what was asked for: `methods` (pairs of
        method and budget), `tasks` (name → metric and floor), `lengths`, `questions`, `cases`.
      records: every finished or failed cell → what was measured, or `{"failed": reason}`.
    """

    settings: Mapping[str, Any]
    records: Mapping[Cell, Mapping[str, Any]]

    def failures(self) -> list[tuple[Cell, str]]:
        """The cells that failed, each with its reason in one line."""
        return [(cell, r["failed"]) for cell, r in self._current.items() if "failed" in r]

    def rows(self) -> list[Row]:
        """One row for each task, length, question, method and budget of which there are cells."""
        return list(self._rows.values())

    @cached_property
    def _groups(self) -> dict[tuple, dict[Cell, Mapping[str, Any]]]:
        """The cells of each row."""
        groups: dict[tuple, dict[Cell, Mapping[str, Any]]] = {}
        for cell, record in self.records.items():
            key = cell.task, cell.length, cell.question, cell.method, cell.budget
            groups.setdefault(key, {})[cell] = record
        return {key: _without_parts(cells) for key, cells in groups.items()}

    @cached_property
    def _current(self) -> dict[Cell, Mapping[str, Any]]:
        """The records of the cells that rows are made of, in the order of the records."""
        cells = {cell for group in self._groups.values() for cell in group}
        return {cell: record for cell, record in self.records.items() if cell in cells}

    @cached_property
    def _rows(self) -> dict[tuple, Row]:
        groups = self._groups
        return {
            key: self._row(key, groups[key], groups.get((*key[:3], "full", None), {}))
            for key in self._keys()
            if key in groups
        }

    def panels(self) -> dict[tuple[str, int, str | None], list[Row]]:
        """The rows of each task, length and question, the full cache first."""
        panels: dict[tuple, list[Row]] = {}
        for row in self.rows():
            panels.setdefault(row.panel, []).append(row)
        return panels

    def at_floor(self, panel: tuple[str, int, str | None]) -> bool:
        """Whether the full cache does no better than without the context.

        That is so where the lower end of its interval is less than 0.05 above the task's floor:
        then the task shows nothing of a method, and its rows are not ranked. Where the full cache
        has no score, nothing is known of it.
        """
        floor = self.settings["tasks"][panel[0]]["floor"]
        full = [row.score for row in self.rows() if row.panel == panel and row.method == "full"]
        if floor is None or not full or full[0] is None:
            return False
        return full[0].low < floor + _FLOOR_MARGIN

    def dropped(self) -> dict[str, int]:
        """Method and budget → tokens that were lost, where there are any."""
        dropped: Counter[str] = Counter()
        for cell, record in self._current.items():
            if lost := record.get("dropped", 0):
                dropped[cell.candidate] += lost
        return dict(dropped)

    def missing(self) -> int:
        """How many rows have no cases yet, or fewer than others of their panel."""
        most: dict[tuple, int] = {}
        for row in self.rows():
            if row.score is not None:
                most[row.panel] = max(most.get(row.panel, 0), row.score.cases)

        def is_short(key: tuple) -> bool:
            row = self._rows.get(key)
            return row is None or (row.score is not None and row.score.cases < most[row.panel])

        return sum(map(is_short, self._keys()))

    def _keys(self) -> Iterator[tuple]:
        """What rows there may be, in the order in which they are shown."""
        asked = self.settings
        for length in asked["lengths"]:
            for task in asked["tasks"]:
                for question in (None,) if task in MEASURES else asked["questions"]:
                    for method, budget in asked["methods"]:
                        yield task, length, question, method, budget

    def _row(
        self, key: tuple, cells: Mapping[Cell, Mapping[str, Any]], full: Mapping[Cell, Mapping]
    ) -> Row:
        task, length, _, _, budget = key
        reasons = [f"{cell.unit}: {r['failed']}" for cell, r in cells.items() if "failed" in r]
        failed = "; ".join(dict.fromkeys(reasons)) or None
        records = [cells[cell] for cell in sorted(cells, key=lambda cell: cell.first)]
        row = Row(*key, failed=failed)
        if failed is not None:
            return row
        tokens = [count for record in records for count in record.get("prompt_tokens", [length])]
        mean = statistics.fmean(tokens)
        slots = int(budget * mean) if isinstance(budget, float) else budget
        row = row._replace(prompt_tokens=mean, slots=slots)
        if task == "attention":
            return row._replace(**_attention(records))
        scores = _scores(cells)
        weights = [len(record["scores"]) for record in records]

        def mean_of(name: str) -> float:
            """A mean over the units, each of which counts as often as it has cases."""
            return float(np.average([record[name] for record in records], weights=weights))

        row = row._replace(
            score=Estimate.of(list(scores.values())), cache_bytes=round(mean_of("cache_bytes")),
            full_cache_bytes=round(mean_of("full_cache_bytes")),
        )  # fmt: skip
        baseline = _scores(full)
        both = [case for case in scores if case in baseline]
        if both:
            off = [scores[case] - baseline[case] for case in both]
            row = row._replace(difference=Estimate.resampled(off))
        if task == "perplexity":
            quarters = np.average([r["quarters"] for r in records], axis=0, weights=weights)
            return row._replace(quarters=tuple(map(float, quarters)))
        depths: dict[float, list[float]] = {}
        for record in records:
            for depth, score in zip(record["depths"], record["scores"], strict=True):
                if depth is not None:
                    depths.setdefault(depth, []).append(score)
        by_depth = {depth: Estimate.of(depths[depth]) for depth in sorted(depths)}
        return row._replace(
            live_slots=mean_of("live_slots"), depths=by_depth or None,
            dropped=sum(r["dropped"] for r in records),
        )  # fmt: skip


def _without_parts(cells: Mapping[Cell, Mapping[str, Any]]) -> dict[Cell, Mapping[str, Any]]:
    """The cells whose cases are not all in a larger one, which came with more cases."""

    def inside(cell: Cell, other: Cell) -> bool:
        return cell != other and other.first <= cell.first and cell.stop <= other.stop

    return {cell: cells[cell] for cell in cells if not any(inside(cell, other) for other in cells)}


def _scores(cells: Mapping[Cell, Mapping[str, Any]]) -> dict[int, float]:
    """Case number → score, of the cells that did not fail."""
    return {
        cell.first + number: score
        for cell, record in cells.items()
        for number, score in enumerate(record.get("scores", ()))
    }


def _attention(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over the units of a method."""
    weights = [r["cases"] for r in records]
    recall, error = (
        np.average([r[name] for r in records], axis=0, weights=weights)
        for name in ("recall", "error")
    )
    mean = float(error.mean())
    return {
        # The prompts are too few for an interval.
        "score": Estimate(mean, mean, mean, sum(weights)), "recall": float(recall.mean()),
        "layer_recall": tuple(map(float, recall)), "layer_error": tuple(map(float, error)),
    }  # fmt: skip
