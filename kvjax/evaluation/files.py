"""The folder of a comparison: its finished cells while it runs, and its results."""

from __future__ import annotations

import csv
import importlib.metadata
import io
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

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
        # An interruption may have left a part of a line after the last line end.
        *lines, _ = self._path.read_bytes().split(b"\n") if self._path.exists() else [b""]
        self.finished: dict[Cell, dict[str, Any]] = {}
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                cell, found = Cell(*record["cell"]), record["found"]
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{self._path} is damaged in line {number}: remove it") from error
            if "failed" not in found:
                self.finished[cell] = found
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / SETTINGS, _dumps(settings))
        if self._path.exists():  # the next line would be added to that part
            os.truncate(self._path, sum(len(line) + 1 for line in lines))

    def add(self, cell: Cell, found: Mapping[str, Any]) -> None:
        """Keeps a cell; it is on the disk when this returns."""
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"cell": cell, "found": found}) + "\n")
            file.flush()
            os.fsync(file.fileno())


def check_folder(folder: Path) -> None:
    """Raises ValueError unless results can be written to a folder, without making it."""
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not above.is_dir():
        what = "it" if above == folder else above
        raise ValueError(f"cannot write to {folder}: {what} is not a directory")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"cannot write to {folder}: no permission for {above}")


def _check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    path = folder / SETTINGS
    if not path.exists():
        foreign = [name for name in (CELLS, RESULTS, TABLE, TIMINGS) if (folder / name).exists()]
        if foreign:
            raise ValueError(f"{folder} holds a {foreign[0]} of something else: choose another")
        return
    try:
        kept = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not the settings of a comparison") from error
    asked = json.loads(_dumps(settings))
    if names := [name for name in asked if kept.get(name) != asked[name]]:
        raise ValueError(
            f"{folder} holds a comparison with other {', '.join(names)}: "
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
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
