"""A long decode against the reference: a cache that is refilled many times over."""

from __future__ import annotations

import pytest

import kvjax
from tests.references.h2o import H2O
from tests.support.method_pair import LENGTHS, Pair

STEPS = 400


@pytest.mark.slow
def test_h2o():
    """Every slot is reused dozens of times, and scores have run on over hundreds of queries."""
    both = Pair(kvjax.H2O(24), lambda **o: H2O(24, **o), heads=(2, 2), seed=11, max_new=STEPS)
    both.prompt(LENGTHS).decode(STEPS)
    assert [len(both.kept(row, 0)) for row in range(3)] == [24, 24, 24]
