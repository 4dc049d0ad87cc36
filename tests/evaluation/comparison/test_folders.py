"""Folders of comparisons: what is written, how they go on and grow, and cells that fail."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from kvjax.cli.main import main
from kvjax.evaluation.comparison.compare import _Measure
from tests.support.comparisons import share_interval
from tests.support.small_comparisons import ARTICLE, CANDIDATES, results

KEY = ("task", "length", "question", "method", "budget")
CSV_KEY = ["needle", "256", "inside", "h2o", "0.5"]


def test_files(command, measured, tmp_path, capsys):
    assert command() == 0
    out = tmp_path / "out"
    found = results(out)
    assert found["settings"]["methods"] == [list(one) for one in CANDIDATES]
    assert found["settings"]["tasks"]["needle"] == {"metric": "accuracy", "floor": 0.0}
    assert found["at_floor"] == []
    assert len(found["rows"]) == 2 * 3 * 4
    rows = {tuple(row[name] for name in KEY): row for row in found["rows"]}
    row = rows["needle", 256, "inside", "h2o", 0.5]
    low, high = share_interval(2, 4)
    assert row["score"] == {"mean": 0.5, "low": round(low, 6), "high": round(high, 6), "cases": 4}
    assert row["difference"]["mean"] == -0.5 and row["slots"] == 128
    assert set(row["depths"]) == {"0.0", "1.0"} and row["depths"]["0.0"]["cases"] == 2
    assert (row["cache_bytes"], row["full_cache_bytes"]) == (500, 1000)
    row = rows["perplexity", 192, None, "h2o", 0.25]
    assert row["difference"]["mean"] == pytest.approx(0.003) and row["quarters"] == [1, 2, 3, 4]
    assert row["score"]["mean"] == pytest.approx(2.153)
    row = rows["attention", 192, None, "h2o", 0.25]
    assert row["recall"] == 0.75 and row["score"]["mean"] == 0.1875
    with open(out / "results.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(found["rows"])
    (line,) = [x for x in lines if [x[name] for name in KEY] == CSV_KEY]
    shown = [line[name] for name in ("score", "cases", "cache_bytes", "failed")]
    assert shown == ["0.5", "4", "500", ""]
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_json_on_the_command_line(command, measured, tmp_path, capsys):
    assert command("--json") == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert err == "" and out.count("\n") == 1
    assert record.pop("out") == str(tmp_path / "out")
    assert results(tmp_path / "out").items() <= record.items()


def test_eval_is_the_same_with_tasks_of_ones_own(folder, text, measured, tmp_path):
    command = [
        "eval", "needle", "perplexity", "--model", folder, "--text", text, "--method", "h2o",
        "--budget", "0.5", "--lengths", "192", "--question", "after", "--cases", "3", "--out",
        tmp_path / "eval",
    ]  # fmt: skip
    assert main(list(map(str, command))) == 0
    cells = [(cell.task, cell.question, cell.stop) for cell in measured]
    assert cells == [("needle", "after", 3)] * 2 + [("perplexity", None, 3)] * 2


def test_going_on_after_an_interruption(command, measured, monkeypatch, tmp_path, capsys):
    """The sixth cell does not come back, and half a line of the next one is written."""
    options, whole = {"cases": 8}, _Measure.unit

    def interrupted(self, unit, candidates):
        for found in whole(self, unit, candidates):
            if len(measured) == 6:
                raise KeyboardInterrupt
            yield found

    assert command(out=tmp_path / "whole", **options) == 0
    every = list(measured)
    assert len(every) == 2 * 4 * (2 + 2 + 1)
    measured.clear()
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(_Measure, "unit", interrupted)
        assert command(**options) == 130
    assert capsys.readouterr().out == ""
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} <= {"settings.json", "cells.jsonl"}
    with open(out / "cells.jsonl", "ab") as file:
        file.write(b'{"cell": ["nee')
    before = list(measured)
    measured.clear()
    assert command(**options) == 0
    assert before[-1] == measured[0], "the cell that was interrupted is measured again"
    assert before[:-1] + measured == every, "and no other"
    assert results(out) == results(tmp_path / "whole")
    measured.clear()
    assert command(**options) == 0 and measured == [], "nothing is left to do"


@pytest.mark.exhaustive  # minutes
@pytest.mark.skipif(os.name != "posix", reason="a process is killed by a signal")
def test_killed_at_any_moment(folder, text, tmp_path):
    """Nothing is replaced: a run that is killed again and again ends in the same bytes."""
    line = [
        sys.executable, "-m", "kvjax.cli.main", "compare", "--model", folder, "--text", text,
        "--method", "h2o,quest(page=8)", "--budget", "0.25,0.5", "--lengths", "192",
        "--depths", "0,1", "--tasks", "needle,perplexity,attention", "--cases", "20",
    ]  # fmt: skip
    line = list(map(str, line))
    start = time.monotonic()
    assert subprocess.run([*line, "--out", tmp_path / "whole"], capture_output=True).returncode == 0
    whole, kills = time.monotonic() - start, 0
    rng, path = random.Random(7), tmp_path / "out" / "cells.jsonl"
    for _ in range(5):
        process = subprocess.Popen([*line, "--out", tmp_path / "out"], stdout=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.3, 1.0) * whole)
        kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert kills, "no run was killed"
    assert path.exists(), "no kill came after the first cell"
    subprocess.run([*line, "--out", tmp_path / "out"], check=True, capture_output=True)
    assert results(tmp_path / "out") == results(tmp_path / "whole")


def test_a_comparison_grows(command, measured, tmp_path, capsys):
    """More methods, budgets, lengths, tasks, questions and cases: only what is missing is done."""
    assert command() == 0
    everything = set(measured)
    changes = [
        {"method": "h2o,snapkv(window=8)"}, {"budget": "0.25,0.75"}, {"lengths": "320"},
        {"tasks": "chain", "lengths": "320"}, {"question": "after"}, {"cases": 12}, {"cases": 13},
    ]  # fmt: skip
    for change in changes:
        measured.clear()
        assert command(**change) == 0
        assert measured and not everything & set(measured), "nothing is measured twice"
        everything |= set(measured)
    found = results(tmp_path / "out")
    settings = found["settings"]
    assert settings["lengths"] == [192, 256, 320] and settings["cases"] == 13
    assert settings["questions"] == ["inside", "after"]
    assert list(settings["tasks"]) == ["needle", "perplexity", "attention", "chain"]
    assert [tuple(one) for one in settings["methods"]] == [
        *CANDIDATES, ("snapkv(window=8)", 0.25), ("snapkv(window=8)", 0.5), ("h2o", 0.75),
    ]  # fmt: skip
    rows = {tuple(row[name] for name in KEY): row for row in found["rows"]}
    one = rows["needle", 192, "inside", "h2o", 0.5]
    # Cases 1 to 4 came first, then 5 to 8 and 9 to 12, then the 13th.
    assert one["score"]["cases"] == 13 and one["score"]["mean"] == pytest.approx(7 / 13, abs=1e-6)
    assert sum(depth["cases"] for depth in one["depths"].values()) == 13
    measured.clear()
    assert command() == 0 and measured == [], "the first command has nothing to do"
    assert results(tmp_path / "out") == found


def test_data_sets_need_no_text(command, measured, tmp_path):
    (tmp_path / "text.txt").write_text("Too short.")
    (tmp_path / "xsum.jsonl").write_text(json.dumps(ARTICLE))
    options = {"text": tmp_path / "text.txt", "data": tmp_path, "tasks": "xsum", "cases": 1}
    assert command(**options) == 0 and len(measured) == 2 * len(CANDIDATES)


def test_a_failed_cell(command, measured, monkeypatch, tmp_path, capsys):
    assert command(out=tmp_path / "whole") == 0
    capsys.readouterr()
    unit = _Measure.unit

    def failing(self, given, candidates):
        for one, found in unit(self, given, candidates):
            if (one.budget, given.length) == (0.5, 192) and given.task != "perplexity":
                found = {"failed": "RuntimeError: no luck", "seconds": 0.0}
            yield one, found

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(_Measure, "unit", failing)
        assert command() == 1
    said = capsys.readouterr().out
    assert "h2o 0.5" in said and "RuntimeError: no luck" in said and "more that failed" not in said
    found = results(out)
    failed = [row for row in found["rows"] if row["failed"]]
    assert [(row["task"], row["length"], row["budget"]) for row in failed] == [
        ("needle", 192, 0.5), ("attention", 192, 0.5),
    ]  # fmt: skip
    assert all(row["score"] is None and "no luck" in row["failed"] for row in failed)
    with open(out / "results.csv", newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["failed"]]
    assert [line["score"] for line in lines] == ["", ""]

    measured.clear()
    assert command() == 0, "failed cells are tried again"
    assert {(cell.task, cell.budget, cell.length) for cell in measured} == {
        ("needle", 0.5, 192), ("attention", 0.5, 192),
    }  # fmt: skip
    assert len(measured) == 2
    assert results(out) == results(tmp_path / "whole")
