"""H2O against its reference: kept positions, outputs and accumulated scores at every step."""

from __future__ import annotations

import numpy as np
import pytest

import kvjax
from tests.references.h2o import H2O
from tests.support.attending import (
    Tokens,
    decode,
    live_count,
    new_cache,
    prompt,
    right,
    slots_of,
)
from tests.support.method_pair import LENGTHS, SIDES, Pair

CASES = {
    # budget, heads (KV heads, query heads per KV head), group_reduce
    "even": (12, (2, 2), "mean"),
    "odd, multi-head": (13, (4, 1), "mean"),
    "smallest": (2, (2, 2), "mean"),
    "max": (16, (2, 4), "max"),
    "quarter, sum": (0.25, (3, 2), "sum"),
    "most": (0.81, (2, 2), "mean"),
    "tiny share": (0.01, (2, 1), "mean"),  # 2 slots everywhere
    "all": (1.0, (3, 2), "max"),  # of the prompt: the cache no longer grows
}


def pair(budget, heads=(2, 2), reduce="mean", **kwargs) -> Pair:
    transform = kvjax.H2O(budget, group_reduce=reduce)
    return Pair(transform, lambda **o: H2O(budget, reduce, **o), heads=heads, **kwargs)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.fast_cases("max")
def test_prompt_and_64_decode_steps(case):
    pair(*case).prompt(LENGTHS).decode(64)


@pytest.mark.parametrize("side", SIDES)
def test_padding(side):
    pair(12, seed=1).prompt(LENGTHS, side).decode(64)


@pytest.mark.parametrize("budget", [12, 0.81])
@pytest.mark.slow
def test_prompt_in_chunks(budget):
    """The second row's tokens all stand in the first chunk: its second one is padding."""
    pair(budget, seed=2).prompt(LENGTHS, chunks=2).decode(32)


@pytest.mark.parametrize("budget", [12, 0.81])
def test_second_turn(budget):
    """Scores run on, a share is taken anew; the last row gets no token in the second prompt."""
    both = pair(budget, seed=3).prompt(LENGTHS)
    both.decode(20).prompt((9, 30, 0), "left").decode(30)


def test_prompts_shorter_than_the_smallest_budget():
    """A share of one token is one slot: such a row grows to 2, and an empty one too."""
    both = pair(*CASES["tiny share"], seed=4).prompt((1, 0, 2)).decode(20)
    assert [len(both.kept(row, 0)) for row in range(3)] == [2, 2, 2]


@pytest.mark.parametrize("case", ["even", "tiny share"])
def test_decoding_without_a_prompt(case):
    """Free slots are filled first; a share of nothing is the smallest budget."""
    both = pair(*CASES[case], seed=10).decode(20)
    assert len(both.kept(0, 0)) == (12 if case == "even" else 2)


def test_row_that_has_stopped_keeps_its_tokens():
    both = pair(12, seed=5).prompt(LENGTHS).decode(10)
    before = both.kept(0, 1)
    both.decode(20, stopped=(0, 1))
    assert both.kept(0, 1) == before


SINKS = np.array([0.5, 6.0, -2.0, 3.0])


@pytest.mark.parametrize(
    "options",
    [{"window": 9}, {"scale": 0.9, "window": 20, "soft_cap": 2.5}, {"sinks": SINKS}],
)
@pytest.mark.fast_cases("options1", "options2")
def test_attention_options(options):
    """Probabilities, and with them the scores, follow the sliding window, soft cap and sinks."""
    pair(24, seed=6, **options).prompt(LENGTHS).decode(64)


def test_rope():
    rope = kvjax.Rope(np.float32([1.0, 0.3, 0.02]), factor=1.1)  # 6 of 8 channels
    pair(12, seed=7, rope=rope).prompt(LENGTHS).decode(64)


def test_no_room_for_new_tokens():
    pair(12, seed=8, max_prompt=52, max_new=0).prompt(LENGTHS)


def hot_first_key(both: Pair) -> Pair:
    """Every token but the first of each row gets no attention at all, except from itself.

    A logit of -1,000 is a probability of exactly 0 in both precisions.
    """
    both.q[:], both.k[:] = 0.0, 0.0
    both.q[..., 0], both.k[:, :, 0, 0] = 1000.0, 8**0.5
    return both


@pytest.mark.parametrize("side", SIDES)
def test_ties_go_to_the_lower_position(side):
    """All scores but the first token's are 0: the heavy ones are the lowest positions."""
    both = hot_first_key(pair(12, seed=9)).prompt(LENGTHS, side)
    assert both.kept(0, 0) == [*range(6), *range(31, 37)]
    np.testing.assert_array_equal(both.scores(0, 0)[:, 1:], 0)
    both.decode(8)
    assert both.kept(0, 0) == [*range(6), *range(39, 45)]
    # Row 1 has 13 tokens: number 6 is the newest that is not recent.
    assert both.kept(1, 0) == [*range(6), *range(7, 13)]


def test_identical_tokens():
    """Older tokens were seen by more queries: the heavy ones are the first."""
    both = pair(12)
    both.q[:], both.k[:], both.v[:] = 1.0, 1.0, 1.0
    both.prompt(LENGTHS).decode(8)
    assert both.kept(0, 1) == [*range(6), *range(39, 45)]


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
