"""Quest against its reference: pages, lists of slots and outputs at every call."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import kvjax.evaluation
from kvjax.storage.offload.transform import Offload, recall_statistics
from kvjax.transforms.quest import Pages, Quest
from tests.references import quest as reference
from tests.support.attending import Tokens, new_cache, right, run
from tests.support.marks import some_slow
from tests.support.method_pair import RecallingPair
from tests.support.tolerances import close
from tests.support.watched import found

LENGTHS = (75, 5, 98)


class QuestPair(RecallingPair):
    """Compares the bounds of all pages too, zeros where there is no page."""

    def _check_slots(self, row, where):
        super()._check_slots(row, where)
        if self.of_rows[row].stale:  # the prompt goes on
            return
        pages = jax.device_get(found(self.cache, Pages))
        for head, slots in enumerate(self.of_rows[row].heads):
            expected = np.zeros((2, *pages.low.shape[2:]))
            if len(slots):
                bounds = np.stack(self.of_rows[row].bounds(slots))
                expected[:, : bounds.shape[1]] = bounds
            both = np.stack((pages.low[row, head], pages.high[row, head]))
            if self.of_rows[row].spread is None:
                np.testing.assert_array_equal(both, expected, f"{where}, head {head}")
            else:
                close(both, expected, "accumulated", f"{where}, head {head}")


def pair(
    budget=12, page=4, per_query_head=False, *, first_page=True, spread=1.0, **options
) -> QuestPair:
    tx = Quest(budget, page, per_query_head, (), first_page, spread)

    def row(**attention):
        return reference.Quest(budget, page, per_query_head, first_page, spread, **attention)

    options = {"heads": (2, 2), "width": 104, "max_new": 80, **options}
    return QuestPair(tx, row, **options)


BEFORE = kvjax.SnapKV(0.5, window=8, kernel=3)
CASES = {
    "default": {"budget": 48, "page": 16},
    "per query head": {"budget": 48, "page": 16, "per_query_head": True},
    "small pages, per query head": {"budget": 20, "per_query_head": True, "heads": (1, 4)},
    "odd pages": {"budget": 35, "page": 7, "heads": (3, 2)},
    "share": {"budget": 0.4, "page": 8},
    "bounds": {"budget": 48, "page": 16, "spread": None},
    "far from the mean": {"budget": 0.4, "page": 8, "spread": 2.5, "per_query_head": True},
    "bounds in a window": {
        "budget": 32, "page": 8, "scale": 0.5, "window": 40, "soft_cap": 3.0, "spread": None
    },
    "tiny share": {"budget": 0.01, "page": 5},
    "single tokens": {"budget": 9, "page": 1},
    # Pages outside the window are not taken; of one that is, the window hides some tokens.
    "window": {"budget": 32, "page": 8, "scale": 0.5, "window": 40, "soft_cap": 3.0},
    "short window": {"budget": 32, "page": 8, "window": 13, "per_query_head": True},
    # Heads keep other tokens each, and pages are of what is left.
    "behind SnapKV": {"before": BEFORE},
    # Keys count as their masses say.
    "behind KVMerger": {"before": kvjax.KVMerger(0.5)},
}  # fmt: skip


@pytest.mark.parametrize("name", some_slow(CASES, "per query head", "window"))
def test_every_list_of_64_steps(name):
    both = pair(**CASES[name]).prompt(LENGTHS)
    if "before" in CASES[name]:
        first, second = both.of_rows[0].heads
        assert len(first) < 75 and first.positions.tolist() != second.positions.tolist()
    both.decode(64)


@pytest.mark.parametrize("spread", [None, 0.5])
def test_a_page_of_opposite_keys_looks_good_by_its_extremes(spread):
    """No key of the second page is near the queries, but its extremes are."""
    both = pair(spread=spread)
    both.q = np.abs(both.q)
    both.k[:] = 0.9
    both.k[:, :, 4:8] = np.where(np.arange(8) % 2, 1.5, -1.5) * np.array([1, -1, 1, -1])[:, None]
    both.prompt(LENGTHS).decode(3)
    taken = both.seen[0, 0]
    assert (4 in taken) == (spread is None)


def test_the_first_page_is_always_taken():
    """Keys that no query looks for stand first; by their bound alone they are never chosen."""
    for first_page in (True, False):
        both = pair(first_page=first_page, seed=8)
        both.q, both.k = np.abs(both.q), np.abs(both.k)
        both.k[:, :, :4] *= -1
        both.prompt(LENGTHS).decode(3)
        taken = both.seen[::2, :, 0]
        assert ((taken == 0) == first_page).all()


def test_ties_go_to_the_lower_page():
    both = pair()
    both.k[:] = 1.0  # every page bounds alike
    both.prompt(LENGTHS).decode(3)
    assert both.seen[0, 0].tolist() == [*range(8), 76, 77, -1, -1]


@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.slow
def test_offloaded(per_query_head):
    """Hits and misses, also where rows had no token in some steps, and over two turns."""
    both = pair(16, 4, per_query_head, seed=6, behind=(Offload(recent_steps=2, interval=8),))
    both.prompt(LENGTHS).decode(3).decode(2, (0, 2)).decode(40)
    assert 0.1 < recall_statistics(both.cache).hit_rate < 0.9
    both.prompt((9, 30, 25)).decode(15)
    kinds = kvjax.evaluation.memory_bytes(both.cache)
    assert kinds["pinned_host"] == 2 * both.cache.kv.k.store.nbytes


@pytest.mark.parametrize("spread", [None, 1.0])
def test_bounds_are_in_the_dtype_of_the_keys(spread):
    transform = Quest(48, dense_layers=(), spread=spread)
    tokens = Tokens.random(length=128)
    after = run(transform, tokens, right([0] * 3, (9, 30, 32), 32), 3, dtype=jnp.bfloat16)
    state = after.caches[-1].state
    low, high = (np.asarray(x, np.float32) for x in (state.low, state.high))
    assert state.low.dtype == jnp.bfloat16
    keys = np.asarray(after.caches[-1].kv.k.read(), np.float32)[2]
    if spread is None:
        np.testing.assert_array_equal(low[2, :, 1], keys[:, 16:32].min(1))
        np.testing.assert_array_equal(high[2, :, 2], keys[:, 32:35].max(1))
    else:
        old, new = keys[:, 16:32], keys[:, 32:35]
        close(low[2, :, 1], old.mean(1) - old.std(1), "bfloat16")
        close(high[2, :, 2], new.mean(1) + new.std(1), "bfloat16")


def test_dense_layers():
    layers = kvjax.bind(Quest(64, dense_layers=(0, 3)), num_layers=4)
    assert layers == (kvjax.Full(), Quest(64, dense_layers=()), layers[1], kvjax.Full())
    with pytest.raises(ValueError, match="decides per layer"):
        new_cache(Quest(64))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"budget": 100}, ValueError, "multiple of page=16, got 100"),
        ({"spread": 0}, ValueError, "spread must be finite and above 0, got 0"),
        ({"budget": 12, "page": 8}, ValueError, "at least 24 (3 pages of 8), got 12"),
        ({"dense_layers": (-1,)}, ValueError, "a layer of dense_layers must be at least 0, got -1"),
    ],
    ids=str,
)
def test_refused(given, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Quest(**{"budget": 64, **given})
