"""What `device.py` writes and reads: a line of JSON for each entry that was tried."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results" / "device"
STATES = "done", "failed", "late", "left out"
"""Of an entry: it was measured, raised an error, took too long, or cannot be measured there."""

Row = dict[str, Any]


def read_rows(folder: Path = FOLDER) -> list[Row]:
    """All rows of a folder, in the order in which they were written."""
    path = folder / "records.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]  # behind the last line end is nothing whole


def latest(rows: list[Row]) -> dict[tuple[str, str], Row]:
    """Device and name of an entry → its newest row, or the newest that was measured."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = row["device"], row["entry"]
        if row["state"] == "done" or found.get(key, row)["state"] != "done":
            found[key] = row
    return found


class Record:
    """The rows of a folder, to which rows are added."""

    def __init__(self, folder: Path) -> None:
        self.path, self._lock = folder / "records.jsonl", threading.Lock()
        self.rows = read_rows(folder)
        if self.path.exists():  # a line that a kill cut short goes
            content = self.path.read_bytes()
            os.truncate(self.path, content.rfind(b"\n") + 1)

    def add(self, **row: Any) -> None:
        """Writes a row at once; it is a whole line, or none is there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
            self.rows.append(row)

    def of(self, device: str, version: str) -> dict[str, Row]:
        """Name of each entry tried on a device with a version of kvjax → its last row."""
        rows = [row for row in self.rows if (row["device"], row["kvjax"]) == (device, version)]
        return {row["entry"]: row for row in rows}
