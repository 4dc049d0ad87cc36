"""Every and WhenFull around SnapKV, against loops written from their docstrings."""

from __future__ import annotations

import numpy as np
import pytest

import kvjax
from tests.references.budgets import rows_budget
from tests.references.snapkv import SnapKV
from tests.support.method_pair import LENGTHS, Pair

MAX_PROMPT, MAX_NEW = 60, 64


class Repeated(SnapKV):
    """SnapKV that treats everything live as one prompt at a flush without enough room after it.

    There is room for `spare` slots more than the base may keep of any row. The observation window
    goes on with the queries of decoding.  A share is a share of the row's tokens so far, generated
    ones included, of which no more than max_prompt count.
    """

    keeps_queries = True

    def __init__(self, *args, spare: int, **options) -> None:
        super().__init__(*args, **options)
        self.size = most_kept(self.budget, self.observation) + spare

    def row_budget(self, length: int) -> int:
        return super().row_budget(min(length, MAX_PROMPT))

    def decode(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int) -> np.ndarray:
        out = super().decode(q, k, v, position)
        self.queries = [*self.queries, (q, position)][-self.observation :]
        return out

    def flush(self, room: int) -> None:
        if len(self.slots) + room > self.size:
            self._evict(self.row_budget(self.slots.length))


class EverySnapKV(Repeated):
    """Compresses after every `steps` tokens generated since the last time, prompts included."""

    def __init__(self, *args, steps: int, **options) -> None:
        super().__init__(*args, spare=steps, **options)
        self.steps, self.generated = steps, 0

    def prompt(self, q, k, v, positions, last=True) -> np.ndarray:
        if (np.asarray(positions) >= 0).any():
            self.generated = 0
        return super().prompt(q, k, v, positions, last)

    def decode(self, *args) -> np.ndarray:
        self.generated += 1
        return super().decode(*args)

    def flush(self, room: int) -> None:
        if self.generated + room > self.steps:
            self.generated = 0
            self._evict(self.row_budget(self.slots.length))


def SnapKVWhenFull(*args, room: int, **options) -> Repeated:
    """Flushed every quarter of `room` tokens."""
    return Repeated(*args, spare=room, **options)


def most_kept(budget: int | float, window: int) -> int:
    """Most slots that SnapKV keeps of a row, whatever its length becomes."""
    return max(rows_budget(budget, n, window + 1) for n in range(1, MAX_PROMPT + 1))


def pair(wrapper, reference, budget=20, window=8, *, seed=0, sinks=None, **wrapped) -> Pair:
    return Pair(
        wrapper(kvjax.SnapKV(budget, window), **wrapped),
        lambda **options: reference(budget, window, **wrapped, **options),
        seed=seed,
        max_prompt=MAX_PROMPT,
        max_new=MAX_NEW,
        sinks=sinks,
    )


slow = pytest.mark.slow
SINKS = np.array([0.5, 6.0, -2.0, 3.0])


@pytest.mark.parametrize(
    ("budget", "window", "steps", "sinks"),
    [
        pytest.param(20, 8, 6, None, marks=slow),
        pytest.param(9, 8, 1, None, marks=slow),
        pytest.param(0.5, 8, 7, None, marks=slow),
        pytest.param(24, 16, 10, None, marks=slow),  # a window longer than the interval
        (12, 4, 4, SINKS),
    ],
    ids=["int", "every step", "share", "long window", "sinks"],
)
def test_every(budget, window, steps, sinks):
    """The short row is compressed once it has grown past the budget."""
    both = pair(kvjax.Every, EverySnapKV, budget, window, steps=steps, sinks=sinks)
    both.prompt(LENGTHS, "scattered").decode(64)
    assert both.cache.kv.slots == most_kept(budget, window) + steps


@pytest.mark.parametrize(
    ("budget", "room"),
    [(20, 500), *(pytest.param(*case, marks=slow) for case in ((20, 6), (0.5, 9), (24, 1)))],
)
def test_when_full(budget, room):
    """Rows fill up at different steps; one is compressed while the others are left alone."""
    both = pair(kvjax.WhenFull, SnapKVWhenFull, budget, room=room, seed=2)
    both.prompt(LENGTHS).decode(64)
