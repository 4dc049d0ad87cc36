"""Files of a comparison that are damaged, and a disk that is full."""

from __future__ import annotations

import json
import os

import pytest

from kvjax.evaluation.cells import files
from kvjax.evaluation.cells.grid import Cell

CELL = Cell("perplexity", 192, None, 0, 2, "full", None)
FOUND = {
    "scores": [2.0, 3.0], "quarters": [1.0, 2.0, 3.0, 4.0], "cache_bytes": 5,
    "full_cache_bytes": 5, "seconds": 0.1,
}  # fmt: skip
ASKED = {
    "methods": [["full", None]],
    "tasks": {"perplexity": {"metric": "nats per token", "floor": None}},
    "lengths": [192], "questions": ["inside"], "cases": 2,
}  # fmt: skip
DAMAGED = {
    "cut": b'{"cell": ["perplexity", 192, nu',
    "no text": b"\xff",
    "empty": b"{}",
    "cell": json.dumps({"cell": 5, "found": FOUND}).encode(),
    "nested cell": json.dumps({"cell": [*CELL[:5], [], None], "found": FOUND}).encode(),
    "found": json.dumps({"cell": CELL, "found": 5}).encode(),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_journal(damage, tmp_path):
    settings = {"seed": 0}
    files.Journal(tmp_path, settings, ASKED).add(CELL, FOUND)
    assert files.Journal(tmp_path, settings, ASKED).finished == {CELL: FOUND}
    path = tmp_path / "cells.jsonl"
    path.write_bytes(path.read_bytes() + DAMAGED[damage] + b"\n" + path.read_bytes())
    with pytest.raises(ValueError, match=r"cells\.jsonl is damaged in line 2: remove the line"):
        files.Journal(tmp_path, settings, ASKED)


@pytest.mark.parametrize(
    ("broken", "name"), [("fsync", "cells.jsonl"), ("replace", "settings.json")]
)
def test_a_full_disk_names_the_file(monkeypatch, tmp_path, broken, name):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, full)
    with pytest.raises(OSError, match=rf"No space left on device: '.*{name}'"):
        files.Journal(tmp_path, {}, ASKED).add(CELL, FOUND)


def test_a_method_with_other_parameters_is_measured_again(tmp_path):
    def journal(transform: str) -> files.Journal:
        return files.Journal(tmp_path, {"seed": 0}, ASKED, transforms={CELL.key: transform})

    journal("Quest(page=16)").add(CELL, FOUND)
    assert journal("Quest(page=16)").finished == {CELL: {**FOUND, "transform": "Quest(page=16)"}}
    assert not journal("Quest(page=8)").finished
    journal("Quest(page=8)").add(CELL, {**FOUND, "seconds": 0.2})
    assert not journal("Quest(page=16)").finished
    assert journal("Quest(page=8)").finished[CELL]["seconds"] == 0.2


def test_fewer_cases_leave_a_floor_as_it_is(tmp_path):
    def floor_after(floor: float, cases: int) -> float:
        about = {"metric": "ROUGE-L", "floor": floor}
        asked = {**ASKED, "tasks": {"multi_news": about}, "cases": cases}
        return files.Journal(tmp_path, {}, asked).results().settings["tasks"]["multi_news"]["floor"]

    assert floor_after(0.08, cases=5) == 0.08
    assert floor_after(0.1, cases=50) == 0.1
    assert floor_after(0.0, cases=1) == 0.1
