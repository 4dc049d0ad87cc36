"""What the files of a comparison hold, checked: anybody may have written them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

from kvjax.evaluation.tasks import ANSWERS, MEASURES
from kvjax.messages import brief

from .grid import QUESTIONS, Cell

_SIZES = {"cache_bytes": Real, "full_cache_bytes": Real}
_FOUND = {  # what a finished cell of a measure holds, beside its seconds
    "perplexity": {"scores": list, "quarters": list, **_SIZES},
    "attention": {"recall": list, "error": list, "cases": Real},
}
_ANSWERS = {  # and one of a task with answers, beside `depths` and `texts`
    "scores": list, "prompt_tokens": list, "new_tokens": list, "live_slots": Real,
    "dropped": Real, **_SIZES,
}  # fmt: skip


def checked_settings(kept: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `settings.json` holds: what determines the results, and what was asked for.

    Raises:
      ValueError: something is absent, or of another kind.
    """
    settings, asked = kept.get("settings"), kept.get("asked")
    if not isinstance(settings, dict) or not isinstance(asked, dict):
        raise ValueError("it lacks settings or asked")
    kinds = {"methods": list, "tasks": dict, "lengths": list, "questions": list, "cases": int}
    for name, kind in kinds.items():
        if not isinstance(asked.get(name), kind):
            raise ValueError(
                f"{name} of asked must be {kind.__name__}, got {brief(asked.get(name))}"
            )
    _check_each("methods", asked["methods"], _is_candidate)
    _check_each("lengths", asked["lengths"], lambda one: isinstance(one, int) and one >= 1)
    _check_each("questions", asked["questions"], lambda one: one in QUESTIONS)
    _check_each("tasks", asked["tasks"].items(), _is_task)
    return settings, asked


def _check_each(name: str, values: Iterable[object], good: Callable[[Any], bool]) -> None:
    for value in values:
        if not good(value):
            raise ValueError(f"{name} of asked holds {brief(value)}")


def _is_candidate(one: object) -> bool:
    """Whether it is a method and its budget."""
    if not isinstance(one, list) or len(one) != 2 or not isinstance(one[0], str):
        return False
    return one[1] is None or _is_finite(one[1])


def _is_task(item: tuple[str, object]) -> bool:
    """Whether it is a task's name with metric and floor."""
    name, about = item
    if name not in (*ANSWERS, *MEASURES) or not isinstance(about, dict):
        return False
    floor = about.get("floor", math.nan)
    return isinstance(about.get("metric"), str) and (floor is None or _is_finite(floor))


def finished_cell(line: bytes) -> tuple[Cell, dict[str, Any]]:
    """The cell of a line of the journal, and what was found in it.

    Raises:
      ValueError, RecursionError: the line is something else.
    """
    record = json.loads(line)
    if not isinstance(record, dict) or not record.keys() >= {"cell", "found"}:
        raise ValueError("expected an object with cell and found")
    cell, found = _cell(record["cell"]), record["found"]
    if not isinstance(found, dict):
        raise ValueError(f"found must be an object, got {brief(found)}")
    _check_found(cell, found)
    return cell, found


def _check_found(cell: Cell, found: Mapping[str, Any]) -> None:
    """Raises ValueError unless it is what a cell of this task has, or the reason of a failure."""
    failed = "failed" in found
    if failed and not isinstance(found["failed"], str):
        raise ValueError(f"failed of found must be text, got {brief(found['failed'])}")
    expected = {} if failed else _FOUND.get(cell.task, _ANSWERS)
    for name, kind in {**expected, "seconds": Real}.items():
        value = found.get(name)
        each = value if isinstance(value, list) else [value]
        if not isinstance(value, kind) or not each or not all(map(_is_finite, each)):
            what = "finite numbers" if kind is list else "a finite number"
            raise ValueError(f"{name} of found must be {what}, got {brief(value)}")
        if name in ("full_cache_bytes", "cases") and value <= 0:
            raise ValueError(f"{name} of found must be above 0, got {brief(value)}")
    answers = cell.task in ANSWERS and not failed
    for name in ("depths", "scores", "texts") if answers else {"scores"} & expected.keys():
        value = found.get(name)
        if not isinstance(value, list) or len(value) != cell.stop - cell.first:
            raise ValueError(f"{name} of found must be a list with one entry per case")
    for depth in found["depths"] if answers else ():
        if depth is not None and not _is_finite(depth):
            raise ValueError(f"depths of found must be numbers or null, got {brief(depth)}")


def _cell(given: object) -> Cell:
    if not isinstance(given, list) or len(given) != len(Cell._fields):
        raise ValueError(f"cell must be a list of {len(Cell._fields)}, got {brief(given)}")
    cell = Cell(*given)
    numbers = all(isinstance(x, int) for x in (cell.length, cell.first, cell.stop))
    if (
        cell.task not in (*ANSWERS, *MEASURES)
        or cell.question not in (*QUESTIONS, None)
        or not _is_candidate([cell.method, cell.budget])
        or not numbers
        or not 0 <= cell.first < cell.stop
        or cell.length < 1
    ):
        raise ValueError(f"cell is of no comparison: {brief(given)}")
    return cell


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < math.inf
