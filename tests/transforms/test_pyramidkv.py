"""PyramidKV against its reference, over all layers; its budgets against exact fractions."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

import kvjax
from kvjax.transforms.pyramidkv import PyramidBudget
from tests.references.budgets import rows_budget
from tests.references.pyramidkv import PyramidKV, layer_budgets
from tests.support.method_pair import Pair

LENGTHS = (37, 18, 52)


def pair(budget, layer: int, num_layers: int, seed=0, **chosen) -> Pair:
    """A layer. `chosen`: window, kernel, pooling, group_reduce, beta of the library."""
    bound = kvjax.bind(kvjax.PyramidKV(budget, **chosen), num_layers)[layer]
    if "window" in chosen:
        chosen["observation"] = chosen.pop("window")
    reference = functools.partial(PyramidKV, budget, layer, num_layers, **chosen)
    return Pair(bound, reference, seed=seed + layer, layer=layer)


@pytest.mark.parametrize(
    ("budget", "num_layers", "chosen"),
    [
        (20, 1, {}),
        pytest.param(20, 4, {}, marks=pytest.mark.slow),
        pytest.param(
            0.5, 3,
            {"window": 5, "kernel": 5, "pooling": "avg", "group_reduce": "max", "beta": 2.5},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)  # fmt: skip
def test_every_layer(budget, num_layers, chosen):
    """All layers together hold the average budget times their number, or a short row."""
    layers = [pair(budget, layer, num_layers, **chosen) for layer in range(num_layers)]
    for both in layers:
        both.prompt(LENGTHS, "scattered")
    for row, length in enumerate(LENGTHS):
        most = length // 2 if budget < 1 else min(budget, length)
        assert sum(len(both.kept(row, 0)) for both in layers) == num_layers * most
    for both in layers:
        both.decode(20).prompt((9, 30, 0), "left").decode(2)


def schedule(budget, window, beta, num_layers, lengths) -> np.ndarray:
    """Slots per prompt length and layer."""
    return PyramidBudget(budget, window, beta, num_layers)(np.array(lengths)).T


SHAPES = [
    *itertools.product((9, 10, 20, 37, 64), (8,), (20, 1, 2, 5.5), (1, 2, 3, 7, 32)),
    *itertools.product((33, 48), (32,), (20, 3), (2, 5, 12)),
    # many equal remainders: shares 3, 2.5, 2, 1.5, 1, and shares in halves and thirds
    *itertools.product((4, 5, 6, 7), (2,), (2, 3, 4), (3, 5, 7, 9)),
    # betas that are not binary fractions: 1.1 is 11 / 10
    *itertools.product((13, 29), (8,), (1.1, 2.2, 6.6), (3, 6)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_budgets(shape):
    """Every length from 1 to 140, which passes all three regimes: short, capped, full pyramid."""
    budget, window, beta, num_layers = shape
    lengths = range(1, 141)
    got = schedule(budget, window, beta, num_layers, lengths)
    expected = [layer_budgets(budget, window, beta, length, num_layers) for length in lengths]
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(got.sum(1), num_layers * budget)


@pytest.mark.parametrize("budget", [0.05, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("num_layers", [1, 2, 5, 32])
def test_layer_budgets_of_a_share(budget, num_layers):
    """Up to the window there is nothing to share out, and every layer keeps the row."""
    lengths = range(1, 200)
    got = schedule(budget, 8, 20, num_layers, lengths)
    mean = [rows_budget(budget, length, 9) for length in lengths]
    shared = zip(mean, lengths, strict=True)
    expected = [layer_budgets(each, 8, 20, length, num_layers) for each, length in shared]
    np.testing.assert_array_equal(got, expected)
    assert got[:8].min() == 8
    np.testing.assert_array_equal(got[8:].sum(1), num_layers * np.array(mean[8:]))


@pytest.mark.parametrize("beta", [10 / 3, 3.141592653589793, 1.0000000000000002, 1e6])
def test_layer_budgets_of_an_awkward_beta(beta):
    """A beta of 16 digits would make fractions that no integer holds."""
    lengths = (10, 100, 1000, 30_000)
    got = schedule(1024, 8, beta, 32, lengths)
    expected = [layer_budgets(1024, 8, beta, length, 32) for length in lengths]
    np.testing.assert_array_equal(got, expected)
