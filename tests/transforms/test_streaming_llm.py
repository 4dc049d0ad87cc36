"""StreamingLLM against its reference: kept positions and outputs at every step."""

from __future__ import annotations

import numpy as np
import pytest

import kvjax
from tests.references.streaming_llm import StreamingLLM
from tests.support.method_pair import LENGTHS, SIDES, Pair

ROPE = kvjax.Rope(np.float32([1.0, 0.25, 0.01]), factor=1.2)  # 6 of 8 channels

CASES = {
    # budget, sinks, heads (KV heads, query heads per KV head)
    "int": (12, 4, (2, 2)),
    "no sinks": (7, 0, (4, 1)),
    "smallest": (3, 2, (2, 4)),
    "share": (0.25, 4, (3, 2)),
    "tiny share": (0.01, 2, (2, 2)),  # 3 slots everywhere
}


def pair(budget=12, sinks=4, heads=(2, 2), reposition=False, **kwargs) -> Pair:
    if reposition:
        kwargs |= {"rope": ROPE, "late": True}

    def reference(**options):
        turned = {"reposition": True, "inv_freq": np.asarray(ROPE.inv_freq), "factor": ROPE.factor}
        return StreamingLLM(budget, sinks, **(turned if reposition else {}), **options)

    return Pair(
        kvjax.StreamingLLM(budget, sinks=sinks, reposition=reposition),
        reference,
        heads=heads,
        **kwargs,
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.fast_cases("no sinks")
def test_prompt_and_64_decode_steps(case):
    pair(*case).prompt(LENGTHS).decode(64)


@pytest.mark.parametrize("case", [CASES["int"], CASES["share"]], ids=["int", "share"])
@pytest.mark.fast_cases("int")
def test_reposition(case):
    """Keys at their rank in the cache, the query at the last rank, at every one of 64 steps."""
    pair(*case, reposition=True, seed=1).prompt(LENGTHS, "scattered").decode(64)


def test_reposition_with_a_sliding_window():
    """Rank decides the rotation, the token's own position what a query sees."""
    both = pair(reposition=True, seed=2, window=10, soft_cap=2.0)
    both.prompt(LENGTHS, "left").decode(32)


def test_positions_stay_the_original_ones_by_default():
    pair(rope=ROPE, seed=3).prompt(LENGTHS).decode(64)


@pytest.mark.parametrize("reposition", [False, True])
@pytest.mark.parametrize("side", SIDES)
def test_padding(side, reposition):
    pair(reposition=reposition, seed=4).prompt(LENGTHS, side).decode(32)


@pytest.mark.parametrize("reposition", [False, True])
@pytest.mark.fast_cases("False")
def test_prompt_in_chunks(reposition):
    """The second row's tokens all stand in the first chunk: its second one is padding."""
    pair(reposition=reposition, seed=5).prompt(LENGTHS, chunks=2).decode(20)


@pytest.mark.parametrize("case", [CASES["int"], CASES["share"]], ids=["int", "share"])
def test_second_turn(case):
    """The cache holds evicted rows when the prompt comes; the last row gets no token of it."""
    both = pair(*case, reposition=True, seed=6)
    both.prompt(LENGTHS).decode(20).prompt((9, 30, 0), "left").decode(30)


@pytest.mark.parametrize("reposition", [False, True])
def test_prompts_shorter_than_the_smallest_budget(reposition):
    """A share of 3 tokens is 3 slots; such a row still gets its 4 sinks, and grows to 5 slots."""
    both = pair(0.25, 4, (3, 2), reposition, seed=7).prompt((3, 0, 1)).decode(30)
    newest = [32, 29, 30]
    for row in range(3):
        assert both.kept(row, 0) == [0, 1, 2, 3, newest[row]]


@pytest.mark.parametrize("case", ["int", "tiny share"])
def test_decoding_without_a_prompt(case):
    """Free slots are filled first; a share of nothing is the smallest budget."""
    both = pair(*CASES[case], seed=9).decode(20)
    assert both.kept(0, 0) == ([*range(4), *range(12, 20)] if case == "int" else [0, 1, 19])


def test_kept_positions_by_hand():
    both = pair(seed=8).prompt(LENGTHS)
    assert both.kept(0, 0) == [0, 1, 2, 3, *range(29, 37)]
    assert both.kept(1, 0) == [0, 1, 2, 3, 4]
    both.decode(7)
    assert both.kept(1, 1) == list(range(12))
    both.decode(1)
    assert both.kept(1, 1) == [0, 1, 2, 3, *range(5, 13)]
    before = both.kept(0, 1)
    both.decode(5, stopped=(0,))
    assert both.kept(0, 1) == before == [0, 1, 2, 3, *range(37, 45)]
