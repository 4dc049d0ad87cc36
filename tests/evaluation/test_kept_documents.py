"""Documents of the benchmarks with masks in the full cache, beside those that are really small."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import kvjax
from kvjax.evaluation import answer_nll
from kvjax.generation.model import as_functional
from kvjax.models import DecoderConfig, RopeConfig, random_decoder
from tests.support.marks import some_slow
from tests.support.tolerances import close

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from kept_documents import ReadDocument, bytes_at_rest, method_of, together

MODEL = random_decoder(
    DecoderConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=3, query_heads=4,
        kv_heads=2, head_dim=16, rope=RopeConfig(rotary_dim=16), max_positions=512,
    )
)  # fmt: skip
METHODS = kvjax.KVzip(0.3, room=40), kvjax.OwnQueries(0.3, room=40, piece=16)
FORMS = None, kvjax.Quantize(4, 16), kvjax.Quantize(8), kvjax.Quantize(2, 16, key_bits=3)


# KVzip looks once more at a document and OwnQueries does not; forms differ in what they encode.
SOME = (METHODS[0], FORMS[3]), (METHODS[1], None)
ALL = list(itertools.product(METHODS, FORMS))


@pytest.mark.parametrize(
    ("method", "form"),
    some_slow(ALL, exhaustive=[pair for pair in ALL if pair not in SOME]),
    ids=lambda transform: type(transform).__name__,
)
def test_masks_answer_as_real_storage_does(method, form):
    rng = np.random.default_rng(5)
    text, sample, *questions = (rng.integers(64, size=n).tolist() for n in (90, 120, 7, 12))
    base = method if form is None else kvjax.chain(method, form)
    by_head = kvjax.calibrated(kvjax.ByHead(base), MODEL, [sample])
    once = ReadDocument(
        MODEL, [text], METHODS, max_prompt=136, max_new=8, buckets=[96], document=True
    )
    answers = [[3, 9, 1], [4]]
    for transform in (base, by_head):
        assert method_of(transform) == method
        masked = once.kept_by(transform)
        real = once.context(transform)
        assert kept(masked) == kept(real)
        expected = kvjax.read(MODEL, [text], transform=transform, buckets=[90], max_new=1).nbytes
        assert bytes_at_rest(as_functional(MODEL), transform, 90, "float32") == expected
        losses = [answer_nll(MODEL, x, answers, questions) for x in (masked, real)]
        close(*losses)


@pytest.mark.slow
def test_contexts_that_are_joined_answer_as_each_does():
    rng = np.random.default_rng(6)
    text, *questions = (rng.integers(64, size=n).tolist() for n in (90, 7, 12))
    method = METHODS[1]
    once = ReadDocument(
        MODEL, [text], [method], max_prompt=136, max_new=8, buckets=[96], document=True
    )
    chosen = [once.scores(method) > least for least in (0.0, 0.05)]
    contexts = [once.kept(each, kvjax.Quantize(4, 16)) for each in chosen]
    apart = [
        kvjax.generate(MODEL, [question], context=each.copy(), max_new_tokens=8).tokens[0]
        for each, question in zip(contexts, questions, strict=True)
    ]
    joined = kvjax.generate(MODEL, questions, context=together(contexts), max_new_tokens=8).tokens
    assert [list(row) for row in joined] == [list(row) for row in apart]


def kept(context: kvjax.Context) -> list:
    """Positions that are left, by layer and head."""
    positions = []
    for layer in context.caches:
        parts = layer if isinstance(layer, tuple) else (layer,)
        of_heads = {}
        for part in parts:
            heads = range(part.kv.shape[1]) if part.heads is None else np.asarray(part.heads)
            kv = jax.device_get(part.kv)
            for head, at, live in zip(heads, kv.position[0], kv.live[0], strict=True):
                of_heads[int(head)] = sorted(at[live].tolist())
        positions.append([of_heads[head] for head in sorted(of_heads)])
    return positions
