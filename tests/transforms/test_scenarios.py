"""Every method against its reference: padding, chunks, rows that stop, turns, short prompts."""

from __future__ import annotations

import functools

import pytest

import kvjax
from tests.compose import test_ring
from tests.references import spindlekv
from tests.support.method_pair import LENGTHS, Pair
from tests.transforms import (
    test_cam,
    test_chelsea,
    test_clusterkv,
    test_h2o,
    test_infinigen,
    test_kvmerger,
    test_pyramidinfer,
    test_pyramidkv,
    test_quest,
    test_repeated_snapkv,
    test_snapkv,
    test_spindlekv,
    test_streaming_llm,
)

PAIRS = {
    "streaming_llm": functools.partial(test_streaming_llm.pair, reposition=True),
    "streaming_llm, a share": functools.partial(test_streaming_llm.pair, 0.25),
    "h2o": test_h2o.pair,
    "h2o, a share": functools.partial(test_h2o.pair, 0.81),
    "snapkv": test_snapkv.pair,
    "snapkv, a share": functools.partial(test_snapkv.pair, 0.5, reduce="max"),
    # Nine layers, of which three, two, two and two are of a kind.
    "pyramidkv": lambda seed: test_pyramidkv.pair(0.5, 2, 9, seed),
    "every": functools.partial(
        test_repeated_snapkv.pair, kvjax.Every, test_repeated_snapkv.EverySnapKV, steps=6
    ),
    "when_full": functools.partial(
        test_repeated_snapkv.pair, kvjax.WhenFull, test_repeated_snapkv.SnapKVWhenFull, room=6
    ),
    "cam": functools.partial(test_cam.pair, prompt=True),
    "pyramidinfer": functools.partial(test_pyramidinfer.pair, budget=0.5, interval=6),
    "kvmerger": functools.partial(test_kvmerger.pair, budget=16),
    "chelsea": test_chelsea.pair,
    "chelsea, a share": functools.partial(test_chelsea.pair, 0.2),
    "clusterkv": functools.partial(test_clusterkv.ClusterPair, (0, 0, 0)),
    "quest": test_quest.pair,
    "quest, the paper's bounds": functools.partial(test_quest.pair, spread=None),
    "infinigen": functools.partial(test_infinigen.pair, 0.4, alpha=3.0),
    "layer_budget": functools.partial(
        test_spindlekv.pair, kvjax.LayerBudgetEviction(0.6, window=test_spindlekv.WINDOW),
        spindlekv.LayerBudgetEviction, unfold=False,
    ),
    "ring": test_ring.pair,
}  # fmt: skip


def a_long_life(both: Pair) -> None:
    """Padding between tokens, chunks, rows that stop, and a turn without the last row."""
    both.prompt(LENGTHS, "scattered", chunks=2).decode(9)
    both.decode(6, stopped=(0, 1)).decode(5).prompt((9, 30, 0), "left").decode(8)


def in_pieces(both: Pair) -> None:
    """A prompt in pieces: each is compressed before the next one; the first row has the fewest."""
    both.prompt((9, 16, 16)).prompt((0, 16, 11)).prompt((0, 7, 0), "left").decode(6)


def short_prompts_and_none(both: Pair) -> None:
    both.prompt((1, 0, 2)).decode(20)


def no_prompt(both: Pair) -> None:
    both.decode(20)


@pytest.mark.parametrize(
    ("name", "scenario"),
    [
        pytest.param(
            name, scenario, id=f"{name}-{scenario.__name__}",
            marks=[pytest.mark.slow]
            * (scenario not in (a_long_life, in_pieces) or "," in name),
        )
        for name in PAIRS
        for scenario in (a_long_life, in_pieces, short_prompts_and_none, no_prompt)
    ],
)  # fmt: skip
def test_scenario(name, scenario):
    scenario(PAIRS[name](seed=12))
