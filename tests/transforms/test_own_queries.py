"""OwnQueries against its reference: kept positions and outputs at every call."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import kvjax
from tests.references.own_queries import OwnQueries
from tests.references.rope import rope as rotate
from tests.support import documents
from tests.support.attending import attend, begin_document, init_cache
from tests.support.documents import DIM, INV_FREQ, ROPE
from tests.support.marks import some_slow


class Documents(documents.Documents):
    """Documents that are read once, in pieces of a few tokens."""

    method, reference = kvjax.OwnQueries, OwnQueries

    def __init__(self, budget=20, *, rope=ROPE, piece=16, room=16, **arguments):
        turned = {"inv_freq": None if rope is None else rope.inv_freq}
        super().__init__(
            budget, rope=rope, of_reference=turned, piece=piece, room=room, **arguments
        )

    def document(self, counts, side: str = "right", chunks: int = 1, whole=None):
        """A prompt that begins as a document, or as a piece of one with `whole` tokens."""
        length = () if whole is None else (np.array(whole, np.int32),)
        self.cache = begin_document(self.cache, *length)
        self.read(counts, side, chunks, last=True)
        for row, head in self.heads:
            if counts[row]:
                self.references[row, head].end_document(*(() if whole is None else (whole[row],)))
        return self.check()


LEARNED = np.array([0.5, 6.0, -2.0, 3.0], np.float32)
CASES = {
    "default": {},
    "one piece": {"piece": 64},
    "what it would quote": {"use": 0.0},
    "what it uses": {"use": 1.0, "sinks": 0},
    "many sinks, one head": {"sinks": 9, "piece": 7, "heads": (1, 4)},
    "window, all query heads": {"window": 6, "heads": (3, 1)},
    "share": {"budget": 0.3, "use": 0.25, "piece": 5},
    "share by head": {"budget": (0.5, 0.125), "window": 2},
    "no rope": {"rope": None, "use": 0.2},
    "factor of rope": {"rope": kvjax.Rope(INV_FREQ, factor=1.25), "use": 0.0},
    "part of the channels": {"rope": kvjax.Rope(INV_FREQ[:3])},
    "sliding window": {"attention": {"window": 30}},
    "logits": {"attention": {"scale": 0.9, "soft_cap": 2.5, "sinks": LEARNED}, "use": 0.1},
}
FAST = "default", "share by head", "logits"
# Cases whose parts are in others run before a release.
LIKE_OTHERS = {"many sinks, one head", "window, all query heads", "no rope", "factor of rope"}


@pytest.mark.parametrize("name", some_slow(CASES, *FAST, exhaustive=LIKE_OTHERS))
def test_documents_questions_and_answers(name):
    """The last row of the second document is shorter than a piece and than the sinks."""
    both = Documents(**CASES[name]).document((37, 9, 52))
    both.question((6, 3, 0), width=8).decode(4)
    both.document((30, 0, 3), side="left", chunks=2)
    both.decode(3, alive=(True, False, True)).question((8, 5, 8), width=8, side="left")


@pytest.mark.parametrize("budget", [20, 0.3])
def test_pieces_are_quoted_from_behind_the_whole_document(budget):
    whole = 67, 12, 120
    both = Documents(budget, use=0.2).document((37, 9, 52), whole=whole)
    both.document((30, 3, 52), chunks=2, whole=whole).document((0, 0, 16), whole=whole)
    both.question((6, 3, 0), width=8).decode(4)


@pytest.mark.parametrize(("length", "said"), [(67, "array"), (np.int32([67]), "3 rows")])
def test_lengths_that_are_not_of_the_rows_are_refused(length, said):
    with pytest.raises((TypeError, ValueError), match=said):
        kvjax.begin_document(Documents().cache, length)


def test_a_question_comes_first():
    """The question's tokens have the positions of sinks, as far as they stay."""
    both = Documents(budget=12, room=10).question((8, 16, 0), width=16)
    both.document((40, 24, 2)).document((10, 3, 50))


def kept_of(tx, tokens, where, rope) -> list:
    """Positions that stay of a document, by row and head."""
    cache = init_cache(
        tx, batch=len(where), kv_heads=2, query_heads=4, head_dim=DIM, max_prompt=56, max_new=8,
        dtype=np.float32,
    )  # fmt: skip
    reading = begin_document(cache)
    _, reading = attend(reading, *tokens, where, phase="prompt", last=False, rope=rope)
    # KVzip's repetition has the queries, keys and values of the document, at higher positions.
    again = np.where(where < 0, -1, where + where.max(1, keepdims=True) + 1)
    _, cache = attend(reading, *tokens, again, phase="probe", rope=rope)
    kv = jax.device_get(cache.kv)
    return [
        sorted(at[live].tolist())
        for row in zip(kv.position, kv.live, strict=True)
        for at, live in zip(*row, strict=True)
    ]


@pytest.fixture
def document():
    """Queries, keys and values of ragged rows, and their positions."""
    both = Documents()
    new, where = both.tokens(np.array((52, 30, 41)), 56)
    return new, where.astype(np.int32)


def test_turned_queries_are_those_of_a_repetition(document):
    """In one piece, a virtual repetition of the same states is what KVzip makes with a real one."""
    options = {"budget": 16, "sinks": 0}
    quoted = kept_of(kvjax.OwnQueries(use=0.0, **options), *document, ROPE)
    assert quoted == kept_of(kvjax.KVzip(kernel=1, **options), *document, ROPE)
    assert quoted != kept_of(kvjax.OwnQueries(use=0.0, **options), *document, None)


def test_use_alone_needs_no_rope(document):
    new, where = document
    q, k, v = new
    by_hand = [
        np.stack([rotate(x, at, INV_FREQ) for x, at in zip(rows, where, strict=True)])
        for rows in (q, k)
    ]
    by_hand = [*(x.astype(np.float32) for x in by_hand), v]
    kept = {
        use: [
            kept_of(kvjax.OwnQueries(16, use=use), tokens, where, rope)
            for tokens, rope in ((new, ROPE), (by_hand, None))
        ]
        for use in (0.0, 1.0)
    }
    assert kept[1.0][0] == kept[1.0][1]
    assert kept[0.0][0] != kept[0.0][1]


def test_a_prompt_that_is_no_document_stays_whole():
    both = Documents(budget=5)
    assert both.question((8, 3, 5), width=8).kept(0, 0) == [*range(8)]


@pytest.mark.exhaustive
def test_it_passes_the_checks_of_methods():
    tx = kvjax.OwnQueries(0.4, sinks=2, window=2, room=4, piece=8)
    kvjax.testing.check(tx)
    kvjax.testing.check(kvjax.ByHead(kvjax.chain(tx, kvjax.Quantize(8))))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": 4}, r"budget must be at least 5 \(sinks \+ window \+ 1\), got 4"),
        ({"budget": 20, "use": 1.5}, "use must"),
        ({"budget": 20, "use": -0.1}, "use must"),
        ({"budget": 20, "piece": 0}, "piece must"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        kvjax.OwnQueries(**arguments)
