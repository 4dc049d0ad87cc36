"""Cells of a method that has changed are measured again, and a line says so."""

from __future__ import annotations

import json
import sys
from unittest import mock

import numpy as np
import pytest

import kvjax
from kvjax import registry
from kvjax.compose import origins
from kvjax.evaluation import compare, read_results
from kvjax.models import from_pretrained, load_tokenizer
from tests.support.small_comparisons import TEXT

SMALL = {"budget": "0.5", "lengths": "192", "tasks": "needle"}
MINE = """
import dataclasses, kvjax

@dataclasses.dataclass(frozen=True)
class Mine(kvjax.StreamingLLM):
    sinks: int = 1
{body}
kvjax.register("mine", Mine)
"""


@pytest.fixture
def run(command, measured, capsys):
    """Runs the command; returns the methods whose cells were measured, and the lines about them."""

    def again(*flags: str, **changes) -> tuple[list[str], list[str]]:
        measured.clear()
        capsys.readouterr()
        assert command(*flags, **{**SMALL, **changes}) == 0
        lines = capsys.readouterr().err.splitlines()
        return [cell.method for cell in measured], [x for x in lines if "measured again" in x]

    return again


def test_a_profile_with_another_content(run, folder, tmp_path):
    heads, model = tmp_path / "heads.safetensors", from_pretrained(folder)
    method = f"by_head(kvzip, profile={str(heads)!r})"

    def save(share: float) -> None:
        table = np.array([[[share, 1.0]]])
        kvjax.save_calibration(
            heads, kvjax.ByHead(kvjax.KVzip(0.5), kvjax.kit.HeadProfile(table)), model
        )

    save(0.5)
    assert run(method=f"h2o,{method}") == (["full", "h2o", method], [])
    assert run(method=f"h2o,{method}") == ([], [])
    save(0.25)
    again, (line,) = run(method=f"h2o,{method}")
    assert again == [method]
    assert line == f"measured again: {method} 0.5 ({heads} has changed)"
    assert run(method=f"h2o,{method}") == ([], [])


def test_a_profile_that_is_not_there_is_refused_first(command, measured, capsys, tmp_path):
    assert command(**SMALL, method="by_head(kvzip, profile='nowhere')") == 2
    assert "there is no HeadProfile at nowhere" in capsys.readouterr().err
    assert not measured and not (tmp_path / "out").exists()


def test_a_method_of_ones_own_with_another_source(run, tmp_path):
    path = tmp_path / "mine.py"

    def imported(body: str) -> tuple[list[str], list[str]]:
        path.write_text(MINE.format(body=body))
        sys.modules.pop(str(path), None)
        with mock.patch.dict(registry.METHODS):
            return run("--import", str(path), method="h2o,mine")

    with mock.patch.object(sys, "dont_write_bytecode", True):
        assert imported("") == (["full", "h2o", "mine"], [])
        assert imported("") == ([], [])
        changed = imported("    minimum = property(lambda self: 3)\n")
        assert changed == (["mine"], ["measured again: mine 0.5 (its source has changed)"])
    sys.modules.pop(str(path), None)


def test_another_version_of_kvjax(run, monkeypatch, tmp_path):
    """Methods that are not asked for stay, and a note says that versions differ."""
    first = kvjax.__version__
    run(method="h2o,snapkv")
    monkeypatch.setattr(origins, "VERSION", "99.0")
    again, (line,) = run(method="h2o")
    assert again == ["full", "h2o"]
    assert line == f"measured again: full, h2o 0.5 (measured by kvjax {first}, and this is 99.0)"
    results = read_results(tmp_path / "out")
    assert results.versions() == {"99.0": ["full", "h2o 0.5"], first: ["snapkv 0.5"]}
    note = f"Measured by several versions of kvjax: 99.0 (full, h2o 0.5); {first} (snapkv 0.5)."
    assert note in (tmp_path / "out" / "report.html").read_text()
    assert run(method="h2o,snapkv")[0] == ["snapkv"]
    assert read_results(tmp_path / "out").versions() == {"99.0": ["full", "h2o 0.5", "snapkv 0.5"]}


def test_cells_that_earlier_versions_kept(run, tmp_path):
    """They are read, and measured again when a comparison goes on."""
    run()
    path = tmp_path / "out" / "cells.jsonl"
    found = read_results(tmp_path / "out").rows()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        del record["found"]["origin"]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert read_results(tmp_path / "out").rows() == found
    again, (line,) = run()
    assert len(again) == 3 and "kept by an earlier version" in line


def test_a_part_of_what_was_measured_again_is_not_mixed_with_the_rest(run, monkeypatch, tmp_path):
    """Of eight cases, four are measured again: the others are of another version."""
    run(cases=8)
    monkeypatch.setattr(origins, "VERSION", "99.0")
    run(cases=4)
    rows = {row.method: row.score.cases for row in read_results(tmp_path / "out").rows()}
    assert set(rows.values()) == {4}


def test_a_call_warns(measured, folder, monkeypatch, tmp_path):
    def call() -> None:
        compare(
            from_pretrained(folder), load_tokenizer(folder), TEXT, methods=["h2o"], budgets=[0.5],
            lengths=[192], tasks=["needle"], questions=["inside"], cases=2, out=tmp_path / "out",
        )  # fmt: skip

    call()
    monkeypatch.setattr(origins, "VERSION", "99.0")
    with pytest.warns(UserWarning, match=r"measured again: full, h2o 0.5 \(measured by") as seen:
        call()
    assert seen[0].filename == __file__
