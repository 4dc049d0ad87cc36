"""KVCrush's budgets, while decoding too: what adds up, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import kvjax
from kvjax import (
    H2O,
    Every,
    KVCrush,
    PyramidInfer,
    PyramidKV,
    SnapKV,
    StreamingLLM,
    WhenFull,
    chain,
)
from kvjax.transforms.kvcrush.kvcrush import REPRESENTATIVE
from tests.support.attending import Tokens, live_count, right, run, slots_of

LENGTHS = (30, 17, 16, 9)
# Bases of 16 slots, and how many more they may hold after a step of decoding.
WHOLE = {
    "streaming_llm": (StreamingLLM(16), 0),
    "h2o": (H2O(16), 0),
    "snapkv": (SnapKV(16, window=4), 8),
    "every": (Every(SnapKV(16, window=4), steps=3), 2),
    "when_full": (WhenFull(SnapKV(16, window=4), room=3), 3),
}


def representatives(cache, row: int, head: int) -> list[int]:
    own = slots_of(cache, row, head)
    return own["position"][own[REPRESENTATIVE]].tolist()


@pytest.mark.parametrize(
    ("name", "share"), [*((name, None) for name in WHOLE), ("h2o", 0.1), ("snapkv", 0.68)]
)
@pytest.mark.slow
def test_a_share_adds_up(name, share):
    """B slots in all after the prompt; a row of up to B tokens is kept whole.

    While decoding the representatives stay, outside the base's part of the budget.
    """
    base, more = WHOLE[name]
    transform, count = KVCrush(base, share=share), round(16 * (share or 0.25))
    tokens = Tokens.random(rows=4, seed=14)
    after = run(transform, tokens, right([0] * 4, LENGTHS, 30), 8)
    live, pinned = live_count(after.prompt_cache), np.asarray(after.prompt_cache.kv.pinned).sum(-1)
    for row, length in enumerate(LENGTHS):
        assert (live[row] == min(length, 16)).all()
        assert (pinned[row] == np.clip(length - (16 - count), 0, count)).all()
    assert transform.extent(kvjax.Extent(30, 0)).total == 16
    for cache in after.caches:
        assert (np.asarray(cache.kv.dropped) == 0).all()
        assert (live_count(cache)[0] <= 16 + more).all()
        for row, head in np.ndindex(4, 2):
            chosen = representatives(cache, row, head)
            assert chosen == representatives(after.prompt_cache, row, head)
            assert live_count(cache)[row, head] - len(chosen) <= 16 - count + more


@pytest.mark.parametrize("base", [PyramidKV(16, window=4), PyramidInfer(24)], ids=str)
def test_layers_add_up(base):
    """Each layer's budget is shared out, by prompt length, and the layers add up."""
    layers, plain = kvjax.bind(KVCrush(base, share=0.3), 4), kvjax.bind(base, 4)
    lengths = np.arange(1, 200)
    total = 0
    for layer, whole in zip(layers, plain, strict=True):
        kept, taken = layer.split[0].budget(lengths), layer.split[1](lengths)
        np.testing.assert_array_equal(kept + taken, whole.budget(lengths))
        wanted = np.rint(0.3 * whole.budget(lengths))
        spare = np.maximum(kept + taken - whole.minimum, 0)
        np.testing.assert_array_equal(taken, np.minimum(wanted, spare))
        extent = kvjax.Extent(200, 0)
        assert layer.extent(extent).total == whole.extent(extent).total
        total = total + kept + taken
    assert (total == 4 * base.budget).all()


@pytest.mark.slow
def test_positions_with_gaps_lose_nothing():
    """Beyond `max_prompt + max_new` a token has no bits, and is never a representative."""
    tokens = Tokens.random(rows=1, length=200, seed=16)
    positions = np.array([[*range(10), *range(100, 120)]])
    cache = run(KVCrush(H2O(8), 4, anchor="mean"), tokens, positions, 0).prompt_cache
    assert (np.asarray(cache.kv.dropped) == 0).all() and (live_count(cache) <= 12).all()
    assert (np.asarray(cache.kv.position).max(-1) == 119).all()


@pytest.mark.parametrize(
    ("base", "scored"),
    [
        (H2O(16), True),
        (SnapKV(16, window=4), True),
        (Every(SnapKV(16, window=4), steps=3), True),
        (kvjax.bind(PyramidInfer(24), 2)[1], True),
        (StreamingLLM(16), False),
        (chain(SnapKV(20, window=4), H2O(16)), False),
    ],
    ids=str,
)
def test_bits_are_of_the_score_or_of_attention(base, scored):
    """Accumulated attention is asked for only where nothing else gives the bits."""
    asked = KVCrush(base, 4).needs.accumulated_attention
    assert asked == (not scored or base.needs.accumulated_attention)
    assert KVCrush(base, 4, kmeans=True).needs == base.needs


def test_a_layer_that_turns_out_to_keep_everything_is_full():
    tx = KVCrush(kvjax.PerLayer(lambda i, n: kvjax.Full() if i == 0 else H2O(16)), 4)
    assert kvjax.bind(tx, 2) == (kvjax.Full(), KVCrush(H2O(16), 4))


@pytest.mark.slow
def test_around_a_chain_while_decoding():
    """Each part of the chain finds its own state at every step."""
    tx = KVCrush(chain(SnapKV(20, window=4), H2O(12)), 4)
    after = run(tx, Tokens.random(rows=2, seed=17), right([0] * 2, (30, 25), 30), 3)
    assert (live_count(after.caches[-1]) == 16).all()
    chosen = [representatives(cache, 0, 0) for cache in after.all_caches]
    assert len(chosen[0]) == 4 and all(each == chosen[0] for each in chosen)


@pytest.mark.slow
def test_every_chooses_anew():
    """Around KVCrush it lets the representatives compete again, among everything live."""
    tx = Every(KVCrush(SnapKV(16, window=4)), steps=3)
    after = run(tx, Tokens.random(rows=2, seed=10), right([0] * 2, (30, 25), 30), 9)
    chosen = [representatives(cache, 0, 0) for cache in after.all_caches]
    assert all(len(each) == 4 for each in chosen) and len(set(map(tuple, chosen))) > 1


@pytest.mark.parametrize(
    ("transform", "total"),
    [
        (KVCrush(SnapKV(40), 7), 67),
        (KVCrush(Every(SnapKV(40), 9), 7), 56),
        (Every(KVCrush(SnapKV(40), 7), 9), 56),
        (chain(KVCrush(SnapKV(40), 7), H2O(10)), 18),
        (chain(H2O(50), KVCrush(SnapKV(40), 7)), 58),
    ],
    ids=str,
)
def test_representatives_come_on_top(transform, total):
    assert transform.extent(kvjax.Extent(prompt=100, new=20)).total == total


ERRORS = {
    "full": (lambda: KVCrush(kvjax.Full()), ValueError, "Full.*evicts"),
    "class": (lambda: KVCrush(H2O), TypeError, "H2O.*instance"),
    "both": (lambda: KVCrush(H2O(16), 4, 0.5), ValueError, "4.*0.5.*not both"),
    "share of nothing": (
        lambda: KVCrush(chain(H2O(16), SnapKV(40))), ValueError, "budget.*representatives=",
    ),
    "share too small": (lambda: KVCrush(H2O(2), share=0.2), ValueError, "at least 1"),
    "share in a wrapper": (
        lambda: KVCrush(Every(SnapKV(17), 4)), ValueError, r"0.25.*17.*window \+ 1",
    ),
    "less than a page": (lambda: KVCrush(H2O(64), granularity="page"), ValueError, "page"),
    "kmeans of chunks": (
        lambda: KVCrush(H2O(64), kmeans=True, granularity="chunk"), ValueError, "kmeans.*chunk",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS.values(), ids=ERRORS)
def test_refused(case):
    make, error, message = case
    with pytest.raises(error, match=message):
        make()
