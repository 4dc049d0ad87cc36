"""Conversations of 20 turns: within the bound, and as the references have them."""

from __future__ import annotations

import numpy as np
import pytest

import kvjax
from kvjax.attention.layer import layer_caches
from tests.generation.test_context import cases, generate, read
from tests.generation.test_generate import RAGGED, VOCAB
from tests.transforms import test_h2o, test_repeated_snapkv, test_streaming_llm
from tests.transforms.test_repeated_snapkv import EverySnapKV

TURNS, NEW = 20, 3
ROOM = {"max_prompt": 128, "max_new": 64}


def questions(turn: int) -> list[list[int] | None]:
    """One of each row, of different lengths; every third turn one row has none."""
    rng = np.random.default_rng(turn)
    asked = [rng.integers(VOCAB, size=1 + (turn + row) % 3).tolist() for row in range(3)]
    if turn % 3 == 2:
        asked[turn % 2] = None
    return asked


PAIRS = {
    "h2o": lambda: test_h2o.pair(12),
    "streaming_llm": lambda: test_streaming_llm.pair(),
    "every": lambda: test_repeated_snapkv.pair(kvjax.Every, EverySnapKV, 20, 8, steps=6),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.slow
def test_20_turns_are_those_of_the_reference(name):
    """Outputs and kept tokens of every call of a layer."""
    both = PAIRS[name]().prompt((20, 3, 11))
    for turn in range(TURNS):
        stopped = tuple(row for row in range(3) if turn % 3 == 2 and row == turn % 2)
        counts = [0 if row in stopped else 1 + (turn + row) % 3 for row in range(3)]
        both.prompt(tuple(counts)).decode(2, stopped)


# Most live slots per layer, row and KV head after a turn of three new tokens.
BOUNDS = {
    "every": 36 + 4 + 3, "h2o": 36, "clusterkv": None, "full": None,
}  # fmt: skip


@pytest.mark.parametrize("name", cases(BOUNDS, "full"))
def test_20_turns_stay_within_the_bound(name):
    """Of slots and bytes; what keeps everything keeps exactly what was said."""
    context = read(name, **ROOM)
    size, length = context.nbytes, np.array([len(row) for row in RAGGED])
    for turn in range(TURNS):
        asked = questions(turn)
        answer = generate(asked, context, max_new_tokens=NEW, donate=True)
        context = answer.context
        length += [0 if row is None else len(row) + NEW for row in asked]
        live = [part.kv.live.sum(-1) for part in layer_caches(context.caches)]
        assert context.length.tolist() == length.tolist() and answer.dropped == 0
        assert context.nbytes == size
        for count in live:
            if BOUNDS[name] is None:
                np.testing.assert_array_equal(count, np.broadcast_to(length[:, None], count.shape))
            else:
                assert int(count.max()) <= BOUNDS[name]
