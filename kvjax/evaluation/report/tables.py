"""Tables of a comparison for the terminal and the report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from rich.filesize import decimal

from kvjax.evaluation.cells.results import Results, Row
from kvjax.evaluation.tasks import MEASURES
from kvjax.messages import printable

FAILED, ABSENT, AS_FULL = "failed", "absent", "as full"
"""States of a field: its cells failed, it has no cells, or the full cache's score is in its
interval."""

AT_FLOOR = "the full cache is at the floor, and methods are not ranked"
"""Note on a task whose scores show nothing."""

LEGEND = (
    "Beside a score is its 95 % interval, in green where the full cache's score lies in it. "
    "report.html defines every figure."
)
"""Explains the figures of a table in the terminal."""

DEFINITIONS = {
    "Score": "The mean over the cases of a task, times 100. The smaller figures beside it are the "
    "ends of its 95 % interval: Wilson's where a case is right or wrong, else a bootstrap's. Every "
    "method sees the same cases.",
    "Green": "The full cache's score lies in the interval.",
    "Inside, after": "The question is compressed with the text (inside), or it is asked when the "
    "text has been read and compressed (after).",
    "Floor": "The lower end of the full cache's interval is less than 5 points above the score "
    "without any context. The task shows nothing of a method then, and its scores are not ranked.",
    "Δ nats": "Loss per token of held-out text, or of right answers to questions, minus that with "
    "the full cache, case by case. The full cache's row has the loss itself.",
    "Recovery": "The part of a document's worth that is kept: the loss of right answers without "
    "the document minus that with the method, as a share of the loss without it minus that with "
    "the full cache.",
    "Error": "Relative error of the attention outputs, a mean over layers.",
    "Recall": "The share of the tokens with the most attention in the full cache, as many as a "
    "method looks at, to which the method does look.",
    "Cache": "Bytes of the cache, as a share of the full cache's.",
    "Slots": "The budget as slots of a KV head, a mean over tasks.",
}
"""Definitions of the figures by name."""


class Field(NamedTuple):
    """A field of a table: a figure, a detail such as its interval, and its state or ""."""

    text: str
    detail: str = ""
    state: str = ""


class Column(NamedTuple):
    """A column of a table: one figure of all candidates.

    Args:
      heading: name of the task or of the figure.
      under: `"inside"` or `"after"`, the place of the question, or "".
      fields: one field per candidate.
      at_floor: whether the full cache is at the task's floor.
      prompts: number of cases and length of the prompts, or "".
    """

    heading: str
    under: str
    fields: list[Field]
    at_floor: bool = False
    prompts: str = ""


class Table(NamedTuple):
    """Table for prompts of one length: a column per figure, a row per candidate."""

    length: int
    candidates: list[tuple[str, str]]
    columns: list[Column]


def tables(results: Results) -> list[Table]:
    """Returns a table for each length, with the full cache in the first row."""
    by_length: dict[int, dict[tuple, list[Row]]] = {}
    for panel, rows in results.panels().items():
        by_length.setdefault(panel[1], {})[panel] = rows
    return [_table(results, length, panels) for length, panels in by_length.items()]


def percent(share: float) -> str:
    """Formats a share for people: 100 only for exactly 1, 99.9 for nearly 1, and likewise for 0.

    Example:
      >>> from kvjax.evaluation.report.tables import percent
      >>> percent(0.254), percent(0.999), percent(1.0), percent(0.0001)
      ('25', '99.9', '100', '0.1')
    """
    rounded = f"{100 * share:.0f}"
    if rounded not in ("0", "100") or share in (0, 1):
        return rounded
    return f"{min(max(100 * share, 0.1), 99.9):.1f}"


def missing_rows(results: Results) -> list[str]:
    """Returns a note on missing rows, if there are any."""
    missing = results.missing()
    return [f"Missing: {missing:,} rows have no cases, or fewer than others."] if missing else []


def notes(results: Results) -> list[str]:
    """Returns notes on missing rows, on versions, and on tasks whose full cache is at the floor."""
    sentences = missing_rows(results)
    if len(versions := results.versions()) > 1:
        groups = (f"{version} ({', '.join(names)})" for version, names in versions.items())
        sentences.append(f"Measured by several versions of kvjax: {printable('; '.join(groups))}.")
    floors: dict[str, list[str]] = {}
    for task, length, question in filter(results.at_floor, results.panels()):
        floors.setdefault(panel_name(task, question), []).append(f"{length:,}")
    for name, lengths in floors.items():
        sentences.append(f"{name}, {', '.join(lengths)} tokens: {AT_FLOOR}.")
    return sentences


def panel_name(task: str, question: str | None) -> str:
    """Returns a panel's name, such as `needle, question inside`."""
    return _label(task) if question is None else f"{_label(task)}, question {question}"


def _label(name: str) -> str:
    """Formats a name from a file for people: `niah_single_1` becomes niah single 1."""
    return printable(name.replace("_", " "), 80)


def _table(results: Results, length: int, panels: dict[tuple, list[Row]]) -> Table:
    candidates = [tuple(candidate) for candidate in results.settings["methods"]]
    all_rows = [row for rows in panels.values() for row in rows]
    by_candidate = [[row for row in all_rows if row.candidate == key] for key in candidates]
    columns = [Column("cache", "", list(map(_cache, by_candidate)))]
    for (task, _, question), rows in panels.items():
        by_key = {row.candidate: row for row in rows}
        ordered, prompts = [by_key.get(key) for key in candidates], _prompts(rows)
        if results.is_loss(task):
            columns += _losses(task, question, ordered, prompts)
        elif task not in MEASURES:
            columns.append(_answers(results, (task, length, question), ordered, prompts))
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
    """Returns the field of each row, or a field that says that the row is absent or failed."""
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
        ranked = row.method != "full" and not at_floor
        as_full = full is not None and ranked and low <= full.mean <= high
        return Field(percent(mean), detail, AS_FULL * as_full)

    return Column(_label(task), question or "", _fields(rows, score), at_floor, prompts)


def _losses(
    task: str, question: str | None, rows: Sequence[Row | None], prompts: str
) -> Iterator[Column]:
    """Yields the losses, and what is kept of a document's worth if there are documents."""
    # A measure without questions is the only one of its kind.
    label = "" if question is None else f"{_label(task)} "
    yield Column(f"{label}Δ nats", question or "", _fields(rows, _nats), prompts=prompts)
    if any(row is not None and row.nothing is not None for row in rows):
        heading = f"{label}recovery"
        yield Column(heading, question or "", _fields(rows, _recovery), prompts=prompts)


def _recovery(row: Row) -> Field:
    if row.recovery is None:
        return Field("-", state=ABSENT)
    mean, low, high, _ = row.recovery
    return Field(f"{100 * mean:.0f}%", f"{100 * low:.0f}..{100 * high:.0f}")


def _prompts(rows: Sequence[Row]) -> str:
    """Returns the cases and the tokens per prompt of the row with the most cases."""
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
    """Returns the bytes, averaged over all tasks of a length: their prompts differ a little."""
    known = [row for row in rows if row.cache_bytes is not None]
    if not known:
        return Field("-", state=ABSENT)
    compressed = sum(row.cache_bytes or 0 for row in known)
    full = sum(row.full_cache_bytes or 0 for row in known)
    return Field(f"{compressed / full:.1%}", decimal(round(compressed / len(known))))


def _slots(rows: Sequence[Row]) -> Field:
    """Returns the slots, averaged over all tasks of a length: their prompts differ a little."""
    slots = [row.slots for row in rows if row.slots is not None]
    return Field(f"{statistics.fmean(slots):,.0f}") if slots else Field("-", state=ABSENT)
