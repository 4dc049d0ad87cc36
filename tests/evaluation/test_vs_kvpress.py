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
