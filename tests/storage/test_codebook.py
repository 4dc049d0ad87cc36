"""Attention to what a codebook stores, and what cannot be stored so.

`tests/transforms/test_spindlekv.py` compares entries and codes with the reference.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.payload import Seen
from kvjax.storage.codebook.payload import Book, CodebookPayload
from tests.kernels.test_greedy_cover import around
from tests.references.attention import softmax_attention
from tests.references.rope import rope as rotate
from tests.support.attending import INV_FREQ
from tests.support.marks import slow
from tests.support.tolerances import close

BATCH, LISTS, DIM = 2, 4, 8

write = jax.jit(CodebookPayload.write)
read_all = jax.jit(CodebookPayload.read)


def rows(seed: int, slots: int):
    return np.stack(
        [around(LISTS * slots, DIM, seed + b).reshape(LISTS, slots, DIM) for b in range(BATCH)]
    )


@pytest.mark.parametrize(
    ("slots", "entries", "magnitude"),
    [
        (13, 3000, False),
        *slow((13, 10, True), (2500, 10, False), (2500, 3000, True)),
    ],
)
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


def test_more_entries_take_wider_indices():
    for entries, dtype in ((2**16, jnp.uint32), (2**16 - 1, jnp.uint16)):
        payload = CodebookPayload.zeros((1, 1, 5, 8), jnp.float32, Book(0.9, entries, False))
        assert payload.index.dtype == dtype and payload.magnitude is None


@pytest.mark.parametrize("bad", [{"theta_key": 1.01}, {"theta_value": 0.0}, {"capacity": 1.5}])
def test_bad_input(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        kvjax.Codebook(**bad)
