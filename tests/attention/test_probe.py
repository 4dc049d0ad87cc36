"""The phase "probe": tokens that attend to a prompt and are not stored."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.attention import prompt as prompt_module
from kvjax.cache.record import Record
from kvjax.kit import DocumentBudget, Needs, Probe
from tests.references.attention import softmax_attention
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
        kvjax.attend,
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
        _, cache = attend(cache, *new, at[:, part], phase="prompt", last=False, **extra)
    piece_at = [positions_of(count, PIECE, LENGTHS) for count in counts]
    outs = []
    for new, where in zip(pieces, piece_at, strict=True):
        out, cache = attend(cache, *new, where, phase="probe", last=False, **extra)
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
    _, reading = attend(cache_of(), *prompt, at, phase="prompt", last=False)
    _, looked = attend(reading, *piece, piece_at, phase="probe", last=False)
    plain = dataclasses.replace(looked, record=None, rope=reading.rope)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(reading), strict=True):
        np.testing.assert_array_equal(a, b)


def test_chunks_of_pieces_and_head_groups_agree(attend):
    """The last call compresses; groups of heads decide as all heads together."""
    rng = np.random.default_rng(2)
    prompt, pieces = tokens_of(rng, PROMPT), [tokens_of(rng, PIECE) for _ in range(2)]
    at, piece_at = positions_of(LENGTHS, PROMPT), positions_of((16, 7), PIECE, LENGTHS)

    def run(tx):
        _, cache = attend(cache_of(tx), *prompt, at, phase="prompt", last=False)
        for number, piece in enumerate(pieces):
            _, cache = attend(cache, *piece, piece_at, phase="probe", last=number == 1)
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
    _, cache = attend(cache_of(), *prompt, at, phase="prompt", last=False)
    _, cache = attend(cache, *piece, piece_at, phase="probe", last=True)
    before = [set(x[x >= 0].tolist()) for x in np.asarray(cache.kv.position)[:, 0]]
    question = tokens_of(rng, 8)
    asked = positions_of((8, 3), 8, (20, 12))
    _, cache = attend(cache, *question, asked, phase="prompt")
    after = [set(x[x >= 0].tolist()) for x in np.asarray(cache.kv.position)[:, 0]]
    for old, new, where in zip(before, after, asked, strict=True):
        assert new == old | set(where[where >= 0].tolist())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda attend, new, at: attend(cache_of(), *new, at, phase="probe"),
         "tokens look at a prompt that is not complete"),
    ],
)  # fmt: skip
def test_what_is_refused(attend, call, message):
    new, at = tokens_of(np.random.default_rng(4), PROMPT), positions_of(LENGTHS, PROMPT)
    with pytest.raises(ValueError, match=message):
        call(functools.partial(attend), new, at)


@dataclass(frozen=True)
class Sums(Probe):
    """Adds up the attention that a document pays, by query head."""

    received: ClassVar[bool] = True

    def empty(self, cache):
        return Record(slots={"sums": jnp.zeros((*cache.shape, cache.group), jnp.float32)})

    def read(self, record, chunk):
        new = jnp.moveaxis(chunk.received, 2, 3)
        return Record(slots={"sums": record.slots["sums"] + new})


@dataclass(frozen=True)
class Asks(DocumentBudget):
    """Has a probe that notes what slots receive."""

    needs = property(lambda self: Needs(probe=Sums()))

    def scores(self, cache, state, step, document):
        return step.record.slots["sums"].mean(-1)


@dataclass(frozen=True)
class Positions(Probe):
    """Reads documents, and asks for no sums."""

    def read(self, record, chunk):
        assert chunk.received is None
        return record


@dataclass(frozen=True)
class AsksNothing(DocumentBudget):
    """Has a probe that does without."""

    needs = property(lambda self: Needs(probe=Positions()))

    def scores(self, cache, state, step, document):
        return cache.position.astype(jnp.float32)


@pytest.mark.parametrize(
    "options", [{}, {"window": 12}, {"soft_cap": 2.0, "scale": 0.7}, {"sinks": True}], ids=str
)
@pytest.mark.parametrize("chunks", [1, 2])
def test_what_a_chunks_slots_received(attend, options, chunks):
    """Sums over the queries of all chunks are those of the whole document's attention."""
    rng, tx, options = np.random.default_rng(5), Asks(20), dict(options)
    q, k, v = tokens_of(rng, PROMPT)
    at, logits = positions_of(LENGTHS, PROMPT), None
    extra = {}
    if options.pop("sinks", False):
        logits = rng.normal(size=KV_HEADS * GROUP)
        extra = {"sinks": jnp.asarray(logits, jnp.float32)}
    reading = kvjax.begin_document(cache_of(tx, **options))
    for part in np.split(np.arange(PROMPT), chunks):
        new = (x[:, :, part] for x in (q, k, v))
        _, reading = attend(reading, *new, at[:, part], phase="prompt", last=False, **extra)
    for row, length in enumerate(LENGTHS):
        for head in range(KV_HEADS):
            group = slice(head * GROUP, (head + 1) * GROUP)
            _, p = softmax_attention(
                q[row, group], k[row, head], v[row, head], at[row], at[row],
                **options, sinks=None if logits is None else logits[group],
            )  # fmt: skip
            place = np.asarray(reading.kv.position[row, head])
            live = place >= 0
            sums = np.zeros((PROMPT, GROUP))
            sums[place[live]] = np.asarray(reading.record.slots["sums"][row, head])[live]
            close(sums[:length], p.sum(1).T[:length])


@pytest.mark.parametrize(("tx", "calls"), [(Asks(20), 1), (AsksNothing(20), 0)], ids=str)
def test_sums_are_made_for_documents_and_probes_that_ask(monkeypatch, tx, calls):
    made = []
    computed = prompt_module.prompt_attention_and_sums
    monkeypatch.setattr(
        prompt_module, "prompt_attention_and_sums",
        lambda *args, **options: made.append(0) or computed(*args, **options),
    )  # fmt: skip
    new, at = tokens_of(np.random.default_rng(6), PROMPT), positions_of(LENGTHS, PROMPT)

    def reads(begin):
        made.clear()
        jax.eval_shape(lambda: kvjax.attend(begin(cache_of(tx)), *new, at, phase="prompt")[0])
        return len(made)

    assert reads(kvjax.begin_document) == calls
    assert reads(lambda cache: cache) == 0


def test_a_document_begins_before_its_first_tokens(attend):
    tx, new = Asks(20), tokens_of(np.random.default_rng(7), PROMPT)
    at = positions_of(LENGTHS, PROMPT)
    _, reading = attend(cache_of(tx), *new, at, phase="prompt", last=False)
    with pytest.raises(ValueError, match="before its first tokens"):
        kvjax.begin_document(reading)
    with pytest.raises(ValueError, match=r"notes documents while.*kvjax.begin_document\(cache\)"):
        attend(reading, *new, at, phase="probe")
    with pytest.raises(TypeError, match="begin_document"):
        kvjax.begin_document(None)
