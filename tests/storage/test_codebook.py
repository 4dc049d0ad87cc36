"""The codebook payload against its reference, vector by vector."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.rope import Rotation
from kvjax.storage.references import Book, CodebookPayload, Fresh
from tests.kernels.test_greedy_cover import around
from tests.references import codebook as reference
from tests.references.rope import rope as rotate
from tests.support.attending import INV_FREQ, Tokens, decode, new_cache, prompt, right
from tests.support.tolerances import close

BATCH, LISTS, SLOTS, DIM = 2, 4, 13, 8
encode_all = functools.partial(jax.jit, static_argnums=3)(CodebookPayload.encode)


def encode(x, position, live, book):
    """One payload; a second one beside it has a book of its own."""
    payload, other = encode_all(np.stack([x, x]), position, live, (book, replace(book, theta=1.0)))
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
    assert not np.asarray(payload.entries[row, 0, len(one) :]).any()
    for (i, s), (entry, norm) in codes.items():
        assert int(payload.index[row, i, s]) == entry, (row, i, s)
        if payload.magnitude is not None:
            close(payload.magnitude[row, i, s], norm, "reference")


BOOKS = [
    Book(0.9, 60, True), Book(0.97, 12, True, 2),
    Book(0.9, 60, False, 5), Book(0.97, 20, True, 3, 2),
]  # fmt: skip


@pytest.mark.parametrize("book", BOOKS, ids=str)
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
    payload = jax.jit(CodebookPayload.write)(payload, slots, new)
    read = np.asarray(payload.read())
    for row, i in np.ndindex(BATCH, LISTS):  # what waits is read as it is
        np.testing.assert_array_equal(read[row, i, 7], new[row, i, 2])
    payload = jax.jit(CodebookPayload.encode_fresh)(payload, True)
    heads = range(0, LISTS, book.copies)
    for row, (one, codes) in enumerate(refs):
        there = [(t, i) for t in range(3) for i in heads if slots[row, i, t] < SLOTS]
        index, norms = one.append(np.array([new[row, i, t] for t, i in there]))
        for (t, i), *code in zip(there, index, norms, strict=True):
            for j in range(book.copies):
                codes[i + j, slots[row, i, t]] = tuple(code)
        check_row(payload, row, one, codes)
        read = np.asarray(payload.read())[row]
        for (i, s), (entry, norm) in codes.items():
            close(read[i, s], one.read([entry], [norm])[0], "reference")


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
    np.testing.assert_array_equal(payload.take(index).read(), picked)
    np.testing.assert_array_equal(payload.span(jnp.int32(3), 4), dense[:, :, 3:7])
    order = np.broadcast_to([2, 0, 1], (BATCH, LISTS, 3))
    settled = payload.settle(jnp.int32(4), order).read()
    np.testing.assert_array_equal(settled[:, :, 4:7], dense[:, :, [6, 4, 5]])
    opened = payload.open()
    np.testing.assert_array_equal(opened.read(), dense)
    np.testing.assert_array_equal(opened.take(index).read(), picked)
    # What has been encoded once is read as it was, whatever its new book.
    for again in (payload.fill(dense), opened.close(jnp.int32(0))):
        close(again.read(), dense, "reference")
        assert jax.tree.structure(again) == jax.tree.structure(payload)


@pytest.mark.parametrize("slots", [13, 2500])
@pytest.mark.parametrize("entries", [10, 3000])
@pytest.mark.parametrize("magnitude", [True, False])
def test_attention_on_the_codebook(slots, entries, magnitude):
    """As over the decoded rows, for fewer and for more entries than slots, and in blocks."""
    rng = np.random.default_rng(0)
    book = Book(0.9, entries, magnitude, 3)
    shape = (BATCH, LISTS, slots)
    payload = CodebookPayload(
        rng.normal(size=(BATCH, 1, entries, DIM)).astype(np.float32),
        rng.integers(entries, size=shape).astype(np.uint16),
        rng.uniform(0.5, 2, size=shape).astype(np.float32) if magnitude else None,
        np.full(BATCH, entries, np.int32), np.zeros(BATCH, np.int32),
        Fresh.empty((*shape, DIM), np.float32, 3), book,
    )  # fmt: skip
    payload = payload.write(rng.integers(slots, size=(BATCH, LISTS, 2)), rows(slots=2))
    payload = jax.tree.map(jnp.asarray, payload)
    dense = np.asarray(payload.read(), np.float64)
    q = rng.normal(size=(BATCH, LISTS, 3, DIM)).astype(np.float32)
    weights = rng.uniform(size=(BATCH, LISTS, 3, slots)).astype(np.float32) / slots
    position = rng.integers(100, size=shape)
    close(jax.jit(CodebookPayload.logits)(payload, q), np.einsum("bhrd,bhsd->bhrs", q, dense))
    for frequencies in (INV_FREQ, INV_FREQ[:2]):  # the second leaves half of the channels alone
        turned = np.array(
            [
                [rotate(x, p, frequencies) for x, p in zip(*row, strict=True)]
                for row in zip(dense, position, strict=True)
            ]
        )
        rope = kvjax.Rope(jnp.asarray(frequencies, jnp.float32))
        late = Rotation(rope, jnp.asarray(position), 100)
        got = jax.jit(CodebookPayload.logits)(payload, q, late)
        close(got, np.einsum("bhrd,bhsd->bhrs", q, turned), "accumulated")
    mixed = jax.jit(CodebookPayload.mix)(payload, weights)
    close(mixed, np.einsum("bhrs,bhsd->bhrd", weights, dense))


def test_bytes():
    """Entries, 16 bits of index, a magnitude in the cache's dtype, two counters; new rows."""
    book = Book(0.9, 100, True, 3)
    payload = CodebookPayload.zeros((2, 4, 50, 8), jnp.bfloat16, book)
    fresh = 2 * 4 * 3 * (8 * 2 + 4) + 4
    assert kvjax.nbytes(payload) == 2 * (100 * 8 * 2 + 4 * 50 * (2 + 2) + 8) + fresh
    large = CodebookPayload.zeros((1, 1, 5, 8), jnp.float32, Book(0.9, 2**16 + 1, False))
    assert large.index.dtype == jnp.uint32 and large.magnitude is None
    assert CodebookPayload.zeros(
        (1, 1, 5, 8), jnp.float32, Book(0.9, 2**16, False)
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
