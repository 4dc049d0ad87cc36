"""Every method against its reference: padding, chunks, rows that stop, turns, short prompts."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import kvjax
from tests.compose import test_ring
from tests.references import spindlekv
from tests.references.chain import SnapKVThenH2O
from tests.references.h2o import H2O
from tests.support.attending import slots_of
from tests.support.documents import Documents
from tests.support.marks import some_slow
from tests.support.method_pair import LENGTHS, Pair
from tests.transforms import (
    test_cam,
    test_chelsea,
    test_clusterkv,
    test_h2o,
    test_infinigen,
    test_kvcrush,
    test_kvmerger,
    test_kvzip,
    test_own_queries,
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
    "chain": functools.partial(
        Pair, kvjax.chain(kvjax.SnapKV(20, window=8, kernel=3), kvjax.H2O(13)),
        functools.partial(SnapKVThenH2O, 20, 13, observation=8, kernel=3),
    ),
}  # fmt: skip


PIECES = (9, 16, 16), (0, 16, 11), (0, 7, 0)  # tokens of three rows


def a_long_life(both: Pair) -> None:
    """Padding between tokens, chunks, rows that stop, and a turn without the last row."""
    both.prompt(LENGTHS, "scattered", chunks=2).decode(9)
    both.decode(6, stopped=(0, 1)).decode(5).prompt((9, 30, 0), "left").decode(8)


def in_pieces(both: Pair) -> None:
    """A prompt in pieces: each is compressed before the next one; the first row has the fewest."""
    for counts in PIECES:
        both.prompt(counts, "left")
    both.decode(6)


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


class StoredPair(Pair):
    """A method before 8 bits, and references that go on from what the library has stored.

    `tests/storage/test_quantize.py` compares what is stored with its own reference. Here it is near
    the tokens as they came; what is read and kept of it in the next prompt is compared.
    """

    def prompt(self, *args, **options):
        super().prompt(*args, **options)
        for (row, head), reference in self.references.items():
            held, slots = slots_of(self.cache, row, head), reference.slots
            for token, key, value in zip(slots.tokens, held["k"], held["v"], strict=True):
                for stored, came in ((key, token.key), (value, token.value)):
                    assert np.abs(stored - came).max() <= 0.05 * np.abs(came).max()
                token.key, token.value = np.float64(key), np.float64(value)
        return self


def stored_in_8_bits() -> None:
    both = StoredPair(
        kvjax.chain(kvjax.H2O(13), kvjax.Quantize(8)), functools.partial(H2O, 13), seed=12
    )
    first: dict[tuple[int, ...], np.ndarray] = {}
    for counts in (*PIECES, (12, 9, 9)):
        both.prompt(counts, "left")
        for place, reference in both.references.items():
            for token in reference.slots.tokens:
                known = first.setdefault((*place, token.position), token.key.copy())
                np.testing.assert_array_equal(token.key, known, "stored once")


def kvcrush() -> None:
    crushing = test_kvcrush.Crushing(test_kvcrush.BASES["h2o"], 4, anchor="mean")
    for counts in PIECES:
        crushing.prompt(counts)


def spindlekv_with_books() -> None:
    chosen = {"theta_key": 0.97, "theta_value": 0.95, **test_spindlekv.BOOKED[0]}
    transform = kvjax.SpindleKV(0.6, window=test_spindlekv.WINDOW, **chosen)
    both = test_spindlekv.pair(transform, spindlekv.SpindleKV, **chosen)
    both.k, both.v = test_spindlekv.around(both.k, 1), test_spindlekv.around(both.v, 2)
    in_pieces(both)


def documents(kind: type[Documents]) -> None:
    both = kind(budget=14, window=2)
    for counts in PIECES:
        both.document(counts, "left")
    both.decode(6)


# Methods that have another harness than `Pair`.
OTHERS_IN_PIECES = {
    "quantize": stored_in_8_bits,
    "kvcrush": kvcrush,
    "spindlekv": spindlekv_with_books,
    "kvzip": functools.partial(documents, test_kvzip.Documents),
    "own_queries": functools.partial(documents, test_own_queries.Documents),
}


@pytest.mark.parametrize("name", some_slow(OTHERS_IN_PIECES, "quantize", "own_queries"))
def test_in_pieces(name):
    OTHERS_IN_PIECES[name]()
