"""Means of scores and their intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from kvjax.evaluation import Estimate
from tests.support.comparisons import share_interval


def test_intervals_are_wilsons():
    def wilson(k, n, z=1.959963984540054):
        p = k / n
        middle, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
        return (middle - half) / (1 + z**2 / n), (middle + half) / (1 + z**2 / n)

    for k, n in [(0, 4), (4, 4), (3, 7), (196, 200)]:
        assert share_interval(k, n) == pytest.approx(wilson(k, n), abs=1e-12)


def test_estimates():
    """Wilson's interval of right and wrong answers, a bootstrap's of other scores."""
    one = Estimate.of([1.0, 0.0, 1.0, 1.0])
    assert one == (0.75, *share_interval(3, 4), 4)
    scores = np.random.default_rng(1).normal(2.0, 0.5, 400)
    found = Estimate.of(scores.tolist())
    expected = stats.norm.interval(0.95, scores.mean(), scores.std() / 20)
    assert (found.low, found.high) == pytest.approx(expected, abs=0.01)
    assert found == Estimate.of(scores.tolist()), "the same again"
    assert Estimate.of([0.3]) == (0.3, 0.3, 0.3, 1)
    # Differences have no interval of shares, also where all of them are zero.
    assert Estimate.resampled([0.0] * 8) == (0.0, 0.0, 0.0, 8)
    assert Estimate.of([0.0] * 8).high > 0.2
