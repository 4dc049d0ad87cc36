"""The folder of a comparison: its finished cells while it runs, and its results."""

from __future__ import annotations

import csv
import importlib.metadata
import io
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from .grid import Cell
from .results import CacheRow, Proportion, Results

SETTINGS, CELLS = "settings.json", "cells.jsonl"
RESULTS, TABLE, TIMINGS = "results.json", "results.csv", "timings.json"
_PACKAGES = ("kvjax", "jax", "jaxlib", "numpy")
_TIMES = ("ttft_s", "tpot_s")
_CACHE_COLUMNS = ("nll", "nll_difference", "perplexity_ratio", "recall", "attention_error")


class Journal:
    """The finished cells of a run, one line each, so that an interrupted run can be resumed.

    Args:
      folder: where; it need not exist yet.
      settings: of the run.

    Raises:
      ValueError: the path is no folder, cannot be written to, or holds something else.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder, self._settings = folder, settings
        check_folder(folder)
        _check_settings(folder, settings)

    def finished(self) -> dict[Cell, dict[str, Any]]:
        """The cells that need not be measured again: those that did not fail."""
        path = self.folder / CELLS
        lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
        records = {}
        # An interruption may have left a part of a line after the last line end.
        for number, line in enumerate(lines[:-1], 1):
            try:
                record = json.loads(line)
                records[Cell(*record["cell"])] = record["found"]
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path} is damaged in line {number}: remove it") from error
        return {cell: found for cell, found in records.items() if "failed" not in found}

    def open(self) -> Journal:
        """Makes the folder and writes the settings, unless they are there already."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / SETTINGS).exists():
            _replace(self.folder / SETTINGS, _dumps(self._settings))
        path = self.folder / CELLS
        if path.exists():  # cuts off a part of a line, or the next one would be added to it
            whole = path.read_bytes()
            os.truncate(path, whole.rfind(b"\n") + 1)
        return self

    def add(self, cell: Cell, found: Mapping[str, Any]) -> None:
        """Keeps a cell; it is on the disk when this returns."""
        with open(self.folder / CELLS, "a", encoding="utf-8") as file:
            file.write(json.dumps({"cell": cell, "found": found}) + "\n")
            file.flush()
            os.fsync(file.fileno())


def check_folder(folder: Path) -> None:
    """Raises ValueError unless results can be written to a folder, without making it."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"cannot write to {folder}: it is not a directory")
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not above.is_dir():
        raise ValueError(f"cannot write to {folder}: {above} is not a directory")
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
        kept = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not the settings of a comparison") from error
    asked = json.loads(_dumps(settings))
    if kept != asked:
        names = [
            name for name in asked if not isinstance(kept, dict) or kept.get(name) != asked[name]
        ]
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
    return _rounded({
        "settings": dict(results.settings),
        "cells": [
            {**row._asdict(), "accuracy": _share(row.accuracy)} for row in results.rows()
        ],
        "caches": [_without_times(row) for row in results.caches()],
        "averages": [
            {
                **_without_times(row),
                "accuracy": {task: _share(found) for task, found in row.accuracy.items()},
            }
            for row in results.averages()
        ],
    })  # fmt: skip


def timings(results: Results) -> dict[str, Any]:
    """What `timings.json` holds: times, and what they were measured on."""
    names = (*CacheRow._fields[:3], *_TIMES)
    return _rounded({
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
    lines = []
    for row in results.rows():
        cache = caches[row[:3]]
        right, cases = row.accuracy or (None, None)
        low, high = row.accuracy.interval if row.accuracy else (None, None)
        lines.append({
            **dict(zip(row._fields[:5], row, strict=False)),
            "right": right,
            "cases": cases,
            "accuracy": row.accuracy and row.accuracy.share,
            "interval_low": low,
            "interval_high": high,
            "cache_bytes": row.cache_bytes,
            "full_cache_bytes": row.full_cache_bytes,
            **{name: getattr(cache, name) for name in _CACHE_COLUMNS},
            "failed": row.failed or cache.failed,
        })  # fmt: skip
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(_rounded(lines))
    return text.getvalue()


def _share(found: Proportion | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {**found._asdict(), "share": found.share, "interval": list(found.interval)}


def _without_times(row) -> dict[str, Any]:
    return {name: value for name, value in row._asdict().items() if name not in _TIMES}


def _rounded(value: Any) -> Any:
    """The same with floats rounded to six decimals; further ones are noise."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _dumps(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _replace(path: Path, text: str) -> None:
    """Writes a temporary file and renames it, so that a reader never sees half a file."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
