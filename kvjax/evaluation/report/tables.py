"""The tables of a comparison, as the terminal and the report show them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rich.filesize import decimal

from kvjax.evaluation.cells.results import Results, Row
from kvjax.evaluation.tasks import MEASURES
from kvjax.messages import printable

FAILED, ABSENT, AS_FULL = "failed", "absent", "as full"
"""States of a field: its cells failed, there is none, the full cache's score is in its interval."""

AT_FLOOR = "the full cache is at the floor, and methods are not ranked"
"""What is said of a task whose scores show nothing."""

DEFINITIONS = {
    "Score": "The mean over the cases of a task, times 100. The smaller figures beside it are the "
    "ends of its 95 % interval: Wilson's where a case is right or wrong, else a bootstrap's. Every "
    "method sees the same cases.",
    "Green": "The full cache's score lies in the interval.",
    "Inside, after": "The question is part of what is compressed (inside), or it is asked when the "
    "text before it has been read and compressed (after).",
    "Floor": "The lower end of the full cache's interval is less than 5 points above what needs no "
    "context. The task shows nothing of a method then, and its scores are not ranked.",
    "Δ nats": "Loss per token of held-out text minus that with the full cache, window by window. "
    "The full cache's row has the loss itself.",
    "Error": "Relative error of the attention outputs, a mean over layers.",
    "Recall": "Of the tokens with the most attention in the full cache, as many as a method looks "
    "at, the share that it looks at.",
    "Cache": "Bytes of the cache, as a share of the full cache's.",
    "Slots": "The budget as slots of a KV head, a mean over tasks.",
}
"""What the figures are, by name."""


class Field(NamedTuple):
    """One field of a table: a figure, what belongs to it, and its state, one of those above."""

    text: str
    detail: str = ""
    state: str = ""


class Column(NamedTuple):
    """A figure of all candidates.

    Args:
      heading: the task, or the figure's name.
      under: where the question stands, or "".
      fields: one per candidate.
      at_floor: whether the full cache is at the task's floor.
      prompts: how many cases there are, and how long the prompts are, or "".
    """

    heading: str
    under: str
    fields: list[Field]
    at_floor: bool = False
    prompts: str = ""


class Table(NamedTuple):
    """Everything about prompts of one length: a column per figure, a row per candidate."""

    length: int
    candidates: list[tuple[str, str]]
    columns: list[Column]


def tables(results: Results) -> list[Table]:
    """One table for each length, the full cache in the first row."""
    by_length: dict[int, dict[tuple, list[Row]]] = {}
    for panel, rows in results.panels().items():
        by_length.setdefault(panel[1], {})[panel] = rows
    return [_table(results, length, panels) for length, panels in by_length.items()]


def percent(share: float) -> str:
    """A share for people: 100 only if it is all, 99.9 if it is nearly all.

    Example:
      >>> from kvjax.evaluation.report.tables import percent
      >>> percent(0.254), percent(0.999), percent(1.0), percent(0.0001)
      ('25', '99.9', '100', '0.1')
    """
    whole = f"{100 * share:.0f}"
    if whole not in ("0", "100") or share in (0, 1):
        return whole
    return f"{min(max(100 * share, 0.1), 99.9):.1f}"


def notes(results: Results) -> list[str]:
    """What a reader must know besides the figures: what is missing, and what is at the floor."""
    said = []
    if missing := results.missing():
        said.append(f"Missing: {missing:,} rows have no cases, or fewer than others.")
    floors: dict[str, list[str]] = {}
    for task, length, question in filter(results.at_floor, results.panels()):
        floors.setdefault(panel_name(task, question), []).append(f"{length:,}")
    for name, lengths in floors.items():
        said.append(f"{name}, {', '.join(lengths)} tokens: {AT_FLOOR}.")
    return said


def panel_name(task: str, question: str | None) -> str:
    """`needle, question inside`."""
    return _label(task) if question is None else f"{_label(task)}, question {question}"


def _label(name: str) -> str:
    """A name from a file, for people: `niah_single_1` is niah single 1."""
    return printable(name.replace("_", " "), 80)


def _table(results: Results, length: int, panels: dict[tuple, list[Row]]) -> Table:
    candidates = [tuple(candidate) for candidate in results.settings["methods"]]
    all_rows = [row for rows in panels.values() for row in rows]
    by_candidate = [[row for row in all_rows if row.candidate == key] for key in candidates]
    columns = [Column("cache", "", list(map(_cache, by_candidate)))]
    for (task, _, question), rows in panels.items():
        by_key = {row.candidate: row for row in rows}
        ordered, prompts = [by_key.get(key) for key in candidates], _prompts(rows)
        if task not in MEASURES:
            columns.append(_answers(results, (task, length, question), ordered, prompts))
        elif task == "perplexity":
            columns.append(Column("Δ nats", "", _fields(ordered, _nats), prompts=prompts))
        else:
            error = _fields(ordered, lambda row: Field(f"{row.score.mean:.3f}"))
            recall = _fields(ordered, lambda row: Field(f"{percent(row.recall)}%"))
            columns.append(Column("error", "", error, prompts=prompts))
            columns.append(Column("recall", "", recall, prompts=prompts))
    columns.append(Column("slots", "", list(map(_slots, by_candidate))))
    names = [
        (printable(method), "-" if budget is None else printable(budget))
        for method, budget in candidates
    ]
    return Table(length, names, columns)


def _fields(rows: Iterable[Row | None], field: Callable[[Row], Field]) -> list[Field]:
    """The field of each row, where there is one and it did not fail."""
    absent, failed = Field("-", state=ABSENT), Field("failed", state=FAILED)
    return [
        absent if row is None else failed if row.failed is not None else field(row) for row in rows
    ]


def _answers(results: Results, panel: tuple, rows: Sequence[Row | None], prompts: str) -> Column:
    task, _, question = panel
    full = next((row.score for row in rows if row and row.method == "full"), None)
    at_floor = results.at_floor(panel)

    def score(row: Row) -> Field:
        mean, low, high = row.score[:3]
        # Rounded outwards: 100-100 would claim more certainty than 200 of 200 cases give.
        detail = f"{math.floor(100 * low)}-{math.ceil(100 * high)}"
        ranked = full is not None and row.method != "full" and not at_floor
        return Field(percent(mean), detail, AS_FULL * (ranked and low <= full.mean <= high))

    return Column(_label(task), question or "", _fields(rows, score), at_floor, prompts)


def _prompts(rows: Sequence[Row]) -> str:
    """The most cases of a row, and its tokens per prompt."""
    finished = [row for row in rows if row.score is not None]
    if not finished:
        return ""
    most = max(finished, key=lambda row: row.score.cases)
    return f"{most.score.cases:,} cases, {most.prompt_tokens:,.0f} tokens"


def _nats(row: Row) -> Field:
    if row.method == "full":
        return Field(f"{row.score.mean:.3f}", "nats")
    if row.difference is None:
        return Field("-", state=ABSENT)
    mean, low, high, _ = row.difference
    return Field(f"{mean:+.3f}", f"{low:+.2f}..{high:+.2f}", AS_FULL * (low <= 0 <= high))


def _cache(rows: Sequence[Row]) -> Field:
    """Bytes over all tasks of a length, whose prompts differ a little."""
    known = [row for row in rows if row.cache_bytes is not None]
    if not known:
        return Field("-", state=ABSENT)
    compressed = sum(row.cache_bytes or 0 for row in known)
    full = sum(row.full_cache_bytes or 0 for row in known)
    return Field(f"{compressed / full:.1%}", decimal(round(compressed / len(known))))


def _slots(rows: Sequence[Row]) -> Field:
    """A mean over all tasks of a length, whose prompts differ a little."""
    slots = [row.slots for row in rows if row.slots is not None]
    return Field(f"{statistics.fmean(slots):,.0f}") if slots else Field("-", state=ABSENT)
