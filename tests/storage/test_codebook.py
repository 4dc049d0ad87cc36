"""The codebook payload against its reference, vector by vector."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.payload import Seen, Slots
from kvjax.storage.references import Book, CodebookPayload
from tests.kernels.test_greedy_cover import around
from tests.references import codebook as reference
from tests.references.attention import softmax_attention
from tests.references.rope import rope as rotate
from tests.support.attending import INV_FREQ, Tokens, decode, new_cache, prompt, right
from tests.support.tolerances import close

BATCH, LISTS, SLOTS, DIM = 2, 4, 13, 8


@jax.jit
def encode_all(k, v, x, slots):
    return k.encode(v, x, x, slots)


write = jax.jit(CodebookPayload.write)
read_all = jax.jit(CodebookPayload.read)


def encode(x, position, live, book):
    """One payload; a second one beside it has a book of its own."""
    k, v = (
        CodebookPayload.zeros(x.shape, x.dtype, own) for own in (book, replace(book, theta=1.0))
    )
    every = np.ones(len(x), bool)
    payload, other = encode_all(k, v, x, Slots(np.where(live, position, -1), live, every))
    assert other.book.theta == 1.0 and (np.asarray(other.count) >= np.asarray(payload.count)).all()
    return payload


def rows(seed=0, slots=SLOTS, lists=LISTS):
    return np.stack(
        [around(lists * slots, DIM, seed + b).reshape(lists, slots, DIM) for b in range(BATCH)]
    )


def layout(copies: int):
    """Positions and what is live: heads that hold different tokens, in no order, some of them."""
    rng = np.random.default_rng(1)
    position = rng.permuted(np.tile(np.arange(20), (BATCH, LISTS, 1)), axis=-1)[..., :SLOTS]
    live = rng.random(position.shape) < 0.8
    x = rows(slots=20, lists=LISTS // copies)
    x = np.repeat(x, copies, axis=1)
    return np.take_along_axis(x, position[..., None], axis=2), position, live


def referred(x, position, live, book: Book):
    """A reference's book of one row, and each slot's code as it has it."""
    lists = [(int(position[i, s]), i // book.copies, i, s) for i, s in np.argwhere(live)]
    vertices = sorted({at[:2] for at in lists})
    weights = [sum(at[:2] == vertex for at in lists) for vertex in vertices]
    vectors = {at[:2]: x[at[2], at[3]] for at in lists}
    one = reference.Codebook(book.theta, book.entries, book.magnitude)
    index, norms = one.encode(np.array([vectors[v] for v in vertices]), weights)
    codes = dict(zip(vertices, zip(index, norms, strict=True), strict=True))
    return one, {(i, s): codes[p, h] for p, h, i, s in lists}


def check_row(payload, row, one, codes):
    assert int(payload.count[row]) == len(one) and int(payload.overflow[row]) == one.overflow
    close(payload.entries[row, 0, : len(one)], one.entries, "reference")
    assert not np.asarray(payload.entries[row, 0, len(one) : payload.book.entries]).any()
    for (i, s), (entry, norm) in codes.items():
        assert int(payload.index[row, i, s]) == entry, (row, i, s)
        if payload.magnitude is not None:
            close(payload.magnitude[row, i, s], norm, "reference")


BOOKS = [
    Book(0.9, 60, True, 3), Book(0.97, 12, True, 4),
    Book(0.9, 60, False, 5), Book(0.97, 20, True, 3, 2),
]  # fmt: skip


@pytest.mark.parametrize("book", BOOKS, ids=str)
@pytest.mark.slow
def test_encode_and_write(book):
    """What a prompt's end makes, and what new tokens then add; one is not stored."""
    x, position, live = layout(book.copies)
    payload = encode(x, position, live, book)
    refs = [referred(x[b], position[b], live[b], book) for b in range(BATCH)]
    for row, (one, codes) in enumerate(refs):
        check_row(payload, row, one, codes)

    new = np.repeat(rows(50, 3, LISTS // book.copies), book.copies, axis=1)
    new[0, :, 1] = 0
    slots = np.broadcast_to(np.array([4, 0, 7]), (BATCH, LISTS, 3)).copy()
    slots[1, :, 1] = SLOTS
    payload = write(payload, slots, new)
    read = np.asarray(read_all(payload))
    for row, i, t in np.ndindex(BATCH, LISTS, 3):  # what waits is read as it is
        if slots[row, i, t] < SLOTS:
            np.testing.assert_array_equal(read[row, i, slots[row, i, t]], new[row, i, t])
    payload = jax.jit(lambda p: p.flush(book.interval))(payload)
    assert (np.asarray(payload.room) == book.interval).all()
    heads = range(0, LISTS, book.copies)
    after = np.asarray(read_all(payload))
    for row, (one, codes) in enumerate(refs):
        there = [(t, i) for t in range(3) for i in heads if slots[row, i, t] < SLOTS]
        index, norms = one.append(np.array([new[row, i, t] for t, i in there]))
        for (t, i), *code in zip(there, index, norms, strict=True):
            for j in range(book.copies):
                codes[i + j, slots[row, i, t]] = tuple(code)
        check_row(payload, row, one, codes)
        for (i, s), (entry, norm) in codes.items():
            close(after[row, i, s], one.read([entry], [norm])[0], "reference")


def payload_of(book: Book, slots=SLOTS):
    x = rows(slots=slots)
    position = np.broadcast_to(np.arange(slots), x.shape[:3])
    return encode(x, position, np.ones(x.shape[:3], bool), book)


@pytest.mark.slow
@pytest.mark.parametrize("book", [Book(0.9, 60, True)], ids=str)
def test_moving(book):
    payload = payload_of(book)
    dense, rng = np.asarray(payload.read()), np.random.default_rng(0)
    index = rng.integers(SLOTS, size=(BATCH, LISTS, 5))
    picked = np.take_along_axis(dense, index[..., None], axis=2)
    np.testing.assert_array_equal(payload.read(index), picked)
    source, slots = (np.broadcast_to(x, (BATCH, LISTS, 3)) for x in ([6, 4, 5], [4, 5, 6]))
    moved = payload.flush(0, (source, slots)).read()
    np.testing.assert_array_equal(moved[:, :, 4:7], dense[:, :, [6, 4, 5]])
    # What has been encoded once is read as it was, whatever its new book.
    again = payload.write(None, dense)
    close(again.read(), dense, "reference")
    assert jax.tree.structure(again) == jax.tree.structure(payload)


def test_what_has_room_is_not_encoded():
    """Of two rows, the one that has too little room for the steps to come."""
    payload, new = payload_of(Book(0.9, 60, True, 3)), rows(50, 3)
    slots = np.broadcast_to(np.array([4, 0, 7]), (BATCH, LISTS, 3)).copy()
    slots[1, :, 1:] = SLOTS
    waiting = write(payload, slots, new)
    assert waiting.room.tolist() == [0, 2]
    flushed = jax.jit(lambda p: p.flush(2))(waiting)
    assert flushed.room.tolist() == [3, 2]
    for old, after in zip(*map(jax.tree.leaves, (waiting, flushed)), strict=True):
        np.testing.assert_array_equal(old[1], after[1])
    assert int(flushed.count[0]) > int(waiting.count[0])


@pytest.mark.slow
def test_a_turn_of_one_row():
    """What the others have stored stays bit for bit, encoded and recent."""
    transform = kvjax.Codebook(0.9, 0.9, capacity=60, interval=4)
    tokens, lengths = Tokens.random(), np.array([20, 9, 5])
    _, cache = prompt(transform, new_cache(transform), tokens, right((0, 0, 0), lengths, 20))
    for step in range(3):
        _, cache = decode(transform, cache, tokens, lengths + step)
    _, after = prompt(transform, cache, tokens, right(lengths + 3, (4, 0, 0), 4))
    leaves = [jax.tree.leaves((x.kv.k, x.kv.v)) for x in (cache, after)]
    for old, new in zip(*leaves, strict=True):
        np.testing.assert_array_equal(old[1:], new[1:])
    assert after.kv.k.waiting.tolist() == [0, 3, 3]
    assert np.asarray(after.kv.live).sum(-1)[:, 0].tolist() == [27, 12, 8]


@pytest.mark.parametrize(
    ("slots", "entries", "magnitude"),
    list(itertools.product((13, 2500), (10, 3000), (False, True))),
)
@pytest.mark.fast_cases("13-3000-False")
def test_attention_on_the_codebook(slots, entries, magnitude):
    """As over the decoded rows, for fewer and for more entries than slots, and in blocks."""
    rng = np.random.default_rng(0)
    book = Book(0.9, entries, magnitude, 3)
    shape = (BATCH, LISTS, slots)
    k, v = (
        replace(
            CodebookPayload.zeros((*shape, DIM), jnp.float32, book),
            entries=rng.normal(size=(BATCH, 1, entries + 3 * LISTS, DIM)).astype(np.float32),
            index=rng.integers(entries, size=shape).astype(np.uint16),
            magnitude=rng.uniform(0.5, 2, size=shape).astype(np.float32) if magnitude else None,
            count=np.full(BATCH, entries, np.int32),
        )
        for _ in range(2)
    )
    at = rng.permuted(np.tile(np.arange(slots), (BATCH, LISTS, 1)), axis=-1)[..., :2]
    k, v = (write(payload, at, rows(seed, slots=2)) for seed, payload in enumerate((k, v)))
    keys, values = (np.asarray(read_all(payload), np.float64) for payload in (k, v))
    q = rng.normal(size=(BATCH, LISTS, 3, 1, DIM)).astype(np.float32)
    position = rng.integers(100, size=shape)
    log_mass = rng.normal(size=shape).astype(np.float32)
    where, used = np.full((BATCH, 1), 100), np.full((BATCH, LISTS), slots)
    for frequencies in (None, INV_FREQ, INV_FREQ[:2]):  # the last leaves half of the channels alone
        turn = None
        if frequencies is not None:
            turn = kvjax.Rope(frequencies.astype(np.float32)).at(position)
        seen = Seen(log_mass, position, used, turn)
        out, found = attention(k, v, q, seen, where)
        for row, head in np.ndindex(BATCH, LISTS):
            turned = keys[row, head]
            if turn is not None:
                turned = rotate(turned, position[row, head], frequencies)
            expected, p = softmax_attention(
                q[row, head].astype(np.float64), turned, values[row, head], where[row],
                position[row, head], log_mass[row, head],
            )  # fmt: skip
            close(out[row, head], expected, "float32" if turn is None else "accumulated")
            close(found[row, head], p, "float32" if turn is None else "accumulated")


@jax.jit
def attention(k, v, q, seen, where):
    return k.attention(
        v, q, seen, where, probabilities=True, implementation=None, scale=DIM**-0.5, window=None,
        soft_cap=None,
    )  # fmt: skip


def test_bytes():
    """Entries, those of new rows, 16 bits of index, a magnitude in the cache's dtype, counters."""
    book = Book(0.9, 100, True, 3)
    payload = CodebookPayload.zeros((2, 4, 50, 8), jnp.bfloat16, book)
    assert kvjax.nbytes(payload) == 2 * ((100 + 3 * 4) * 8 * 2 + 4 * 50 * (2 + 2) + 3 * 4)
    large = CodebookPayload.zeros((1, 1, 5, 8), jnp.float32, Book(0.9, 2**16, False))
    assert large.index.dtype == jnp.uint32 and large.magnitude is None
    assert CodebookPayload.zeros(
        (1, 1, 5, 8), jnp.float32, Book(0.9, 2**16 - 1, False)
    ).index.dtype == (jnp.uint16)


@pytest.mark.slow
def test_thresholds_of_one_are_the_dense_cache():
    """Prompt in chunks, decoding, a second turn: as the method before alone."""
    base = kvjax.SnapKV(budget=20, window=4)
    booked = kvjax.chain(base, kvjax.Codebook(1.0, 1.0, capacity=1.0))
    tokens, lengths = Tokens.random(), np.array([30, 4, 17])
    outs = []
    for transform in (base, booked):
        cache, found = new_cache(transform, max_prompt=40), []
        for part in np.array_split(right((0, 0, 0), lengths, 30), 2, axis=1):
            last = part[0, -1] == 29
            out, cache = prompt(transform, cache, tokens, part, last)
            found.append(out)
        for step in range(3):
            out, cache = decode(transform, cache, tokens, lengths + step)
            found.append(out)
        out, cache = prompt(transform, cache, tokens, right(lengths + 3, (4, 4, 0), 4))
        outs.append([*found, out])
    assert int(cache.kv.k.overflow.sum() + cache.kv.v.overflow.sum()) == 0
    for dense, read in zip(*outs, strict=True):
        close(read, dense)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"theta_key": 0.0}, ValueError),
        ({"theta_key": 1.01}, ValueError),
        ({"theta_value": -0.5}, ValueError),
        ({"theta_value": "high"}, TypeError),
        ({"capacity": 0}, ValueError),
        ({"capacity": 0.0}, ValueError),
        ({"capacity": 1.5}, ValueError),
        ({"capacity": None}, TypeError),
        ({"interval": 0}, ValueError),
        ({"magnitude": 1}, TypeError),
    ],
)
def test_bad_input(bad, error):
    with pytest.raises(error, match=next(iter(bad))):
        kvjax.Codebook(**bad)


def test_what_cannot_follow():
    book = kvjax.Codebook()
    with pytest.raises(ValueError, match="merges slots while decoding"):
        kvjax.chain(kvjax.CaM(kvjax.StreamingLLM(budget=8)), book)
    with pytest.raises(ValueError, match="unrotated"):
        kvjax.chain(book, kvjax.Quest(budget=64, dense_layers=()))
    with pytest.raises(ValueError, match="represent"):
        kvjax.chain(book, kvjax.H2O(budget=8))
