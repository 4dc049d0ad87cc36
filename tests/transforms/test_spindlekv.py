"""SpindleKV against its reference: the schedule, the eviction, and both parts together."""

from __future__ import annotations

import functools
from fractions import Fraction

import numpy as np
import pytest

import kvjax
import kvjax.evaluation
from kvjax.transforms.spindlekv.schedule import SpindleBudget
from tests.references import spindlekv
from tests.references.codebook import paper_ratios, reserve_ratio
from tests.references.rope import rope as rotate
from tests.references.spindlekv import layer_tokens
from tests.support.attending import (
    HEAD_DIM,
    INV_FREQ,
    KV_HEADS,
    Tokens,
    new_cache,
    prompt,
    right,
    the_rope,
)
from tests.support.method_pair import LENGTHS, WIDTH, Pair
from tests.support.tolerances import close

WINDOW = 8


class SpindlePair(Pair):
    """Compares the codebooks too, whenever all that the reference encodes has been flushed."""

    def expected_kept(self, row):
        return super().expected_kept(row) or [[]] * self.host.shape[1]

    def prompt(self, *args, **options):
        super().prompt(*args, **options)
        return self.check_codes()

    def decode(self, *args, **options):
        super().decode(*args, **options)
        return self.check_codes()

    def check_codes(self):
        for row, reference in enumerate(self.of_rows):
            if isinstance(reference, spindlekv.SpindleKV):
                kv = self.cache.kv
                self._check_codes(row, kv.k, reference.key_book, reference.key_codes)
                self._check_codes(row, kv.v, reference.value_book, reference.value_codes)
        return self

    def _check_codes(self, row, payload, book, codes):
        """Entries, what overflowed, and every slot's entry and norm."""
        assert int(payload.count[row]) == len(book) and int(payload.overflow[row]) == book.overflow
        close(payload.entries[row, 0, : len(book)], book.entries, "reference", f"row {row}")
        position, index = self.host.position[row], np.asarray(payload.index)[row]
        norms = None if payload.magnitude is None else np.asarray(payload.magnitude)[row]
        for i, s in np.argwhere(position >= 0):
            code = codes.get((int(position[i, s]), i // self.cache.kv.unfolded))
            if code is None:  # not encoded yet
                assert index[i, s] >= payload.book.entries
                continue
            entry, norm = code
            assert index[i, s] == entry, (row, i, s)
            if norms is not None:
                close(norms[i, s], norm, "reference")


def pair(transform, kind, reserve=0.6, layer=0, seed=0, **chosen) -> SpindlePair:
    """A layer of two."""
    rope = functools.partial(rotate, inv_freq=INV_FREQ)
    reference = functools.partial(
        kind, reserve, layer, 2, KV_HEADS, observation=WINDOW, rope=rope, **chosen
    )
    bound = kvjax.bind(transform, 2)[layer]
    return SpindlePair(
        bound, reference, whole_rows=True, rope=the_rope(), late=True, layer=layer, seed=seed
    )


# --- the schedule ---------------------------------------------------------------------------------

ALL_LENGTHS = np.array([0, 1, 31, 32, 33, 34, 50, 100, 257, 1000, 4097])


@pytest.mark.parametrize("num_layers", [1, 2, 7, 32])
@pytest.mark.parametrize("reserve", [0.1, 0.5, 1.0, 1 / 3, 0.5357])
def test_schedule(reserve, num_layers):
    """As the reference has it; the mean is the reserve, within a token of each layer."""
    got = SpindleBudget(reserve, 32, 0.05, num_layers)(ALL_LENGTHS)
    expected = [
        [32 + layer_tokens(reserve, int(n), 32, i, num_layers) for n in ALL_LENGTHS]
        for i in range(num_layers)
    ]
    np.testing.assert_array_equal(got, expected)
    share = Fraction(float(reserve)).limit_denominator(10**6)
    for length, slots in zip(ALL_LENGTHS.tolist(), got.T.tolist(), strict=True):
        short = max(share * length, 32) - Fraction(sum(slots), num_layers)
        assert 0 <= short < 1, length


def test_schedule_of_awkward_fractions():
    """Products beyond 64 bits."""
    reserve, beta = 0.123457, 0.076543
    lengths = np.array([40, 100_000, 131_072])
    got = SpindleBudget(reserve, 32, beta, 101)(lengths)[50]
    expected = [32 + layer_tokens(reserve, int(n), 32, 50, 101, beta) for n in lengths]
    assert got.dtype == np.int64 and got.tolist() == expected


# --- against the reference ------------------------------------------------------------------------


BOOKED = [
    {"unfold": False, "capacity": 400, "interval": 2},
    {"unfold": True, "capacity": 400, "interval": 1},
    {"unfold": True, "capacity": 12, "interval": 3, "magnitude": False},
]


def around(x, seed):
    """Keys or values of any length around few directions."""
    rng = np.random.default_rng(seed)
    middle = rng.normal(size=(12, HEAD_DIM))[rng.integers(12, size=x.shape[:-1])]
    near = middle + 0.15 * rng.normal(size=x.shape)
    return (near * rng.uniform(0.3, 2.0, size=(*x.shape[:-1], 1))).astype(np.float32)


@pytest.mark.parametrize("chosen", BOOKED, ids=str)
@pytest.mark.slow
def test_spindlekv(chosen):
    """Outputs, kept tokens, every code and every entry, at each call; a book that overflows too."""
    chosen = {"theta_key": 0.97, "theta_value": 0.95, **chosen}
    transform = kvjax.SpindleKV(0.6, window=WINDOW, **chosen)
    both = pair(transform, spindlekv.SpindleKV, **chosen)
    both.k, both.v = around(both.k, 1), around(both.v, 2)
    both.prompt(LENGTHS, "scattered")
    if chosen["capacity"] > 100:
        assert 12 <= int(both.cache.kv.k.count.max()) < both.cache.kv.live[2].sum()
    else:
        assert int(both.cache.kv.k.overflow[2]) > 0
    both.decode(6).prompt((9, 30, 0), chunks=2).decode(6)


# --- what a codebook saves ------------------------------------------------------------------------


def prompted(reserve, capacity, tokens):
    """The cache of the first of two layers after a prompt, with codes made at every step."""
    transform = kvjax.SpindleKV(reserve, window=WINDOW, capacity=capacity, unfold=True, interval=1)
    layer = kvjax.bind(transform, 2)[0]
    empty = new_cache(layer, max_prompt=128, max_new=16, layer=0)
    return prompt(layer, empty, tokens, right((0, 0, 0), LENGTHS, WIDTH))[1]


def test_reserve_ratio():
    """Counted by hand from what the caches hold; stored bytes are those of the arrays."""
    tokens = Tokens.random(length=128)
    cache = prompted(0.6, 100, Tokens(tokens.q, around(tokens.k, 1), around(tokens.v, 2)))
    got, kv = kvjax.evaluation.reserve_ratio([cache, cache], np.array(LENGTHS)), cache.kv
    tokens, kept = sum(LENGTHS), int(kv.live.sum())
    entries = int(kv.k.count.sum() + kv.v.count.sum())
    size = {"kv_heads": KV_HEADS, "dim": HEAD_DIM, "index_bytes": 2}
    assert got.used == pytest.approx(reserve_ratio(entries, kept, tokens, **size))
    assert got.stored == pytest.approx(reserve_ratio(600, 3 * 4 * kv.slots, tokens, **size))
    sizes = zip(
        (kv.k.count + kv.v.count).tolist(), kv.live.sum((1, 2)).tolist(), LENGTHS, strict=True
    )
    each = [np.prod(paper_ratios(e, n, length, 4, HEAD_DIM)) for e, n, length in sizes]
    assert got.equation_15 == pytest.approx(np.mean(each))
    whole = (got.stored + got.beside) * 2 * tokens * KV_HEADS * HEAD_DIM * 4
    assert kvjax.nbytes(cache) == pytest.approx(whole)
    assert got.overflow == 0
    with pytest.raises(TypeError, match="codebooks"):
        kvjax.evaluation.reserve_ratio([new_cache(kvjax.Full())], np.array(LENGTHS))


def test_overflow_is_a_share_of_the_vectors():
    """Query heads that keep one token have one vector of it, read as an entry too far away."""
    given = Tokens.random(length=128)
    cache = prompted(1.0, 16, given)
    kv, far, kept = cache.kv, 0, 0
    for payload, exact, theta in ((kv.k, given.k, 0.98), (kv.v, given.v, 0.95)):
        read, seen = np.asarray(payload.read(), np.float64), set()
        for row, own, slot in np.argwhere(np.asarray(kv.live)):
            token = int(row), own // kv.unfolded, int(kv.position[row, own, slot])
            if token in seen:
                continue
            seen.add(token)
            pair = read[row, own, slot], exact[token].astype(np.float64)
            cosine = np.dot(*pair) / np.prod([np.linalg.norm(x) for x in pair])
            far += cosine <= theta
        kept += len(seen)
    assert 0 < far < kept
    assert kvjax.evaluation.reserve_ratio([cache], np.array(LENGTHS)).overflow == pytest.approx(
        far / kept
    )


@pytest.mark.slow
def test_vectors_that_are_gone_are_no_more_than_all_that_is_kept():
    tx = kvjax.chain(kvjax.StreamingLLM(8, sinks=1), kvjax.Codebook(capacity=2))
    cache = kvjax.init_cache(
        tx, batch=1, kv_heads=1, head_dim=8, max_prompt=32, max_new=0, dtype="float32"
    )
    rows = np.random.default_rng(0).normal(size=(1, 1, 32, 8)).astype(np.float32)
    for start in range(0, 32, 8):
        turn, positions = rows[:, :, start : start + 8], np.arange(start, start + 8)[None]
        _, cache = kvjax.attend(
            cache, turn, turn, turn, positions, phase="prompt", rope=kvjax.Rope(np.zeros(4))
        )
    assert int(cache.kv.k.overflow[0]) > int(cache.kv.live.sum()) == 8
    assert kvjax.evaluation.overflow_share([cache]) == 1.0


@pytest.mark.parametrize("bad", [{"reserve": 1.5}, {"beta": 2.0}], ids=str)
def test_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        kvjax.LayerBudgetEviction(**{"reserve": 0.5, **bad})
