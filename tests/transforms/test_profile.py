"""Profiles of a model's heads, the shares that they give, and rectangles, by brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvjax.budgets.profile import ladder, profile, rectangles, shares


def texts(seed=0, layers=3, heads=4, lengths=(50, 81)):
    """Scores of heads that differ much, with ties: about a third of all is exactly 0."""
    rng = np.random.default_rng(seed)
    size = np.exp(rng.normal(scale=3, size=(layers, heads, 1)))
    scores = [size * rng.gamma(0.3, size=(layers, heads, n)) for n in lengths]
    return [np.where(rng.random(x.shape) < 0.3, 0, x).astype(np.float32) for x in scores]


def test_a_ladder_has_evenly_growing_shares_above_it():
    scores = [np.random.default_rng(0).permutation(10_000).reshape(2, 5, 1000)]
    thresholds = ladder(scores, steps=5, smallest=1e-4)
    assert thresholds.tolist() == [9998, 9989, 9899, 8999, -np.inf]
    above = [(scores[0] > t).sum() for t in thresholds]
    assert above == [1, 10, 100, 1000, 10_000]
    assert (np.diff(ladder(texts(), steps=64)) <= 0).all(), "with ties, too"


def test_a_profile_counts_what_is_above():
    scores = texts()
    thresholds = ladder(scores, steps=12)
    table = profile(scores, thresholds)
    assert table.shape == (3, 4, 12)
    for n, h, k in np.ndindex(table.shape):
        each = [
            sum(score > thresholds[k] for score in x[n, h].tolist()) / x.shape[2] for x in scores
        ]
        assert table[n, h, k] == pytest.approx((each[0] + each[1]) / 2, abs=1e-12)
    scores[0][0, 0, 7] = -np.inf
    assert (profile(scores, thresholds)[..., -1] == 1).all(), "all means all"


def test_a_texts_length_is_no_weight():
    short = np.array([[[3.0, 0, 0, 0]]])
    table = profile([short, np.full((1, 1, 1000), 3.0)], np.array([1, -np.inf]))
    assert table.tolist() == [[[(1 / 4 + 1) / 2, 1]]]


BUDGETS = (1e-9, 1e-4, 0.01, 0.02, 0.05, 0.1, 0.5, 0.71, 0.99, 1 - 1e-12, 1.0)


@pytest.mark.parametrize("steps", [2, 5, 64])
def test_shares_have_the_budget_as_their_mean_and_grow_with_it(steps):
    scores = texts()
    table = profile(scores, ladder(scores, steps=steps))
    of_budgets = np.stack([shares(table, budget) for budget in BUDGETS])
    assert of_budgets.shape == (len(BUDGETS), 3, 4)
    np.testing.assert_allclose(of_budgets.mean((1, 2)), BUDGETS, rtol=1e-12)
    assert (np.diff(of_budgets, axis=0) >= 0).all()
    assert (of_budgets[-1] == 1).all()
    assert ((of_budgets >= 0) & (of_budgets <= 1)).all()


def test_shares_at_a_threshold_are_those_above_it():
    scores = texts()
    table = profile(scores, ladder(scores, steps=16))
    for k in range(16):
        close = shares(table, table[..., k].mean(), safeguard=0)
        np.testing.assert_allclose(close, table[..., k], rtol=1e-12, atol=1e-15)


def test_equal_heads_have_equal_shares():
    scores = [np.tile(np.random.default_rng(1).random(200), (2, 3, 1))]
    found = shares(profile(scores, ladder(scores)), 0.07)
    np.testing.assert_allclose(found, 0.07, rtol=1e-12)


def partitions(heads, at_most):
    """All ways to put heads into so many groups."""
    for labels in itertools.product(range(at_most), repeat=heads):
        groups = [tuple(h for h in range(heads) if labels[h] == g) for g in range(at_most)]
        yield [group for group in groups if group]


def cost(groups, needed, saves) -> float:
    return sum(len(group) * max(needed[h] for h in group) + saves for group in groups)


@pytest.mark.parametrize("seed", range(12))
def test_no_other_groups_take_fewer_slots(seed):
    rng = np.random.default_rng(seed)
    heads, at_most = int(rng.integers(1, 7)), int(rng.integers(1, 4))
    each = rng.integers(0, 5, size=heads) / 4 if seed % 2 else rng.random(heads)
    tokens, saves = 40, (0, 3)[seed // 6]
    found = rectangles(each, tokens, at_most=at_most, saves=saves)
    assert sorted(h for heads_of, _ in found for h in heads_of) == list(range(heads))
    needed = [max(int(share * tokens), 1) for share in each.tolist()]
    for heads_of, slots in found:
        assert slots == max(needed[h] for h in heads_of) and list(heads_of) == sorted(heads_of)
    assert [slots for _, slots in found] == sorted((r.slots for r in found), reverse=True)
    ways = [(cost(groups, needed, saves), len(groups)) for groups in partitions(heads, at_most)]
    assert (cost([r.heads for r in found], needed, saves), len(found)) == min(ways)


@pytest.mark.parametrize(
    ("each", "at_most", "expected"),
    [
        ([0.5, 0.5, 0.5], 3, [((0, 1, 2), 500)]),  # of equal heads, one rectangle
        ([0.2, 0.6, 0.4], 2, [((1,), 600), ((0, 2), 400)]),  # of two equal ways, the smaller first
        ([0.02, 0.9, 0.01], 1, [((0, 1, 2), 900)]),
        ([0.0], 3, [((0,), 1)]),
        ([0.1, 0.2, 0.3], 8, [((2,), 300), ((1,), 200), ((0,), 100)]),
    ],
)
def test_rectangles(each, at_most, expected):
    assert list(rectangles(np.array(each), 1000, at_most=at_most)) == expected


def test_many_heads_are_grouped_at_once():
    each = np.random.default_rng(2).random(256)
    assert len(rectangles(each, 100_000, at_most=4)) == 4


TABLE = np.array([[[0.5, 1.0], [0.0, 1.0]]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ladder([np.full((1, 2, 3), np.nan)]), "got NaN"),
        (lambda: shares(TABLE, 0.0), r"\(0, 1\], got 0.0"),
        (lambda: shares(TABLE, np.nan), r"\(0, 1\], got nan"),
        (lambda: shares(TABLE, 0.5, -0.1), r"safeguard must lie in \[0, 1\], got -0.1"),
        (lambda: shares(TABLE[0], 0.5), r"\[layers, KV heads, thresholds\], got \(2, 2\)"),
        (lambda: shares(TABLE[..., :1], 0.5), "grow to 1"),
        (lambda: shares(TABLE[..., ::-1], 0.5), "grow to 1"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
