"""`kvjax show`, and the table of a comparison in the terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvjax.cli.compare_table import print_report
from kvjax.evaluation import Results
from tests.cli.commands import console, error, output
from tests.support.comparisons import FAILED, LONG, REASON, comparison, draw_nothing, write_journal
from tests.support.small_comparisons import results


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A finished comparison of one task, of which no picture is drawn."""
    draw_nothing(monkeypatch)
    candidates = [("full", None), ("h2o", 0.25), ("h2o", 0.5)]
    return write_journal(comparison(["needle"], [256], candidates), tmp_path / "found")


# The command


def test_a_folder_is_shown(folder, capsys):
    shown = output(capsys, "show", folder)
    words = shown.replace("\n", "")  # a long path is broken
    assert "Prompts of 256 tokens" in words and "h2o" in words and "luck" in words
    assert f"Files: {folder}/report.html".replace(" ", "") in words.replace(" ", "")
    written = {path.name for path in folder.iterdir()}
    assert written == {"settings.json", "cells.jsonl", "results.csv", "report.html"}


def test_pictures_are_drawn_in_another_folder(tmp_path, capsys):
    candidates = [("full", None), ("h2o", 0.25)]
    folder = write_journal(comparison(["perplexity"], [128], candidates), tmp_path / "found")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    out = tmp_path / "a" / "page"
    printed = output(capsys, "show", folder, "--out", out, "--json")
    assert printed.count("\n") == 1 and json.loads(printed) == results(folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert {path.name for path in out.iterdir()} == {
        "results.csv", "report.html", "perplexity_128.png",
    }  # fmt: skip


def test_an_unfinished_comparison(folder, capsys):
    path = folder / "cells.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-2]) + lines[-2][:40])
    shown = output(capsys, "show", folder)
    assert "Missing: 2 rows" in shown
    assert not path.read_bytes().endswith(b"\n"), "the journal is left alone"


def test_folders_that_cannot_be_shown(folder, tmp_path, capsys):
    assert "is not a directory" in error(capsys, "show", tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "holds no comparison" in error(capsys, "show", tmp_path / "empty")
    (tmp_path / "empty" / "cells.jsonl").write_text("")
    assert "of something else" in error(capsys, "show", tmp_path / "empty")
    said = error(capsys, "show", folder, "--out", folder / "cells.jsonl" / "page")
    assert "is not a directory" in said
    path = folder / "cells.jsonl"
    path.write_bytes(b"{}\n" + path.read_bytes())
    assert "cells.jsonl is damaged in line 1: " in error(capsys, "show", folder)
    assert not (folder / "report.html").exists()
    path.write_text("")
    assert "holds no finished cell yet" in error(capsys, "show", folder)
    (folder / "settings.json").write_text("[]")
    assert "settings.json" in error(capsys, "show", folder)


# The table


@pytest.mark.parametrize("columns", [40, 60, 80, 120, 200])
def test_the_table_fits_the_terminal(columns):
    terminal = console(columns)
    print_report(terminal, comparison(), Path("folder"))
    text = terminal.export_text()
    assert max(map(len, text.splitlines())) <= columns and "…" not in text
    for heading in ("method", "budget", "cache", "slots", "needle", "Δ nats", "recall", "error"):
        assert heading in text
    rows = [line.split() for line in text.splitlines()]
    assert ["method", "budget"] in [row[:2] for row in rows]
    for budget in ("0.25", "0.5", "32"):
        assert any(row[:2] == ["h2o", budget] for row in rows)
    (full, *_) = [row for row in rows if row[:2] == ["full", "-"]]
    assert full[2:4] == ["100.0%", "128.0"]
    assert text.count("Prompts of ") == 2
    assert "folder/report.html" in text


def test_inside_and_after_stand_side_by_side():
    terminal = console(120)
    print_report(terminal, comparison(["needle"], [256]), Path("folder"))
    rows = [line.split() for line in terminal.export_text().splitlines()]
    (quarter,) = [row for row in rows if row[:2] == ["h2o", "0.25"]]
    assert quarter[-5:] == ["25", "11-47", "10", "2-31", "64"]
    (half,) = [row for row in rows if row[:2] == ["h2o", "0.5"]]
    assert half[-4:] == ["50", "29-71", "failed", "128"]


def test_colours_and_what_is_told_below_the_table():
    terminal = console(200)
    print_report(terminal, comparison(["needle", "vt"], [256]), Path("folder"))
    lines = terminal.export_text(styles=True, clear=False).splitlines()
    (infinigen,) = [line for line in lines if "infinigen" in line]
    green = "\x1b[32m"
    assert infinigen.count(green) == 2, "needles inside and after, and not what is at the floor"
    (half,) = [line for line in lines if "h2o" in line and " 0.5" in line and "failed:" not in line]
    assert re.search(r"\x1b\[31m *failed", half) and green not in half
    text = terminal.export_text()
    assert f"failed: {FAILED}: {REASON}" in text
    assert "*: the full cache is at the floor" in text and "inside *" in text
    without = console(200)
    print_report(without, comparison(["needle"], [128]), Path("folder"))
    assert "*:" not in without.export_text()


def test_many_failures_and_strange_names():
    whole = comparison(["needle"], [128], candidates=[("full", None), (LONG + "\x1b[2J", 0.5)])
    failed = {cell: {"failed": "\x1b[31mno [red]luck", "seconds": 0.0} for cell in whole.records}
    many = {
        cell._replace(first=20 * number, stop=20 * number + 20): found
        for cell, found in failed.items()
        for number in range(3)
    }
    terminal = console(120)
    print_report(terminal, Results(whole.settings, many), Path("folder"))
    text = terminal.export_text()
    assert "\x1b" not in text and "\\x1b[31mno [red]luck" in text
    assert text.count("failed: ") == 5 and "and 7 more that failed" in text
