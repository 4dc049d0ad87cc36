"""The folder of a comparison: its settings, its finished cells, and a table of its results."""

from __future__ import annotations

import csv
import importlib.metadata
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from kvjax.evaluation.speed.machine import environment
from kvjax.files import check_folder, read_json, read_regular, write_whole, writing

from .estimates import Estimate
from .grid import CandidateKey, Cell, Unit
from .results import Results

SETTINGS, CELLS, TABLE = "settings.json", "cells.jsonl", "results.csv"
_COLUMNS = (  # of `results.csv`
    "task", "length", "question", "method", "budget", "score", "low", "high", "cases",
    "difference", "difference_low", "difference_high", "prompt_tokens", "slots", "live_slots",
    "cache_bytes", "full_cache_bytes", "recall", "nothing", "recovery", "recovery_low",
    "recovery_high", "failed",
)  # fmt: skip
_MOST_JOURNAL_BYTES = 2**30


class Journal:
    """A file of the finished cells of a comparison, one line each, so that it can be continued.

    The constructor makes the folder and writes the settings, and the machine that measures. It
    raises ValueError if the path is not a folder, cannot be written to, or holds a comparison of
    something else.

    Args:
      folder: folder of the comparison; None writes nothing.
      settings: settings that determine a result besides its cell: model, text, seed, ...
      asked: dimensions of the wanted cells: `methods`, `tasks`, `lengths`, `questions`, `cases`.
        Those that the folder has already are added.
      prompts: hash of the prompts of each wanted unit, which is kept with the unit's cells. If data
        sets, chat templates or lists of words change, the hashes differ, and the folder is refused.
      transforms: transform with all its parameters, as text, for each method and budget, which is
        kept with their cells. If a method's defaults change, its cells are measured again.
      origins: what else the results of each method and budget depend on (`kvjax.compose.origins`),
        which is kept and compared likewise. Cells without it, which earlier versions wrote, are
        measured again.

    Attributes:
      finished: the cells that did not fail and need not be measured again.
      changed: the methods and budgets whose cells are measured again, with the reason.
    """

    def __init__(
        self,
        folder: Path | None,
        settings: Mapping[str, Any],
        asked: Mapping[str, Any],
        prompts: Mapping[Unit, str] = MappingProxyType({}),
        transforms: Mapping[CandidateKey, str] = MappingProxyType({}),
        origins: Mapping[CandidateKey, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        self.finished: dict[Cell, dict[str, Any]] = {}
        self.changed: dict[CandidateKey, str] = {}
        self._failed: dict[Cell, dict[str, Any]] = {}
        self._settings, self._path = {**settings}, None
        self._asked, self._prompts = json.loads(_dumps(asked)), prompts
        self._made_from = {"transform": transforms, "origin": origins}
        if folder is None:
            return
        check_folder(folder)
        self._path = folder / CELLS
        kept = _kept_settings(folder)
        if kept is not None:
            _check_settings(folder, kept[0], settings)
            self._asked = _joined(kept[1], self._asked)
        lines, is_cut = _journal_lines(self._path)
        # Failed cells are measured again, and so are cells of a method that has changed.
        for cell, record in _cells(self._path, lines).items():
            if "failed" in record:
                continue
            reason = _change(record, self._made_from_now(cell.key))
            if reason is None:
                self.finished[cell] = record
            else:
                self.changed[cell.key] = reason
        for cell, record in self.finished.items():
            if record.get("prompts") != prompts.get(cell.unit, record.get("prompts")):
                raise ValueError(
                    f"{folder} holds a comparison with other prompts ({cell.unit}): "
                    "choose another folder or remove this one"
                )
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        machine = {**environment(), "kvjax": importlib.metadata.version("kvjax")}
        content = {"settings": self._settings, "asked": self._asked, "machine": machine}
        write_whole(folder / SETTINGS, _dumps(content))
        if is_cut:
            # An interruption has left part of a line, to which the next one would be added.
            with writing(self._path):
                os.truncate(self._path, sum(len(line) + 1 for line in lines))

    def add(self, cell: Cell, record: dict[str, Any]) -> None:
        """Keeps a cell, and returns when it is on the disk."""
        if cell.unit in self._prompts:
            record = {**record, "prompts": self._prompts[cell.unit]}
        record = {**record, **self._made_from_now(cell.key)}
        (self._failed if "failed" in record else self.finished)[cell] = record
        if self._path is None:
            return
        with writing(self._path), open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"cell": cell, "found": _plain(record)}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _made_from_now(self, key: CandidateKey) -> dict[str, Any]:
        """Returns what is kept with the cells of a method and budget, so far as it is known."""
        return {name: values[key] for name, values in self._made_from.items() if key in values}

    def results(self) -> Results:
        """Returns the results of all cells, failed ones included, in the order of the cells."""
        return _results(self._settings, self._asked, {**self.finished, **self._failed})


def read_results(folder: str | os.PathLike[str]) -> Results:
    """Reads the results in a folder of `kvjax eval` or `compare`, finished or not.

    Args:
      folder: the folder, `out` of `kvjax.evaluation.compare`.

    Raises:
      ValueError: the folder holds no comparison, or a file is damaged.

    Example:
      >>> from kvjax.evaluation import read_results
      >>> read_results("comparison").rows()  # doctest: +SKIP
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a directory")
    kept = _kept_settings(folder)
    if kept is None:
        raise ValueError(f"{folder} holds no comparison: there is no {SETTINGS}")
    path = folder / CELLS
    return _results(*kept, _cells(path, _journal_lines(path)[0]))


def _results(
    settings: Mapping[str, Any], asked: Mapping[str, Any], records: dict[Cell, dict[str, Any]]
) -> Results:
    """Makes results whose order does not depend on the order of the measurements."""

    def text(cell: Cell) -> str:
        return json.dumps([*cell.unit, cell.method, str(cell.budget)])

    plain = {cell: _plain(record) for cell, record in records.items()}
    return Results({**settings, **asked}, {cell: plain[cell] for cell in sorted(plain, key=text)})


def _journal_lines(path: Path) -> tuple[list[bytes], bool]:
    """Reads the complete lines, and whether an interruption has left part of one after them."""
    content = read_regular(path, _MOST_JOURNAL_BYTES) if path.exists() else b""
    *lines, rest = content.split(b"\n")
    return lines, bool(rest)


def _cells(path: Path, lines: Sequence[bytes]) -> dict[Cell, dict[str, Any]]:
    """Returns every cell with its last record.

    Where a method was measured again since it had changed, its cells from before are left out.
    """
    cells: dict[Cell, dict[str, Any]] = {}
    newest: dict[CandidateKey, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            content = json.loads(line)
            cell = Cell(*content["cell"])
            cells[cell] = newest[cell.key] = {**content["found"]}
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path} is damaged in line {number}: remove the line or the file"
            ) from error
    return {cell: x for cell, x in cells.items() if _made_alike(x, newest[cell.key])}


def _made_alike(record: Mapping[str, Any], newest: Mapping[str, Any]) -> bool:
    """Returns whether a method was the same in a record and in its newest one.

    The first records of some folders lack its parameters, and count for the same method.
    """
    transform = newest.get("transform")
    same_transform = record.get("transform", transform) == transform
    return same_transform and record.get("origin") == newest.get("origin")


def _change(record: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """Returns why a record is not of the wanted method and versions; None if it is.

    Args:
      record: of a cell, from a file.
      wanted: `transform` and `origin` of its method, so far as they are known.
    """
    if "origin" in wanted:
        now, before = wanted["origin"], record.get("origin")
        if before is None:
            return "kept by an earlier version, which did not write what it had measured"
        if before["kvjax"] != now["kvjax"]:
            return f"measured by kvjax {before['kvjax']}, and this is {now['kvjax']}"
        if now["source"] is None:
            return "its source cannot be read, and may have changed"
        if before["source"] != now["source"]:
            return "its source has changed"
        files = before["files"].keys() | now["files"].keys()
        changed = [x for x in sorted(files) if before["files"].get(x) != now["files"].get(x)]
        if changed:
            return f"{', '.join(changed)} has changed"
    if "transform" in wanted and record.get("transform") != wanted["transform"]:
        return "its parameters have changed"
    return None


def _kept_settings(folder: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Reads settings and dimensions of a folder's comparison; None if there is none."""
    path = folder / SETTINGS
    if not path.exists():
        foreign = [name for name in (CELLS, TABLE) if (folder / name).exists()]
        if foreign:
            raise ValueError(f"{folder} holds a {foreign[0]} of something else: choose another")
        return None
    kept = read_json(path)
    if not kept.keys() >= {"settings", "asked"}:
        raise ValueError(f"{path} is not the settings of a comparison")
    return kept["settings"], kept["asked"]


def _check_settings(folder: Path, kept: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    wanted = json.loads(_dumps(settings))
    names = [name for name in {**wanted, **kept} if kept.get(name, ...) != wanted.get(name, ...)]
    if names:
        raise ValueError(
            f"{folder} holds a comparison with other {', '.join(names)}: "
            "choose another folder or remove this one"
        )


def _joined(kept: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Joins the dimensions of earlier calls with those of this one."""
    joined = {
        name: [*kept[name], *(value for value in asked[name] if value not in kept[name])]
        for name in ("methods", "lengths", "questions")
    }
    tasks, cases = {**kept["tasks"], **asked["tasks"]}, max(kept["cases"], asked["cases"])
    if asked["cases"] < kept["cases"]:
        # Floors of data sets are means over the cases: those of more cases stay.
        tasks |= kept["tasks"]
    joined |= {"lengths": sorted(joined["lengths"]), "tasks": tasks, "cases": cases}
    return {name: joined[name] for name in asked}


def as_json(results: Results) -> dict[str, Any]:
    """Returns the object that `--json` prints.

    It depends on model, text, settings and seed alone, and holds no times.
    """
    floors = [list(panel) for panel in results.panels() if results.at_floor(panel)]
    rows = [_plain(row._asdict()) for row in results.rows()]
    return {"settings": _plain(results.settings), "at_floor": floors, "rows": rows}


def as_csv(results: Results) -> str:
    """Returns the content of `results.csv`, a line per row."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in results.rows():
        line = row._asdict()
        for name in ("score", "difference", "recovery"):
            estimate = line[name]
            if estimate is not None:
                prefix = "" if name == "score" else f"{name}_"
                line |= {name: estimate.mean, "cases": estimate.cases}
                line |= {f"{prefix}low": estimate.low, f"{prefix}high": estimate.high}
        writer.writerow(_plain(line))
    return text.getvalue()


def _plain(value: Any) -> Any:
    """Converts a value to dicts and lists; floats get six decimals, as further ones are noise."""
    if isinstance(value, Estimate):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return round(float(value), 6) if isinstance(value, float | np.floating) else value


def _dumps(value: Any) -> str:
    # NaN is not valid JSON, and must not come into a file.
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
