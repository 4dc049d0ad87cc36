"""KVzip against its reference: kept positions and outputs at every call."""

from __future__ import annotations

import numpy as np
import pytest

import kvjax
from tests.references.kvzip import KVzip
from tests.support import documents
from tests.support.marks import some_slow
from tests.support.tolerances import close

PIECE = 24


class Documents(documents.Documents):
    """Documents that are repeated."""

    method, reference = kvjax.KVzip, KVzip

    def document(self, counts, side: str = "right", chunks: int = 1, pieces: int = 2):
        """A prompt that is repeated, in pieces of different lengths."""
        self.read(counts, side, chunks, last=False)
        looked = []
        for number in range(pieces):
            taken = [min(count, PIECE - 5 * number) if count else 0 for count in counts]
            looked.append(self.tokens(taken, PIECE))
        outs = [
            self.call(*piece, "probe", last=number == pieces - 1)
            for number, piece in enumerate(looked)
        ]
        for row, head in self.heads:
            if counts[row]:
                mine = [self.of_head(*piece, row, head) for piece in looked]
                expected = self.references[row, head].end_document(mine)
                for out, of_piece in zip(outs, expected, strict=True):
                    close(out[row, self.of(head)], of_piece, "reference")
        return self.check()


CASES = {
    "default": {"room": 16},
    "the paper's score": {"values": False, "kernel": 1, "room": 16},
    "wide kernel": {"kernel": 7, "room": 16},
    "window": {"window": 6, "sinks": 0, "room": 10, "heads": (2, 3)},
    "many sinks, one head": {"sinks": 9, "room": 12, "heads": (1, 4)},
    "all query heads": {"room": 12, "heads": (3, 1)},
    "share": {"budget": 0.3, "room": 16},
    "share with window": {"budget": 0.5, "window": 4, "values": False, "room": 12},
    "tiny share": {"budget": 0.01, "sinks": 2, "room": 12},
    "sliding window": {"room": 12, "attention": {"window": 30}},
    "soft cap": {"room": 12, "attention": {"scale": 0.9, "soft_cap": 2.5}},
    "sinks of attention": {
        "room": 12, "attention": {"sinks": np.array([0.5, 6.0, -2.0, 3.0], np.float32)}
    },
}  # fmt: skip


FAST = "default", "window", "share", "soft cap"
# Cases whose parts are in others run before a release.
LIKE_OTHERS = {"many sinks, one head", "all query heads", "share with window"}


@pytest.mark.parametrize("name", some_slow(CASES, *FAST, exhaustive=LIKE_OTHERS))
def test_documents_questions_and_answers(name):
    both = Documents(**CASES[name]).document((37, 9, 52))
    both.question((6, 3, 0), width=8).decode(4)
    both.document((30, 0, 12), side="left", chunks=2, pieces=1)
    both.decode(3, alive=(True, False, True))
    both.question((8, 8, 8), width=8).question((0, 5, 8), width=8, side="left").decode(2)


def test_the_budget_is_of_all_documents_and_the_room_of_all_questions():
    both = Documents(budget=20, room=10).document((30, 12, 52))
    first = both.kept(0, 0)
    assert [len(both.kept(row, 1)) for row in range(3)] == [20, 12, 20]
    both.question((8, 8, 8), width=8)
    assert both.kept(0, 0) == [*first, *range(30, 38)]
    both.question((8, 0, 0), width=8)
    assert both.kept(0, 0) == [*first, *range(36, 46)]  # the oldest have gone
    both.document((0, 40, 0))
    assert [len(both.kept(row, 1)) for row in range(3)] == [30, 28, 28]
    kept = both.kept(1, 0)  # of 12 and 40 tokens, and all of a question
    assert (np.histogram(kept, [0, 12, 20, 60])[0] == (8, 8, 12)).all()


def test_answers_beyond_the_room_go_when_a_document_comes():
    both = Documents(budget=12, room=4).document((20, 20, 20)).decode(9)
    assert len(both.kept(0, 0)) == 12 + 9
    both.document((20, 20, 0))
    assert [len(both.kept(row, 0)) for row in range(3)] == [16, 16, 21]
    assert set(both.kept(0, 0)) >= {25, 26, 27, 28}


def test_a_share_grows_with_the_documents():
    both = Documents(budget=0.25).document((40, 40, 52)).document((40, 20, 0))
    assert [len(both.kept(row, 0)) for row in range(3)] == [20, 15, 13]


# Documents and questions of three rows, one after the other. Questions are negative numbers.
SEQUENCES = {
    "small documents": [(5, 10, 3)] * 4,
    "a question first": [(-9, -16, 0), (40, 20, 9), (-3, 0, -8), (24, 30, 40)],
    "until the cache is full": [(10, 30, 50), (20, 2, 52), (40, 40, 1), (50, 1, 1), (1, 50, 2)],
}
BUDGETS = {
    "number": {"budget": 20, "window": 5},
    "number without a window": {"budget": 12},
    "share": {"budget": 0.3, "window": 3, "sinks": 2},
    "share without a window": {"budget": 0.3},
    "window as large as the budget": {"budget": 20, "window": 15},
    "heads": {"budget": (0.5, 0.125), "window": 2},
}


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("budget", some_slow(BUDGETS, "number", "share", "heads"))
def test_several_documents(budget, sequence):
    both = Documents(**BUDGETS[budget], room=16)
    sinks, window = both.tx.sinks, both.tx.window
    most = both.cache.kv.capacity - 32 - 16
    for counts in SEQUENCES[sequence]:
        start, counts = both.length.copy(), np.array(counts)
        if (counts < 0).any():
            both.question(-counts, width=16)
            continue
        both.document(counts, pieces=1)
        for row, head in both.heads:
            kept = set(both.kept(row, head))
            assert kept >= {*range(max(start[row], both.length[row] - window), both.length[row])}
            new = {position for position in kept if position >= start[row]}
            assert len(new) > 0 or not counts[row], "each document gets something"
            assert len(kept) <= most + 16
            assert kept >= {*range(min(sinks, both.length[row]))}


@pytest.mark.parametrize(
    ("arguments", "documents", "kept"),
    [
        ({"budget": 0.3}, [5] * 4, [5, 1, 1, 1]),
        ({"budget": 0.3}, [10] * 4, [5, 3, 3, 3]),
        ({"budget": 0.3, "window": 3}, [10] * 3, [8, 4, 4]),
        ({"budget": 0.25}, [40, 40], [10, 10]),
        # The second one takes the place of the worst tokens of the first.
        ({"budget": 20, "window": 5}, [40, 40], [12, 8]),
        ({"budget": 20}, [12, 40], [8, 12]),
        ({"budget": 20, "window": 9}, [40, 12], [10, 10]),
    ],
)
def test_slots_of_each_document(arguments, documents, kept):
    both = Documents(**arguments, room=0)
    for count in documents:
        both.document((count,) * 3, pieces=1)
    edges = np.cumsum([0, *documents])
    assert np.histogram(both.kept(0, 0), edges)[0].tolist() == kept


def test_a_question_takes_nothing_of_a_documents_share():
    both = Documents(budget=0.3, window=10, room=16)
    both.question((16, 0, 8), width=16).document((50, 50, 50))
    documents = [len(both.kept(row, 0)) - (16, 0, 8)[row] for row in range(3)]
    assert documents == [15, 15, 15]


@pytest.mark.parametrize("values", [False, True])
def test_a_token_with_a_large_value_is_kept_for_it(values):
    """Probabilities are equal: values alone decide, if they count."""
    both = with_large_values(7, 11, 13, 14, 18, 21, budget=6, values=values, kernel=1)
    assert both.kept(0, 0) == ([7, 11, 13, 14, 18, 21] if values else [*range(6)])


@pytest.mark.parametrize(("kernel", "kept"), [(1, [0, 1, 11]), (3, [10, 11, 12])])
def test_a_token_is_kept_for_its_neighbour(kernel, kept):
    """The oldest tokens stay where scores are equal."""
    assert with_large_values(11, budget=3, kernel=kernel).kept(0, 0) == kept


def with_large_values(*positions, **arguments) -> Documents:
    """Documents that have been read. All keys are the same, so that probabilities are."""
    both = Documents(sinks=0, room=8, **arguments)
    tokens = both.tokens

    def alike(*args):
        (q, k, v), where = tokens(*args)
        k[:] = 0
        large = np.isin(where, positions)[:, None, :, None]
        return [q, k, np.where(large, 3 * np.sign(v), np.sign(v))], where

    both.tokens = alike
    return both.document((30, 30, 30), pieces=1)


def test_of_a_longer_prompt_without_repetition_the_newest_tokens_stay():
    """`generate` refuses such a turn; `attend` knows no more than the padded length."""
    both = Documents(room=10).document((20, 30, 9))
    both.question((12, 10, 1), width=56)
    assert [len(both.kept(row, 0)) for row in range(3)] == [30, 30, 10]
    assert set(both.kept(0, 0)) >= {*range(22, 32)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": 4}, r"budget must be at least 5 \(sinks \+ window \+ 1\), got 4"),
        ({"budget": 12, "window": 8}, "at least 13"),
        ({"budget": 1.5}, "must lie in"),
        ({"budget": 20, "kernel": 4}, "kernel must be odd, got 4"),
        ({"budget": 20, "room": -1}, "room must be"),
        ({"budget": 20, "sinks": -1}, "sinks must be"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        kvjax.KVzip(**arguments)
    with pytest.raises(TypeError, match="values"):
        kvjax.KVzip(20, values=1)
