"""Quest against its reference: pages, lists of slots and outputs at every call."""

from __future__ import annotations

import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.storage.offload import Offload, recall_statistics
from kvjax.transforms.quest import Pages, Quest
from tests.references import quest as reference
from tests.references.snapkv import SnapKV as ReferenceSnapKV
from tests.support.attending import (
    Tokens,
    attend,
    left,
    middle,
    new_cache,
    right,
    run,
    structure,
)
from tests.support.decode_loops import Seen, Watched, found
from tests.support.tolerances import close

ROWS, HEAD_DIM, LENGTHS = 3, 8, (75, 5, 98)
MAX_PROMPT, MAX_NEW, WIDTH = 128, 80, 104

flush = jax.jit(kvjax.flush)


def clear_best(scores: np.ndarray, count: int) -> list[int]:
    """The reference's choice, refused where float32 might choose otherwise."""
    ordered = -np.sort(-scores)
    if 0 < count < len(ordered):
        gap = ordered[count - 1] - ordered[count]
        assert gap == 0 or gap > 1e-5 * abs(ordered[0]), f"near tie ({gap}): change the seed"
    return sorted(np.argsort(-scores, kind="stable")[:count].tolist())


class Pair:
    """A layer of the library and one reference per row, fed the same tokens and compared.

    Token p of row b is the same random q, k, v whichever call brings it.
    """

    def __init__(self, budget, page=16, per_query_head=False, *, first_page=True, before=(),
                 evicts=None, offload=(), heads=(2, 4), seed=0, **options):  # fmt: skip
        own = Quest(budget, page, per_query_head, dense_layers=(), first_page=first_page)
        self.transform = kvjax.chain(*before, Watched(own), *offload)
        self.page, self.options, self.evicts = page, options, evicts
        self.kv_heads, query_heads = heads
        rng = np.random.default_rng(seed)
        self.rng, tokens = rng, MAX_PROMPT + MAX_NEW

        def draw(count):
            return rng.normal(size=(ROWS, count, tokens, HEAD_DIM)).astype(np.float32)

        self.q, self.k, self.v = draw(query_heads), draw(self.kv_heads), draw(self.kv_heads)
        self.next, self.outs, self.since = np.zeros(ROWS, int), [], 0
        self.references = [
            reference.Quest(budget, page, per_query_head, first_page, **options)
            for _ in range(ROWS)
        ]
        self.cache = new_cache(
            self.transform, ROWS, kv_heads=self.kv_heads, query_heads=query_heads,
            max_prompt=MAX_PROMPT, max_new=MAX_NEW, **options,
        )  # fmt: skip

    @property
    def pages(self):
        return found(self.cache, Pages)

    def _run(self, positions, **call):
        index = np.maximum(positions, 0)[:, None, :, None]
        pad = (positions < 0)[:, None, :, None]
        qkv = [
            np.where(pad, np.float32(100), np.take_along_axis(x, index, axis=2))
            for x in (self.q, self.k, self.v)
        ]
        call |= self.options
        out, self.cache = attend(
            self.transform, self.cache, *map(jnp.asarray, qkv), jnp.asarray(positions), **call
        )
        return qkv, np.asarray(out)

    def prompt(self, counts, layout=right, chunks=1) -> Pair:
        """The next `counts[b]` tokens of every row."""
        if layout is right:
            positions = right(self.next, counts, WIDTH)
        else:
            positions = layout(counts, WIDTH)
            positions = np.where(positions < 0, -1, positions + self.next[:, None])
        self.next += counts
        parts = np.array_split(positions.astype(np.int32), chunks, axis=1)
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            qkv, out = self._run(part, phase="prompt", last=last)
            for row, method in enumerate(self.references):
                expected = method.prompt(*(x[row] for x in qkv), part[row], last)
                close(out[row], expected, "reference", f"row {row}")
            if self.evicts is not None:
                self._evict(*(x.reshape(ROWS, self.kv_heads, -1, *x.shape[2:]) for x in qkv), part)
        self.check_bounds()
        return self

    def _evict(self, q, k, v, positions):
        """The reference keeps what SnapKV's does; one prompt in one piece."""
        for row, method in enumerate(self.references):
            for head, slots in enumerate(method.heads):
                other = self.evicts()
                other.prompt(q[row, head], k[row, head, 0], v[row, head, 0], positions[row])
                kept = set(other.kept)
                slots.keep([i for i, p in enumerate(slots.positions.tolist()) if p in kept])

    def decode(self, steps: int, stopped=()) -> Pair:
        for _ in range(steps):
            going = ~np.isin(np.arange(ROWS), stopped)
            positions = np.where(going, self.next, -1).astype(np.int32)
            self.next += going
            (q, k, v), out = self._run(positions[:, None], phase="decode")
            seen = np.asarray(found(self.cache, Seen).positions)
            for row, method in enumerate(self.references):
                if positions[row] < 0:
                    assert not out[row].any()
                    continue
                with mock.patch.object(reference, "best", clear_best):
                    expected, selected = method.decode(
                        q[row, :, 0], k[row, :, 0], v[row, :, 0], positions[row]
                    )
                where = f"row {row}, position {positions[row]}"
                assert [own[own >= 0].tolist() for own in seen[row]] == selected, where
                close(out[row, :, 0], expected, "reference", where)
            self.outs.append(out)
            self.since += 1
            interval = kvjax.flush_interval(self.cache)
            if interval is not None and self.since % interval == 0:
                self.cache = flush(self.cache)
        assert int(self.cache.kv.dropped.max()) == 0
        self.check_bounds()
        return self

    def check_bounds(self):
        """Element by element, zeros where there is no page."""
        pages = jax.device_get(self.pages)
        for row, method in enumerate(self.references):
            for head, slots in enumerate(method.heads):
                expected = np.zeros((2, *pages.low.shape[2:]))
                if len(slots):
                    bounds = np.stack(reference.page_bounds(slots.keys, self.page))
                    expected[:, : bounds.shape[1]] = bounds
                own = np.stack((pages.low[row, head], pages.high[row, head]))
                np.testing.assert_array_equal(own, expected, f"row {row}, head {head}")


CASES = {
    # budget, page, per_query_head, KV heads and query heads
    "default": (48, 16, False, (2, 4)),
    "per query head": (48, 16, True, (2, 4)),
    "small pages": (12, 4, False, (2, 2)),
    "small pages, per query head": (20, 4, True, (1, 4)),
    "odd pages": (35, 7, False, (3, 6)),
    "share": (0.4, 8, False, (2, 4)),
    "share, per query head": (0.6, 4, True, (2, 4)),
    "tiny share": (0.01, 5, False, (2, 4)),
    "single tokens": (9, 1, False, (2, 4)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.fast_cases("per query head")
def test_every_list_of_64_steps(case):
    budget, page, per_query_head, heads = case
    Pair(budget, page, per_query_head, heads=heads).prompt(LENGTHS).decode(64)


def test_the_first_page_is_always_taken():
    """Keys that no query looks for stand first; by their bound alone they are never chosen."""
    for first_page in (True, False):
        both = Pair(12, 4, first_page=first_page, seed=8)
        both.q, both.k = np.abs(both.q), np.abs(both.k)
        both.k[:, :, :4] *= -1
        both.prompt(LENGTHS).decode(3)
        taken = np.asarray(found(both.cache, Seen).positions)[::2, :, 0]
        assert ((taken == 0) == first_page).all()


@pytest.mark.parametrize("layout", [left, middle])
@pytest.mark.slow
def test_padding_and_chunks(layout):
    Pair(12, 4, seed=1).prompt(LENGTHS, layout, chunks=3).decode(5)


def test_rows_that_stop_and_go_on():
    """A step without a token changes no page; a row may begin with its first new token."""
    both = Pair(12, 4, seed=2).prompt((30, 0, 9)).decode(6, stopped=(1,))
    both.decode(9, stopped=(0, 2)).decode(7).decode(3, stopped=(0,)).decode(20)


def test_attention_options():
    """Pages outside the window are not taken; of one that is, the window hides some tokens."""
    Pair(32, 8, seed=3, scale=0.5, window=40, soft_cap=3.0).prompt(LENGTHS).decode(20)
    Pair(32, 8, seed=3, window=13, per_query_head=True).prompt(LENGTHS).decode(20)


@pytest.mark.parametrize("budget", [20, 0.25])
@pytest.mark.slow
def test_further_turns(budget):
    """Everything live is paged anew; the last row gets nothing of the second prompt."""
    both = Pair(budget, 4, seed=4).prompt(LENGTHS).decode(21)
    both.prompt((9, 30, 0), middle).decode(20).prompt((1, 2, 3)).decode(20)


@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.slow
def test_behind_snapkv(per_query_head):
    """Heads keep other tokens each, and pages are of what is left."""
    both = Pair(
        12, 4, per_query_head, seed=5,
        before=(kvjax.SnapKV(0.5, window=8, kernel=3),),
        evicts=lambda: ReferenceSnapKV(0.5, observation=8, kernel=3),
    )  # fmt: skip
    both.prompt(LENGTHS)
    first, second = both.references[0].heads
    assert len(first) < 75 and first.positions.tolist() != second.positions.tolist()
    both.decode(60)


@pytest.mark.parametrize("stopped", [(), (0, 2)])
@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.slow
def test_offloaded_is_the_same(per_query_head, stopped):
    """Token for token, hits and misses, also where rows had no token in some steps."""
    given = (16, 4, per_query_head)
    plain = Pair(*given, seed=6)
    moved = Pair(*given, seed=6, offload=(Offload(interval=8),))
    for both in (plain, moved):
        both.prompt(LENGTHS).decode(3).decode(2, stopped).decode(58)
    close(np.stack(moved.outs), np.stack(plain.outs), "exact")
    rate = recall_statistics(moved.cache).hit_rate
    assert 0.1 < rate < 0.9
    kinds = kvjax.memory_bytes(moved.cache)
    assert kinds["pinned_host"] == 2 * moved.cache.kv.k.store.nbytes


@pytest.mark.slow
def test_offloaded_over_two_turns():
    both = Pair(16, 4, seed=7, offload=(Offload(recent_steps=2, interval=8),))
    both.prompt(LENGTHS).decode(21).prompt((9, 30, 25)).decode(20)


@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.slow
def test_a_budget_for_everything_is_the_full_cache(per_query_head):
    def outputs(transform):
        positions = right([0] * ROWS, LENGTHS, WIDTH)
        tokens = Tokens.random(length=MAX_PROMPT)
        return run(transform, tokens, positions, 20, max_prompt=WIDTH, max_new=20).outs

    quest = Quest(128, per_query_head=per_query_head, dense_layers=())
    for own, expected in zip(outputs(quest), outputs(kvjax.Full()), strict=True):
        close(own, expected)


def test_ties_go_to_the_lower_page():
    both = Pair(12, 4)
    both.k[:] = 1.0  # every page bounds alike
    both.prompt(LENGTHS).decode(3)
    seen = np.asarray(found(both.cache, Seen).positions)
    assert seen[0, 0].tolist() == [*range(8), 76, 77, -1, -1]


# --- compiled ---


def steps(transform, cache, q, k, start: int, count: int):
    """`count` decode steps, the token of each different."""

    def step(cache, i):
        at = jnp.full((len(q), 1), start, jnp.int32) + i
        turn = jnp.cos(i.astype(jnp.float32))
        out, cache = kvjax.attend(transform, cache, q * turn, k * turn, k, at, phase="decode")
        return cache, out

    return jax.lax.scan(step, cache, jnp.arange(count, dtype=jnp.int32))


@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.slow
def test_scan_equals_the_loop(per_query_head):
    transform = Quest(12, 4, per_query_head, dense_layers=())
    tokens = Tokens.random(length=MAX_PROMPT)
    cache = run(transform, tokens, right([0] * 3, (9, 30, 32), 32), 0).prompt_cache
    q, k, _, _ = tokens.at(np.zeros((3, 1)))
    scanned, outs = jax.jit(steps, static_argnums=(0, 4, 5))(transform, cache, q, k, 32, 12)
    assert structure(scanned) == structure(cache)
    for step in range(12):
        turn = jnp.cos(jnp.float32(step))
        at = jnp.full((3, 1), 32 + step, jnp.int32)
        out, cache = attend(transform, cache, q * turn, k * turn, k, at, phase="decode")
        close(out, outs[step], "rounding")
    for own, other in zip(jax.tree.leaves(scanned), jax.tree.leaves(cache), strict=True):
        close(own, other, "rounding")


def test_a_step_copies_no_bounds():
    """Bounds are widened in place: a loop of steps needs a fraction of their room."""
    transform = Quest(12, 4, dense_layers=())
    size = {"kv_heads": 4, "query_heads": 8, "head_dim": 64, "max_prompt": 4096, "max_new": 64}
    init = functools.partial(kvjax.init_cache, transform, batch=1, dtype=jnp.float32, **size)
    cache = jax.eval_shape(init)
    q, k = (jax.ShapeDtypeStruct((1, heads, 1, 64), jnp.float32) for heads in (8, 4))
    loop = jax.jit(steps, static_argnums=(0, 4, 5), donate_argnums=1)
    memory = loop.lower(transform, cache, q, k, 4096, 64).compile().memory_analysis()
    bounds = kvjax.nbytes((cache.state.low, cache.state.high))
    assert bounds == kvjax.nbytes((cache.kv.k, cache.kv.v)) // 4
    assert memory.temp_size_in_bytes < bounds / 8
    assert memory.alias_size_in_bytes > kvjax.nbytes((cache.kv.k, cache.kv.v)) + bounds


def test_bounds_are_in_the_dtype_of_the_keys():
    transform = Quest(48, dense_layers=())
    tokens = Tokens.random(length=MAX_PROMPT)
    after = run(transform, tokens, right([0] * 3, (9, 30, 32), 32), 3, dtype=jnp.bfloat16)
    state = after.caches[-1].state
    low, high = (np.asarray(x, np.float32) for x in (state.low, state.high))
    assert state.low.dtype == jnp.bfloat16
    keys = np.asarray(after.caches[-1].kv.k.read(), np.float32)[2]
    np.testing.assert_array_equal(low[2, :, 1], keys[:, 16:32].min(1))
    np.testing.assert_array_equal(high[2, :, 2], keys[:, 32:35].max(1))


# --- values ---


def test_dense_layers():
    layers = kvjax.bind(Quest(64, dense_layers=(0, 3)), num_layers=4)
    assert layers == (kvjax.Full(), Quest(64, dense_layers=()), layers[1], kvjax.Full())
    offloaded = kvjax.bind(kvjax.chain(Quest(64), Offload()), num_layers=3)
    assert offloaded[:2] == (kvjax.Full(), kvjax.Full())
    with pytest.raises(ValueError, match="decides per layer"):
        new_cache(Quest(64))


def test_lists_are_no_longer_than_the_cache():
    for budget, slots in ((16_384, 48), (0.9, 48), (48, 48), (1.0, 48)):
        cache = new_cache(Quest(budget, dense_layers=()))  # 44 slots
        assert cache.kv.lists == (2, slots)
    assert new_cache(Quest(20, 4, True, dense_layers=())).kv.lists == (4, 20)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"budget": 32}, ValueError, r"at least 48 (3 pages of 16), got 32"),
        ({"budget": 100}, ValueError, "multiple of page=16, got 100"),
        ({"budget": 12, "page": 8}, ValueError, r"at least 24 (3 pages of 8), got 12"),
        ({"budget": 0.0}, ValueError, r"float budget must lie in (0, 1], got 0.0"),
        ({"budget": 1.5}, ValueError, r"float budget must lie in (0, 1], got 1.5"),
        ({"budget": "64"}, TypeError, "budget must be an int (slots) or a float"),
        ({"budget": True}, TypeError, "got True"),
        ({"page": 0}, ValueError, "page must be at least 1, got 0"),
        ({"page": 16.0}, TypeError, "page must be an int, got 16.0"),
        ({"first_page": 1}, TypeError, "first_page must be True or False, got 1"),
        ({"per_query_head": 1}, TypeError, "per_query_head must be True or False, got 1"),
        ({"dense_layers": [0]}, TypeError, "tuple of layer numbers, got [0]"),
        ({"dense_layers": (-1,)}, ValueError, "a layer of dense_layers must be at least 0, got -1"),
    ],
)
def test_refused(given, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Quest(**{"budget": 64, **given})


def test_no_method_before_it_frees_while_decoding():
    with pytest.raises(ValueError, match="the index would go stale"):
        kvjax.chain(kvjax.H2O(64), Quest(64))
