"""The folder of a comparison: its finished cells while it runs, and its results."""

from __future__ import annotations

import contextlib
import csv
import importlib.metadata
import io
import json
import math
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import jax

from kvjax.messages import brief, printable
from kvjax.regular_files import read_json, read_regular

from .grid import Cell
from .results import CacheRow, Proportion, Results

SETTINGS, CELLS = "settings.json", "cells.jsonl"
RESULTS, TABLE, TIMINGS = "results.json", "results.csv", "timings.json"
_PACKAGES = ("kvjax", "jax", "jaxlib", "numpy")
_TIMES = ("ttft_s", "tpot_s")
_COLUMNS = (  # of `results.csv`
    "method", "budget", "length", "task", "depth", "right", "cases", "accuracy", "interval_low",
    "interval_high", "cache_bytes", "full_cache_bytes", "nll", "nll_difference",
    "perplexity_ratio", "recall", "attention_error", "failed",
)  # fmt: skip


_MOST_JOURNAL_BYTES = 2**30
_FOUND = {  # what a finished cell of each measure holds, beside its seconds; may hold `dropped`
    "retrieval": {
        "right": Real, "cases": Real, "cache_bytes": Real, "full_cache_bytes": Real,
        "ttft_s": list, "tpot_s": list,
    },
    "perplexity": {"nll": Real},
    "fidelity": {"recall": list, "error": list},
}  # fmt: skip


class Journal:
    """The finished cells of a run, one line each, so that an interrupted run can be resumed.

    Makes the folder and writes the settings. Raises ValueError if the path is no folder, cannot be
    written to, or holds something else.

    Attributes:
      finished: the cells that need not be measured again, those that did not fail.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._path = folder / CELLS
        check_folder(folder)
        _check_settings(folder, settings)
        content = b""
        if self._path.exists():
            content = read_regular(self._path, _MOST_JOURNAL_BYTES)
        # An interruption may have left a part of a line after the last line end.
        *lines, _ = content.split(b"\n")
        self.finished: dict[Cell, dict[str, Any]] = {}
        for number, line in enumerate(lines, 1):
            try:
                cell, found = _finished(line)
            except (ValueError, RecursionError) as error:
                reason = "nested too deeply" if isinstance(error, RecursionError) else error
                raise ValueError(
                    f"{printable(self._path)} is damaged in line {number} ({reason}): "
                    "remove the line or the file"
                ) from error
            if "failed" not in found:
                self.finished[cell] = found
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / SETTINGS, _dumps(settings))
        if self._path.exists():  # the next line would be added to that part
            with writing(self._path):
                os.truncate(self._path, sum(len(line) + 1 for line in lines))

    def add(self, cell: Cell, found: Mapping[str, Any]) -> None:
        """Keeps a cell; it is on the disk when this returns."""
        with writing(self._path), open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"cell": cell, "found": found}) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _finished(line: bytes) -> tuple[Cell, dict[str, Any]]:
    """The cell of a line of the journal, and what was found; ValueError where it is neither."""
    record = json.loads(line)
    if not isinstance(record, dict) or not record.keys() >= {"cell", "found"}:
        raise ValueError("expected an object with cell and found")
    given, found = record["cell"], record["found"]
    if not isinstance(given, list) or not 4 <= len(given) <= len(Cell._fields):
        raise ValueError(f"cell must be a list of up to {len(Cell._fields)}, got {brief(given)}")
    cell = Cell(*given)
    if cell.measure not in _FOUND or any(isinstance(part, list | dict) for part in given):
        raise ValueError(f"cell is of no comparison: {brief(given)}")
    if not isinstance(found, dict):
        raise ValueError(f"found must be an object, got {brief(found)}")
    expected = {} if "failed" in found else _FOUND[cell.measure]
    for name, kind in {**expected, "seconds": Real}.items():
        value = found.get(name)
        numbers = value if isinstance(value, list) else [value]
        if not isinstance(value, kind) or not all(map(_is_finite, numbers)):
            what = "finite numbers" if kind is list else "a finite number"
            raise ValueError(f"{name} of found must be {what}, got {brief(value)}")
    return cell, found


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < math.inf


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Gives an OSError the path that it lacks, such as one of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, printable(path)) from error


def check_folder(folder: Path) -> None:
    """Raises ValueError unless results can be written to a folder, without making it."""
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not above.is_dir():
        what = "it" if above == folder else above
        raise ValueError(
            f"cannot write to {printable(folder)}: {printable(what)} is not a directory"
        )
    if not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(
            f"cannot write to {printable(folder)}: no permission for {printable(above)}"
        )


def _check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    path = folder / SETTINGS
    if not path.exists():
        foreign = [name for name in (CELLS, RESULTS, TABLE, TIMINGS) if (folder / name).exists()]
        if foreign:
            raise ValueError(
                f"{printable(folder)} holds a {foreign[0]} of something else: choose another"
            )
        return
    try:
        kept = read_json(path)
    except ValueError as error:
        raise ValueError(
            f"{printable(path)} is not the settings of a comparison: {error}"
        ) from error
    asked = json.loads(_dumps(settings))
    if names := [name for name in {**asked, **kept} if kept.get(name, ...) != asked.get(name, ...)]:
        raise ValueError(
            f"{printable(folder)} holds a comparison with other {printable(', '.join(names))}: "
            "choose another folder or remove this one"
        )


def write(results: Results, folder: Path) -> None:
    """Writes `results.json`, `results.csv` and `timings.json`, each whole or not at all."""
    _replace(folder / RESULTS, _dumps(as_json(results)))
    _replace(folder / TABLE, _as_csv(results))
    _replace(folder / TIMINGS, _dumps(timings(results)))


def as_json(results: Results) -> dict[str, Any]:
    """What `results.json` holds: a function of model, text, settings and seed, without times."""
    rows = {"cells": results.rows(), "caches": results.caches(), "averages": results.averages()}
    return {"settings": _plain(results.settings)} | {
        heading: [_plain(row._asdict(), without=_TIMES) for row in found]
        for heading, found in rows.items()
    }


def timings(results: Results) -> dict[str, Any]:
    """What `timings.json` holds: times, and what they were measured on."""
    names = (*CacheRow._fields[:3], *_TIMES)
    return _plain({
        "device": jax.devices()[0].device_kind,
        "platform": jax.default_backend(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "seconds": sum(found["seconds"] for found in results.records.values()),
        "caches": [{name: getattr(row, name) for name in names} for row in results.caches()],
        "cells": [
            {**cell._asdict(), "seconds": found["seconds"]}
            for cell, found in results.records.items()
        ],
    })  # fmt: skip


def _as_csv(results: Results) -> str:
    """A line per retrieval cell, followed by the figures of its cache."""
    caches = {row[:3]: row for row in results.caches()}
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in results.rows():
        cache = caches[row[:3]]
        line = {**cache._asdict(), **row._asdict(), "failed": row.failed or cache.failed}
        del line["accuracy"]
        if found := row.accuracy:
            line |= {**found._asdict(), "accuracy": found.share}
            line["interval_low"], line["interval_high"] = found.interval
        writer.writerow(_plain(line))
    return text.getvalue()


def _plain(value: Any, without: Sequence[str] = ()) -> Any:
    """The same in dicts, with floats rounded to six decimals: further ones are noise."""
    if isinstance(value, Proportion):
        value = {**value._asdict(), "share": value.share, "interval": list(value.interval)}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items() if name not in without}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return round(value, 6) if isinstance(value, float) else value


def _dumps(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _replace(path: Path, text: str) -> None:
    """Writes a temporary file and renames it, so that a reader never sees half a file."""
    beside = path.with_name(path.name + ".part")
    with writing(path):
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
