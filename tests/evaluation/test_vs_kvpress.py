"""The parts of the comparison with kvpress that need neither kvpress nor a model."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

import kvjax

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def vs_kvpress():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("vs_kvpress")


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        ([[0, 2], [1, 2]], [[0, 2], [1, 2]], (2, 2, 2, 1.0, 0.0)),
        ([[0, 1], [0, 2]], [[0, 2], [0, 2]], (2, 1, 1, 0.75, 0.25)),  # nearly a tie
        ([[0, 1, 2]], [[0, 2]], (1, 0, 1, 1.0, 0.0)),  # one slot more
    ],
)
def test_positions_are_compared(vs_kvpress, theirs, ours, expected):
    scores = [[9.0, 4.0, 3.0], [9.0, 1.0, 2.0]][: len(ours)]
    found = vs_kvpress.compare_positions([theirs], [ours], [scores])
    names = "lists", "equal", "contained", "common", "gap"
    assert found == dict(zip(names, expected, strict=True))


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


@pytest.mark.parametrize("tokens", (1024, 2048))
def test_pyramids_have_the_same_slots_in_each_layer(vs_kvpress, tokens):
    """kvpress's are linear from `2 B - B / beta` down to `B / beta`, rounded one by one."""
    slots, layers = int(vs_kvpress.SHARE * tokens), 30
    text = vs_kvpress.expressions("pyramidkv", tokens)["kvjax"]
    transform = eval(text, {"PyramidKV": kvjax.PyramidKV})
    budget = transform.for_layer(0, layers).budget
    ours = budget.schedule(np.array([tokens]))[:, 0]
    last = slots / vs_kvpress.PYRAMID_BETA
    theirs = np.linspace(2 * slots - last, last, layers)
    assert ours.sum() == layers * slots
    assert np.abs(ours - theirs).max() < 1
