"""H2O against its reference: kept positions, outputs and accumulated scores at every step."""

from __future__ import annotations

import numpy as np
import pytest

import kvjax
from tests.references.h2o import H2O
from tests.support.attending import Tokens, decode, live_count, new_cache, prompt, right, slots_of
from tests.support.marks import some_slow
from tests.support.method_pair import LENGTHS, Pair


def pair(budget=12, reduce="mean", **options) -> Pair:
    transform = kvjax.H2O(budget, group_reduce=reduce)
    return Pair(transform, lambda **attention: H2O(budget, reduce, **attention), **options)


SINKS = np.array([0.5, 6.0, -2.0, 3.0])
CASES = {
    "odd, multi-head": {"budget": 13, "heads": (4, 1)},
    "smallest": {"budget": 2},
    "max": {"budget": 16, "reduce": "max", "heads": (2, 4)},
    "quarter, sum": {"budget": 0.25, "reduce": "sum", "heads": (3, 2)},
    "tiny share": {"budget": 0.01, "heads": (2, 1)},  # 2 slots everywhere
    # A share of the prompt: the cache no longer grows.
    "all": {"budget": 1.0, "reduce": "max", "heads": (3, 2)},
    # Probabilities, and with them the scores, follow the sliding window, soft cap and sinks.
    "soft cap": {"budget": 24, "scale": 0.9, "window": 20, "soft_cap": 2.5},
    "sinks": {"budget": 24, "sinks": SINKS},
    "rotated": {"rope": kvjax.Rope(np.float32([1.0, 0.3, 0.02]), factor=1.1)},
}


@pytest.mark.parametrize("name", some_slow(CASES, "max", "soft cap"))
def test_prompt_and_64_decode_steps(name):
    pair(**CASES[name], seed=6).prompt(LENGTHS).decode(64)


def test_no_room_for_new_tokens():
    pair(seed=8, max_prompt=52, max_new=0).prompt(LENGTHS)


def test_nan_counts_as_the_lowest_score():
    """A row that has seen NaN keeps its budget, and the heavy ones are those with a number."""
    transform, lengths = kvjax.H2O(8), (20, 20)
    tokens = Tokens.random(rows=2, seed=11)
    tokens.k[0, :, 5] = np.nan  # every later query's probabilities are NaN, and the sums with them
    cache = prompt(transform, new_cache(transform, 2), tokens, right([0, 0], lengths, 20))[1]
    for step in range(6):
        cache = decode(transform, cache, tokens, np.array(lengths) + step)[1]
        assert live_count(cache).tolist() == [[8, 8], [8, 8]]
        for head in range(2):
            newest = slots_of(cache, 0, head)["position"][-4:]
            assert newest.tolist() == list(range(17 + step, 21 + step))


@pytest.mark.slow
def test_newest_are_positions_and_not_tokens():
    """Of a budget of 8, the newest 4 positions: two of them are gaps, so 6 places go by score."""
    transform, tokens = kvjax.H2O(8), Tokens.random(rows=1, seed=12)
    positions = np.array([[*range(16), 18, 19]])  # the newest 4 positions are 16 … 19
    cache = prompt(transform, new_cache(transform, 1), tokens, positions)[1]
    full = prompt(kvjax.H2O(32), new_cache(kvjax.H2O(32), 1), tokens, positions)[1].kv
    score = np.asarray(full.column("attention")).mean(-1)[0]
    for head in range(2):
        others = np.argsort(-score[head, :16], kind="stable")[:6]
        expected = sorted([*others.tolist(), 18, 19])
        assert slots_of(cache, 0, head)["position"].tolist() == expected
