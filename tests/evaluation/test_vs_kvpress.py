"""The parts of the comparison with kvpress that need neither kvpress nor a model."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

import kvjax

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
GIVEN = ["--model", "folder", "--text", "text.txt"]


@pytest.fixture(scope="module")
def modules():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield {name: importlib.import_module(name) for name in ("vs_kvpress", "quiet")}


@pytest.fixture(scope="module")
def vs_kvpress(modules):
    return modules["vs_kvpress"]


@pytest.fixture(scope="module")
def quiet(modules):
    return modules["quiet"]


@pytest.mark.parametrize("name", ("vs_kvpress", "quiet"))
def test_examples(modules, name):
    found = doctest.testmod(modules[name])
    assert found.attempted and not found.failed


def test_equal_positions(vs_kvpress):
    positions, scores = [[[0, 2], [1, 2]]], [[[3.0, 1.0, 2.0], [0.0, 5.0, 4.0]]]
    assert vs_kvpress.compare_positions(positions, positions, scores) == {
        "lists": 2, "equal": 2, "contained": 2, "common": 1.0, "gap": 0.0,
    }  # fmt: skip


def test_a_near_tie_has_a_small_gap(vs_kvpress):
    theirs, ours = [[[0, 1], [0, 2]]], [[[0, 2], [0, 2]]]
    scores = [[[9.0, 4.0, 3.0], [9.0, 1.0, 2.0]]]
    found = vs_kvpress.compare_positions(theirs, ours, scores)
    assert found == {"lists": 2, "equal": 1, "contained": 1, "common": 0.75, "gap": 0.25}


def test_a_set_of_one_slot_more_is_contained(vs_kvpress):
    found = vs_kvpress.compare_positions([[[0, 1, 2]]], [[[0, 2]]], [[[3.0, 1.0, 2.0]]])
    assert found == {"lists": 1, "equal": 0, "contained": 1, "common": 1.0, "gap": 0.0}


def test_sides_of_different_heads_are_refused(vs_kvpress):
    with pytest.raises(ValueError, match=r"same layers and KV heads, got \[\[1\], \[2\]\]"):
        vs_kvpress.compare_positions([[[0]]], [[[0], [0]]], [[[1.0]]])


def test_heavy_hitters_are_those_of_the_summed_attention(vs_kvpress):
    draw = np.random.default_rng(0)
    weights = np.tril(draw.random((12, 12)))
    seen = weights.sum(0) / np.arange(12, 0, -1)
    best = np.argsort(-weights.sum(0)[:9], kind="stable")[:3]
    expected = [*sorted(best.tolist()), 9, 10, 11]
    assert vs_kvpress.heavy_hitters(seen.tolist(), slots=6) == expected


@pytest.mark.parametrize("tokens", (100, 1000, 1024, 4096))
def test_kvpress_keeps_as_many_slots(vs_kvpress, tokens):
    for slots in range(1, tokens):
        assert int(tokens * (1 - vs_kvpress.compression_ratio(slots, tokens))) == slots


@pytest.mark.parametrize(("tokens", "share"), ((1024, 0.2), (2048, 0.2), (4096, 0.5)))
def test_pyramids_have_the_same_slots_in_each_layer(vs_kvpress, tokens, share):
    """kvpress's are linear from `2 B - B / beta` down to `B / beta`, rounded one by one."""
    slots, layers = int(share * tokens), 30
    transform = eval(vs_kvpress.expressions("pyramidkv", share, tokens)["kvjax"], {**vars(kvjax)})
    budget = transform.for_layer(0, layers).budget
    ours = budget.schedule(np.array([tokens]))[:, 0]
    last = slots / vs_kvpress.PYRAMID_BETA
    theirs = np.linspace(2 * slots - last, last, layers)
    assert ours.sum() == layers * slots
    assert np.abs(ours - theirs).max() < 1


def test_a_pyramid_of_few_slots_is_refused(vs_kvpress):
    with pytest.raises(ValueError, match="more than 160 slots on average, got 160"):
        vs_kvpress.pyramid_beta(160)


def test_tokens_before_the_first_different_one(vs_kvpress):
    assert vs_kvpress.same_start([1, 2, 3], [1, 2, 4]) == 2
    assert vs_kvpress.same_start([1, 2], [1, 2]) == 2


def test_rows(vs_kvpress):
    keys = vs_kvpress.keys_of(["full", "snapkv"], [0.2, 0.5], [1024])
    assert [(key["method"], key["share"]) for key in keys] == [
        ("full", None), ("snapkv", 0.2), ("snapkv", 0.5),
    ]  # fmt: skip


def test_arguments(vs_kvpress):
    args = vs_kvpress.arguments([*GIVEN, "--tokens", "512", "--methods", "snapkv"])
    assert (args.tokens, args.methods, args.shares) == ([512], ["snapkv"], [0.2])


@pytest.mark.parametrize(
    ("given", "message"),
    (
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--new", "1"], "--new must be at least 2, got 1"),
        (["--shares", "1.5"], "a share of --shares must lie in (0, 1], got 1.5"),
        (["--tokens", "0"], "a length of --tokens must be at least 1, got 0"),
        (["--methods", "snapkv", "--tokens", "100"], "budget must be at least 65 (window + 1)"),
        (["--methods", "pyramidkv", "--tokens", "400"], "more than 160 slots on average, got 80"),
    ),
)
def test_wrong_arguments_are_refused(vs_kvpress, capsys, given, message):
    with pytest.raises(SystemExit) as error:
        vs_kvpress.arguments([*GIVEN, *given])
    assert error.value.code == 2 and message in capsys.readouterr().err


def test_rows_of_an_earlier_run(vs_kvpress, tmp_path):
    out, rows = tmp_path / "out.json", [{"method": "full"}]
    assert vs_kvpress.earlier_rows(None, {}) == vs_kvpress.earlier_rows(out, {}) == []
    out.write_text(json.dumps({"settings": {"rounds": 3}, "rows": rows}))
    assert vs_kvpress.earlier_rows(out, {"rounds": 3}) == rows
    with pytest.raises(ValueError, match=r"settings \{'rounds': 4\}, got \{'rounds': 3\}"):
        vs_kvpress.earlier_rows(out, {"rounds": 4})


def test_a_disturbed_measurement_is_made_again(quiet, monkeypatch):
    others = iter([0.0, 10.0, 10.0, 10.0])  # before and after each of two measurements
    monkeypatch.setattr(quiet, "others_seconds", lambda pids: next(others))
    monkeypatch.setattr(quiet, "PAUSE", 0.0)
    results = iter("ab")
    assert quiet.when_quiet(lambda: next(results), [], 0.03) == ("b", 0.0)


def test_a_machine_that_is_never_quiet(quiet, monkeypatch):
    others = iter(range(100))
    monkeypatch.setattr(quiet, "others_seconds", lambda pids: float(next(others)))
    monkeypatch.setattr(quiet, "PAUSE", 0.0)
    monkeypatch.setattr(quiet, "TRIES", 3)
    with pytest.raises(SystemExit, match="more than 3% of the cores 3 times"):
        quiet.when_quiet(lambda: None, [], 0.03)


def test_what_a_process_works_is_not_that_of_others(quiet):
    """A child that worked for a while counts as an other process until it is named."""
    child = subprocess.Popen(["sh", "-c", "while :; do :; done"])
    try:
        while quiet.process_seconds(Path(f"/proc/{child.pid}/stat").read_text()) < 0.2:
            time.sleep(0.02)
        both = quiet.others_seconds([os.getpid(), child.pid])
        assert quiet.others_seconds([os.getpid()]) - both >= 0.1
    finally:
        child.kill()
        child.wait()
