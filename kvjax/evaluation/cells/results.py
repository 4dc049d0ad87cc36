"""Results of a comparison: a row for each method on each task."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from kvjax.evaluation.tasks import MEASURES, NATS
from pallas_kernels.base.annotations import NoneElsewhere

from .estimates import Estimate
from .grid import Cell

# A full cache whose score is less than this above the task's floor has shown nothing.
_FLOOR_MARGIN = 0.05


class Row(NamedTuple):
    """Figures of a method on one task, over all cases. None: not measured, or not applicable.

    `Results.rows` makes the rows.

    Args:
      task, length, question: the prompts, as in `Unit`.
      method, budget: the candidate.
      score: mean score: 0 to 1 for answers, nats per token for `perplexity` and `squad`, the error
        for `attention`.
      difference: mean of the scores minus those of the full cache, case by case.
      prompt_tokens: mean tokens of a prompt, question included.
      slots: the budget as slots of a prompt of mean length, rounded down; None if the method has no
        budget.
      live_slots: slots in use after the prompt, a mean over layers, rows and lists.
      cache_bytes, full_cache_bytes: mean bytes of a prompt's cache at rest, and of its full cache.
      depths: estimate of the score at each depth.
      nothing: mean score without the document, for `squad`.
      recovery: share of the document's worth that is kept, for `squad`: `nothing` minus the score,
        divided by `nothing` minus the full cache's score. None if the document is worth nothing.
      quarters: nats per token of each quarter of the continuation, for `perplexity`.
      recall: mean share of the most attended tokens that were kept, for `attention`.
      layer_recall, layer_error: recall and error of each layer, for `attention`.
      failed: reason why some cases have no result, in one line; None if all have one.

    Example:
      >>> from kvjax.evaluation import Estimate, Row
      >>> row = Row("needle", 512, "inside", "snapkv", 0.25, score=Estimate.of([1.0, 0.0]),
      ...           cache_bytes=256, full_cache_bytes=1024)
      >>> row.candidate, row.score.mean, row.share
      (('snapkv', 0.25), 0.5, 0.25)
    """

    task: str
    length: int
    question: str | None
    method: str
    budget: int | float | None
    score: Estimate | NoneElsewhere = None
    difference: Estimate | NoneElsewhere = None
    prompt_tokens: float | None = None
    slots: int | None = None
    live_slots: float | None = None
    cache_bytes: int | None = None
    full_cache_bytes: int | None = None
    depths: Mapping[float, Estimate] | None = None
    nothing: float | None = None
    recovery: Estimate | None = None
    quarters: tuple[float, ...] | None = None
    recall: float | NoneElsewhere = None
    layer_recall: tuple[float, ...] | None = None
    layer_error: tuple[float, ...] | None = None
    failed: str | None = None

    @property
    def candidate(self) -> tuple[str, int | float | None]:
        """Method and budget."""
        return self.method, self.budget

    @property
    def panel(self) -> tuple[str, int, str | None]:
        """Task, length and question; rows with an equal panel are compared."""
        return self.task, self.length, self.question

    @property
    def share(self) -> float | None:
        """Bytes of the cache as a share of the full cache's."""
        return None if self.cache_bytes is None else self.cache_bytes / self.full_cache_bytes  # pyright: ignore[reportOperatorIssue]  # measured with it


@dataclass(frozen=True)
class Results:
    """Results of `kvjax.evaluation.compare`; `read_results` reads those of a folder.

    Args:
      settings: everything that determines the results, and the dimensions of the grid: `methods`
        (pairs of method and budget), `tasks` (metric and floor by name), `lengths`, `questions`,
        `cases`.
      records: measurements of every finished cell, and `{"failed": reason}` of every failed one.

    Example:
      >>> from kvjax.evaluation import Cell, Results
      >>> settings = {"methods": [("full", None), ("h2o", 0.1)], "lengths": [512], "cases": 2,
      ...             "tasks": {"needle": {"metric": "accuracy", "floor": 0.0}},
      ...             "questions": ["inside"]}
      >>> full, h2o = (Cell("needle", 512, "inside", 0, 2, *x) for x in settings["methods"])
      >>> record = {"scores": [1.0, 1.0], "depths": [0.0, 0.5], "live_slots": 512.0,
      ...           "cache_bytes": 1024, "full_cache_bytes": 1024}
      >>> results = Results(
      ...     settings, {full: record, h2o: record | {"scores": [1.0, 0.0], "cache_bytes": 128}})
      >>> [(row.method, row.score.mean, row.share) for row in results.rows()]
      [('full', 1.0, 1.0), ('h2o', 0.5, 0.125)]
    """

    settings: Mapping[str, Any]
    records: Mapping[Cell, Mapping[str, Any]]

    def failures(self) -> list[tuple[Cell, str]]:
        """Returns the cells that failed, each with its reason in one line."""
        return [(cell, r["failed"]) for cell, r in self._current.items() if "failed" in r]

    def rows(self) -> list[Row]:
        """Returns a row for each task, length, question, method and budget that has cells."""
        return list(self._rows.values())

    @cached_property
    def _groups(self) -> dict[tuple, dict[Cell, Mapping[str, Any]]]:
        """Cells of each row."""
        groups: dict[tuple, dict[Cell, Mapping[str, Any]]] = {}
        for cell, record in self.records.items():
            key = cell.task, cell.length, cell.question, cell.method, cell.budget
            groups.setdefault(key, {})[cell] = record
        return {key: _without_parts(cells) for key, cells in groups.items()}

    @cached_property
    def _current(self) -> dict[Cell, Mapping[str, Any]]:
        """Records of the cells that rows are made of, in their original order."""
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
        """Returns the rows of each task, length and question, the full cache first."""
        panels: dict[tuple, list[Row]] = {}
        for row in self.rows():
            panels.setdefault(row.panel, []).append(row)
        return panels

    def is_loss(self, task: str) -> bool:
        """Returns whether the scores of a task are losses, in nats per token."""
        return self.settings["tasks"][task]["metric"] == NATS

    def at_floor(self, panel: tuple[str, int, str | None]) -> bool:
        """Returns whether the full cache does no better than without the context.

        That is so if the lower end of its interval is less than 0.05 above the task's floor. The
        task then shows nothing of a method, and its rows are not ranked. The result is False if the
        task has no floor or the full cache has no score.
        """
        floor = self.settings["tasks"][panel[0]]["floor"]
        full = [row.score for row in self.rows() if row.panel == panel and row.method == "full"]
        if floor is None or not full or full[0] is None:
            return False
        return full[0].low < floor + _FLOOR_MARGIN

    def versions(self) -> dict[str, list[str]]:
        """Returns the methods and budgets that each version of kvjax has measured.

        Cells that were kept before their version was written count for `"an earlier version"`.
        """
        by_version: dict[str, dict[str, None]] = {}
        for cell, record in self._current.items():
            version = record.get("origin", {}).get("kvjax", "an earlier version")
            by_version.setdefault(version, {})[cell.candidate] = None
        return {version: list(names) for version, names in by_version.items()}

    def missing(self) -> int:
        """Returns the number of rows with no cases yet, or fewer than others of their panel."""
        most: dict[tuple, int] = {}
        for row in self.rows():
            if row.score is not None:
                most[row.panel] = max(most.get(row.panel, 0), row.score.cases)

        def is_short(key: tuple) -> bool:
            row = self._rows.get(key)
            return row is None or (row.score is not None and row.score.cases < most[row.panel])

        return sum(map(is_short, self._keys()))

    def _keys(self) -> Iterator[tuple]:
        """Yields the keys of all possible rows in display order."""
        grid = self.settings
        for length in grid["lengths"]:
            for task in grid["tasks"]:
                for question in (None,) if task in MEASURES else grid["questions"]:
                    for method, budget in grid["methods"]:
                        yield task, length, question, method, budget

    def _row(
        self, key: tuple, cells: Mapping[Cell, Mapping[str, Any]], full: Mapping[Cell, Mapping]
    ) -> Row:
        """Makes a row of its cells and of the full cache's cells for the same prompts."""
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
        scores = _by_case(cells, "scores")
        weights = [len(record["scores"]) for record in records]

        def mean_of(name: str) -> float:
            """Returns a mean over the units, weighted by their numbers of cases."""
            return float(np.average([record[name] for record in records], weights=weights))

        row = row._replace(
            score=Estimate.of(list(scores.values())), cache_bytes=round(mean_of("cache_bytes")),
            full_cache_bytes=round(mean_of("full_cache_bytes")),
        )  # fmt: skip
        if "nothing" in records[0]:
            return row._replace(live_slots=mean_of("live_slots"), **_of_passages(cells, full))
        baseline = _by_case(full, "scores")
        shared_cases = [case for case in scores if case in baseline]
        if shared_cases:
            differences = [scores[case] - baseline[case] for case in shared_cases]
            # Differences may be -1, so that Wilson's interval does not apply.
            row = row._replace(difference=Estimate.resampled(differences))
        if task == "perplexity":
            quarters = np.average([r["quarters"] for r in records], axis=0, weights=weights)
            return row._replace(quarters=tuple(map(float, quarters)))
        depths: dict[float, list[float]] = {}
        for record in records:
            for depth, score in zip(record["depths"], record["scores"], strict=True):
                if depth is not None:
                    depths.setdefault(depth, []).append(score)
        by_depth = {depth: Estimate.of(depths[depth]) for depth in sorted(depths)}
        return row._replace(live_slots=mean_of("live_slots"), depths=by_depth or None)


def _without_parts(cells: Mapping[Cell, Mapping[str, Any]]) -> dict[Cell, Mapping[str, Any]]:
    """Returns the cells that are not part of a larger one.

    Such a part remains in a folder if a later call with more cases measured the larger cell.
    """

    def inside(cell: Cell, larger: Cell) -> bool:
        return cell != larger and larger.first <= cell.first and cell.stop <= larger.stop

    return {
        cell: cells[cell] for cell in cells if not any(inside(cell, larger) for larger in cells)
    }


def _by_case(cells: Mapping[Cell, Mapping[str, Any]], name: str) -> dict[int, Any]:
    """Returns what cells have for each case, by case number; cells that failed have nothing."""
    return {
        cell.first + number: value
        for cell, record in cells.items()
        for number, value in enumerate(record.get(name, ()))
    }


def _of_passages(
    cells: Mapping[Cell, Mapping[str, Any]], full: Mapping[Cell, Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns a row's figures of the losses of right answers to questions about passages."""
    losses, full_losses = _by_case(cells, "scores"), _by_case(full, "scores")
    nothing, passages = _by_case(cells, "nothing"), _by_case(cells, "passages")
    figures: dict[str, Any] = {
        "score": Estimate.resampled(list(losses.values()), [passages[case] for case in losses]),
        "nothing": statistics.fmean(nothing.values()),
    }
    cases = [case for case in losses if case in full_losses]
    if cases:
        groups = [passages[case] for case in cases]
        more = [losses[case] - full_losses[case] for case in cases]
        figures["difference"] = Estimate.resampled(more, groups)
        kept = [nothing[case] - losses[case] for case in cases]
        worth = [nothing[case] - full_losses[case] for case in cases]
        if sum(worth) > 0:
            figures["recovery"] = Estimate.ratio(kept, worth, groups)
    return figures


def _attention(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns recall and error as means over the units of a method."""
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
