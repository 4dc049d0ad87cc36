"""Shares of a conversation: a number of slots, before which nothing is evicted."""

from __future__ import annotations

import numpy as np
import pytest

import kvjax
from kvjax import Every, Everywhere, HeadGroups, PerLayer, SnapKV, WhenFull, chain
from kvjax.kit import in_slots
from tests.generation.test_generate import RNG, VOCAB, generate, model
from tests.support.marks import some_slow

TOKENS = 120
EXPECTED = {
    "a share": (SnapKV(0.5), SnapKV(60)),
    "rounded down": (kvjax.H2O(0.33), kvjax.H2O(39)),
    "the least that works": (SnapKV(0.01), SnapKV(17)),
    "a NumPy share": (kvjax.H2O(np.float32(0.5)), kvjax.H2O(60)),
    "slots": (SnapKV(64), SnapKV(64)),
    "everything": (kvjax.H2O(1.0), kvjax.H2O(120)),
    "pyramidkv": (kvjax.PyramidKV(0.01), kvjax.PyramidKV(9)),
    "pyramidinfer": (kvjax.PyramidInfer(0.25), kvjax.PyramidInfer(30)),
    "pyramidinfer at its ratios": (kvjax.PyramidInfer(), kvjax.PyramidInfer()),
    "selects": (kvjax.InfiniGen(), kvjax.InfiniGen(24)),
    "whole pages": (kvjax.Quest(0.5, page=8), kvjax.Quest(56, page=8)),
    "no budget": (kvjax.Quantize(), kvjax.Quantize()),
    "every": (Every(SnapKV(0.5), 8), Every(SnapKV(60), 8)),
    "when full": (WhenFull(SnapKV(0.5), 8), WhenFull(SnapKV(60), 8)),
    "kvcrush": (kvjax.KVCrush(SnapKV(0.5)), kvjax.KVCrush(SnapKV(60))),
    "nested": (
        Everywhere(chain(SnapKV(0.5), Everywhere(kvjax.Quantize()), kvjax.Quest(0.5))),
        Everywhere(chain(SnapKV(60), Everywhere(kvjax.Quantize()), kvjax.Quest(48))),
    ),
    "by head": (
        chain(kvjax.ByHead(kvjax.KVzip(0.5)), kvjax.Quest(0.5)),
        chain(kvjax.ByHead(kvjax.KVzip(0.5)), kvjax.Quest(48)),
    ),
    "head groups": (
        HeadGroups((((1,), SnapKV(0.5)), ((0,), kvjax.Full()))),
        HeadGroups((((1,), SnapKV(60)), ((0,), kvjax.Full()))),
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_shares_become_slots(name):
    given, expected = EXPECTED[name]
    assert in_slots(given, TOKENS) == expected


def test_what_per_layer_chooses_has_slots():
    given = PerLayer(lambda layer, _: kvjax.Full() if layer == 0 else SnapKV(0.5))
    assert kvjax.bind(in_slots(given, TOKENS), 2) == (kvjax.Full(), SnapKV(60))


def test_bad_arguments():
    with pytest.raises(TypeError, match="in_slots"):
        in_slots("snapkv", 10)
    with pytest.raises(ValueError, match="tokens must be at least 1, got 0"):
        in_slots(SnapKV(0.5), 0)


PYRAMID, WHEN_FULL = kvjax.PyramidKV(0.5, window=4), WhenFull(SnapKV(0.5, window=4), room=8)


@pytest.mark.parametrize(
    "shared",
    some_slow(
        [kvjax.H2O(0.5), PYRAMID, kvjax.Quest(0.5, page=4, dense_layers=()), WHEN_FULL],
        exhaustive={PYRAMID, WHEN_FULL},
    ),
    ids=repr,
)
def test_a_conversation_is_the_full_cache_s_until_its_slots_are_full(shared):
    """Rows of different lengths, three turns of at most 58 tokens in 60 slots."""
    turns = [
        [RNG.integers(VOCAB, size=size).tolist() for size in sizes]
        for sizes in ((14, 3, 8), (5, 11, 2), (9, 4, 14))
    ]

    def answers(transform: kvjax.KVTransform) -> list[list[list[int]]]:
        context, found = (
            kvjax.read(model(), turns[0], transform=transform, max_prompt=TOKENS, max_new=64),
            [],
        )
        for turn in (None, *turns[1:]):
            result = generate(turn, context=context, max_new_tokens=8, end_tokens=())
            context = result.context
            found.append(result.tokens)
        return found

    expected = answers(kvjax.Full())
    assert answers(in_slots(shared, TOKENS)) == expected
    assert answers(shared) != expected, "the share alone keeps everything, too: it shows nothing"
