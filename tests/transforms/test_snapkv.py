"""SnapKV against its reference: kept positions and outputs at every call."""

from __future__ import annotations

import numpy as np
import pytest

import kvjax
from kvjax.compose.foreseen import foreseen
from tests.references.snapkv import SnapKV
from tests.support.attending import Tokens, new_cache, prompt, slots_of
from tests.support.marks import some_slow
from tests.support.method_pair import LENGTHS, Pair


def pair(
    budget=20, window=8, kernel=7, pooling="max", reduce="mean", *, attention=None, **options
) -> Pair:
    """`attention` has its options: its sliding window is not SnapKV's."""
    chosen = budget, window, kernel, pooling, reduce
    attention = attention or {}
    return Pair(kvjax.SnapKV(*chosen), lambda **o: SnapKV(*chosen, **o), **attention, **options)


CASES = {
    "default": {},
    "authors' code": {"kernel": 5, "pooling": "avg"},
    "no pooling, max": {"budget": 16, "window": 4, "kernel": 1, "reduce": "max", "heads": (2, 4)},
    "wide average, sum": {
        "budget": 24, "window": 6, "kernel": 13, "pooling": "avg", "reduce": "sum", "heads": (3, 2)
    },
    "smallest": {"budget": 2, "window": 1, "kernel": 3, "pooling": "avg", "heads": (4, 1)},
    "long window": {"budget": 40, "window": 32, "heads": (2, 1)},
    "share": {"budget": 0.5, "reduce": "max"},
    "tiny share": {"budget": 0.01, "kernel": 3},  # window + 1 everywhere
    # Most tokens that a sliding window hides score 0, and tie.
    "sliding window": {"attention": {"window": 17}},
    "soft cap": {"attention": {"scale": 0.9, "window": 30, "soft_cap": 2.5}},
    "sinks": {"attention": {"sinks": np.array([0.5, 6.0, -2.0, 3.0])}},
    "rotated": {"rope": kvjax.Rope(np.float32([1.0, 0.3, 0.02, 0.001]))},
}  # fmt: skip


@pytest.mark.parametrize("name", some_slow(CASES, "authors' code", "sinks", "smallest"))
def test_prompt_decode_and_a_further_turn(name):
    """Nothing is evicted while decoding; then everything live is compressed as one prompt."""
    both = pair(**CASES[name], seed=5).prompt(LENGTHS)
    kept = both.kept(2, 0)
    both.decode(20)
    assert both.kept(2, 0) == [*kept, *range(52, 72)]
    both.prompt((9, 30, 0)).decode(1)


@pytest.mark.parametrize("window", [8, pytest.param(32, marks=pytest.mark.slow)])
def test_prompt_in_chunks(window):
    """The observation window reaches back over the boundary, or lies in the first chunk."""
    both = pair(window + 12, window, seed=2).prompt((37, 24, 52), chunks=2)
    assert len(both.kept(1, 0)) == min(24, window + 12)
    both.decode(2)


def test_prompts_shorter_than_the_window():
    """Fewer queries than the window are averaged once a second turn has something to evict; a row
    that has no second turn is left alone."""
    both = pair(seed=4).prompt((3, 7, 1), "left").decode(20)
    assert both.kept(0, 0) == list(range(23))
    both.prompt((1, 2, 0))
    assert [len(both.kept(row, 1)) for row in range(3)] == [20, 20, 21]


def test_ties_at_the_edge_of_the_average():
    """The average counts the zeros beyond both ends: identical keys score lower there.

    Of 29 prefix tokens, the 25 that have two neighbours on both sides tie.
    """
    both = pair(kernel=5, pooling="avg", seed=8)
    both.q[:], both.k[:] = 0.0, 1.0
    both.prompt(LENGTHS)
    assert both.kept(0, 0) == [*range(2, 14), *range(29, 37)]


@pytest.mark.slow
def test_a_longer_window_in_a_chain_is_not_looked_at():
    """A neighbour that keeps everything changes nothing, whatever it asks of `attend`."""
    alone, neighbour = kvjax.SnapKV(16, window=4), kvjax.SnapKV(64, window=32)
    kept = []
    for transform in (alone, kvjax.chain(neighbour, alone)):
        cache = new_cache(transform, 1, max_prompt=64)
        _, cache = prompt(transform, cache, Tokens.random(rows=1), np.arange(64)[None])
        kept.append([slots_of(cache, 0, head)["position"].tolist() for head in range(2)])
    assert kept[0] == kept[1]


def test_a_window_that_needs_do_not_ask_for():
    class Forgetful(kvjax.SnapKV):
        needs = property(lambda self: kvjax.kit.Needs(query_window=4))

    with pytest.raises(ValueError, match=r"at most the 4 queries that `needs` ask for.*got 8"):
        foreseen(Forgetful(20, window=8), "prompt")
