"""The phase "probe": tokens that attend to a prompt and are not stored."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.references.repetition import repetition
from tests.support.tolerances import close

BATCH, KV_HEADS, GROUP, HEAD_DIM, PROMPT, PIECE = 2, 2, 3, 8, 40, 16
LENGTHS, TX = (40, 23), kvjax.KVzip(0.25, room=64)


def tokens_of(rng: np.random.Generator, count: int) -> list[np.ndarray]:
    """Queries, keys and values of so many tokens."""
    heads = KV_HEADS * GROUP, KV_HEADS, KV_HEADS
    return [rng.normal(size=(BATCH, h, count, HEAD_DIM)).astype(np.float32) for h in heads]


def positions_of(counts, width: int, first=(0, 0)) -> np.ndarray:
    """Positions of `counts` tokens of each row, padded."""
    place = np.arange(width)[None]
    return np.where(place < np.array(counts)[:, None], place + np.array(first)[:, None], -1)


@pytest.fixture
def attend():
    return jax.jit(
        kvjax.attend, static_argnums=0,
        static_argnames=("phase", "last", "scale", "window", "soft_cap", "implementation"),
    )  # fmt: skip


def cache_of(tx=TX, **options):
    return kvjax.init_cache(
        tx, batch=BATCH, kv_heads=KV_HEADS, query_heads=KV_HEADS * GROUP, head_dim=HEAD_DIM,
        max_prompt=PROMPT, max_new=8, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    "options", [{}, {"window": 12}, {"soft_cap": 2.0}, {"scale": 0.7}], ids=str
)
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("sinks", [False, True])
def test_it_is_the_references(attend, options, chunks, sinks):
    rng = np.random.default_rng(0)
    prompt, pieces = tokens_of(rng, PROMPT), [tokens_of(rng, PIECE) for _ in range(2)]
    counts = [(16, 16), (16, 5)]
    at = positions_of(LENGTHS, PROMPT)
    logits = rng.normal(size=KV_HEADS * GROUP) if sinks else None
    extra = {} if logits is None else {"sinks": jnp.asarray(logits, jnp.float32)}
    cache = cache_of(**options)
    for part in np.split(np.arange(PROMPT), chunks):
        new = (x[:, :, part] for x in prompt)
        _, cache = attend(TX, cache, *new, at[:, part], phase="prompt", last=False, **extra)
    piece_at = [positions_of(count, PIECE, LENGTHS) for count in counts]
    outs = []
    for new, where in zip(pieces, piece_at, strict=True):
        out, cache = attend(TX, cache, *new, where, phase="probe", last=False, **extra)
        outs.append(np.asarray(out))
    assert cache.kv.length.tolist() == list(LENGTHS)
    for row in range(BATCH):
        for head in range(KV_HEADS):
            group = slice(head * GROUP, (head + 1) * GROUP)
            expected, score = repetition(
                (prompt[1][row, head], prompt[2][row, head], at[row]),
                [(q[row, group], k[row, head], v[row, head], where[row])
                 for (q, k, v), where in zip(pieces, piece_at, strict=True)],
                **options, sinks=None if logits is None else logits[group],
            )  # fmt: skip
            for out, reference in zip(outs, expected, strict=True):
                close(out[row, group], reference)
            received = np.zeros(PROMPT)
            place = np.asarray(cache.kv.position[row, head])
            live = place >= 0
            received[place[live]] = np.asarray(cache.record.slots["received"][row, head])[live]
            close(received, np.where(at[row] >= 0, score, 0.0))


def test_nothing_of_it_is_stored(attend):
    rng = np.random.default_rng(1)
    prompt, piece = tokens_of(rng, PROMPT), tokens_of(rng, PIECE)
    at, piece_at = positions_of(LENGTHS, PROMPT), positions_of((16, 7), PIECE, LENGTHS)
    _, reading = attend(TX, cache_of(), *prompt, at, phase="prompt", last=False)
    _, looked = attend(TX, reading, *piece, piece_at, phase="probe", last=False)
    plain = dataclasses.replace(looked, record=None, rope=reading.rope)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(reading), strict=True):
        np.testing.assert_array_equal(a, b)


def test_chunks_of_pieces_and_head_groups_agree(attend):
    """The last call compresses; groups of heads decide as all heads together."""
    rng = np.random.default_rng(2)
    prompt, pieces = tokens_of(rng, PROMPT), [tokens_of(rng, PIECE) for _ in range(2)]
    at, piece_at = positions_of(LENGTHS, PROMPT), positions_of((16, 7), PIECE, LENGTHS)

    def run(tx):
        _, cache = attend(tx, cache_of(tx), *prompt, at, phase="prompt", last=False)
        for number, piece in enumerate(pieces):
            _, cache = attend(tx, cache, *piece, piece_at, phase="probe", last=number == 1)
        return cache

    whole, groups = run(TX), run(kvjax.HeadGroups((((1,), TX), ((0,), TX))))
    for head, group in ((1, groups[0]), (0, groups[1])):
        np.testing.assert_array_equal(whole.kv.position[:, head], group.kv.position[:, 0])
    kept = (np.asarray(whole.kv.position) >= 0).sum(-1)
    assert kept.tolist() == [[10, 10], [5, 5]]
    assert (np.sort(whole.kv.position, axis=-1)[..., -3:] >= 0).any()


def test_questions_stay_whole_and_documents_stay_as_they_are(attend):
    rng = np.random.default_rng(3)
    prompt, piece = tokens_of(rng, PROMPT), tokens_of(rng, PIECE)
    at, piece_at = positions_of((20, 12), PROMPT), positions_of((16, 7), PIECE, (20, 12))
    _, cache = attend(TX, cache_of(), *prompt, at, phase="prompt", last=False)
    _, cache = attend(TX, cache, *piece, piece_at, phase="probe", last=True)
    before = [set(x[x >= 0].tolist()) for x in np.asarray(cache.kv.position)[:, 0]]
    question = tokens_of(rng, 8)
    asked = positions_of((8, 3), 8, (20, 12))
    _, cache = attend(TX, cache, *question, asked, phase="prompt")
    after = [set(x[x >= 0].tolist()) for x in np.asarray(cache.kv.position)[:, 0]]
    for old, new, where in zip(before, after, asked, strict=True):
        assert new == old | set(where[where >= 0].tolist())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda attend, new, at: attend(TX, cache_of(), *new, at, phase="probe"),
         "tokens look at a prompt that is not complete"),
    ],
)  # fmt: skip
def test_what_is_refused(attend, call, message):
    new, at = tokens_of(np.random.default_rng(4), PROMPT), positions_of(LENGTHS, PROMPT)
    with pytest.raises(ValueError, match=message):
        call(functools.partial(attend), new, at)
