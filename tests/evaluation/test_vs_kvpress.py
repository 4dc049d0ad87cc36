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


@pytest.mark.parametrize(("groups", "count"), [(1, 60), (3, 17), (6, 9)])
def test_the_best_tokens_of_a_group_stay(vs_kvpress, groups, count):
    scores = np.random.default_rng(1).random((3, 2, 20))
    found = vs_kvpress.best_scores(scores.tolist(), groups, count)
    heads = [(layer, head) for layer in range(3) for head in range(2)]
    for group in range(groups):
        members = heads[group * 6 // groups : (group + 1) * 6 // groups]
        kept = {(*at, slot) for at in members for slot in found[at[0]][at[1]]}
        sinks = {(*at, slot) for at in members for slot in range(vs_kvpress.SINKS)}
        others = {(*at, slot) for at in members for slot in range(20)} - sinks
        ranked = sorted(others, key=lambda at: scores[at], reverse=True)
        assert kept == sinks | set(ranked[: count - len(sinks)])


def test_differences_are_relative_to_the_greater_score(vs_kvpress):
    found = vs_kvpress.relative_differences([[1.0, 0.5, 0.0]], [[1.0, 0.4, 0.0]])
    assert found == {"median": 0.0, "most": pytest.approx(0.2)}


def test_figures_of_documents_are_joined(vs_kvpress):
    sets = [([[[0, 1]]], [[[0, 2]]]), ([[[0, 1]]], [[[0, 1]]])]
    figures = [
        vs_kvpress.compare_positions(*each, [[[9.0, 4.0, 3.0]]]) | {"held": vs_kvpress.held(*each)}
        for each in sets
    ]
    expected = {"lists": 2, "equal": 1, "contained": 1, "common": 0.75, "gap": 0.25, "held": 0.75}
    assert vs_kvpress.joined(figures) == expected


def test_held_counts_tokens_of_all_heads(vs_kvpress):
    first, second = [[[0, 1, 2], [4]], [[1], [5]]], [[[1, 2, 3], [4, 5]], [[0], []]]
    assert vs_kvpress.held(first, second) == 3 / 6
    assert vs_kvpress.held(second, first) == 3 / 6


@pytest.mark.parametrize("share", (0.5, 0.2, 0.1, 0.05))
def test_both_sides_keep_the_same_share(vs_kvpress, share):
    texts = [vs_kvpress.written(each[0], share) for each in vs_kvpress.COMPARED.values()]
    theirs, ours = (eval(text, {"KVzipPress": float, "KVzip": kvjax.KVzip}) for text in texts)
    tokens = 30 * 3 * 1000
    assert tokens - int(tokens * theirs) == tokens * ours.budget
    assert ours.sinks == vs_kvpress.SINKS
