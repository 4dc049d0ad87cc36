"""`context_nll` and `answer_nll` against one uncompressed pass and a plain loop of model calls."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.evaluation import answer_nll, context_nll
from kvjax.evaluation.fidelity import perplexity
from kvjax.models import DecoderConfig, RopeConfig, random_decoder
from tests.generation.test_generate import KeepsTooMuch
from tests.support.decoders import louder
from tests.support.hf_models import Stepper
from tests.support.marks import some_slow
from tests.support.tolerances import close

VOCAB, LENGTH, PROMPT = 64, 40, 30
CONFIG = DecoderConfig(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_layers=2, query_heads=4,
    kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=LENGTH,
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(VOCAB, size=(3, LENGTH))


@functools.cache
def model():
    return louder(random_decoder(CONFIG, seed=3))


def paid(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """-log softmax(logits)[token] in float64, `[..., V]` and `[...]` → `[...]`."""
    logits = np.asarray(logits, np.float64)
    highest = logits.max(-1, keepdims=True)
    total = np.log(np.exp(logits - highest).sum(-1)) + highest[..., 0]
    return total - np.take_along_axis(logits, np.asarray(tokens)[..., None], -1)[..., 0]


def compressed_nll(transform: kvjax.KVTransform, prompt: int) -> np.ndarray:
    rows, new = TOKENS[:, :prompt].tolist(), LENGTH - prompt
    context = kvjax.read(model(), rows, transform=transform, max_new=new, buckets=[prompt])
    return context_nll(model(), context, TOKENS[:, prompt:])


def by_hand(transform: kvjax.KVTransform, tokens: np.ndarray, prompt: int) -> np.ndarray:
    """Computes `compressed_nll` by one call of the model per token, through caches made here."""
    layers = kvjax.bind(transform, CONFIG.num_layers)
    batch, length = tokens.shape
    caches = tuple(
        kvjax.init_cache(
            layer, batch=batch, kv_heads=2, query_heads=4, head_dim=8, max_prompt=prompt,
            max_new=length - prompt,
        )
        for layer in layers
    )  # fmt: skip
    graph, state = nnx.split(model())

    @functools.partial(jax.jit, static_argnames="phase")
    def call(tokens, positions, caches, phase):
        return nnx.merge(graph, state)(tokens, positions, caches, layers=layers, phase=phase)

    result, start = [], 0
    for end in range(prompt, length):
        new = jnp.asarray(tokens[:, start:end], jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(start, end, dtype=jnp.int32), new.shape)
        logits, caches = call(new, positions, caches, "decode" if start else "prompt")
        result.append(paid(logits[:, -1], tokens[:, end]))
        start = end
    return np.stack(result, 1)


@functools.cache
def one_pass() -> np.ndarray:
    """Nats of tokens 1 to N − 1 from one prompt pass without any decoding, `[B, N − 1]`."""
    positions = np.broadcast_to(np.arange(LENGTH), TOKENS.shape)
    step = Stepper(model(), len(TOKENS), LENGTH, 1)
    logits = step(TOKENS, positions, "prompt")
    nats = paid(logits[:, :-1], TOKENS[:, 1:])
    assert nats.std() > 0.5 and nats.min() > 0, "predictions vary"
    return nats


@pytest.mark.slow
def test_full_equals_one_uncompressed_pass():
    nll = compressed_nll(kvjax.Full(), 1)
    assert nll.shape == (3, LENGTH - 1) and isinstance(nll, np.ndarray)
    assert nll.dtype == np.float32
    close(nll, one_pass())


@pytest.mark.parametrize(
    "transform",  # one that compresses while decoding, one that differs from layer to layer
    some_slow([kvjax.H2O(10), kvjax.PyramidKV(12, window=4)], kvjax.H2O(10)),
)
def test_methods_equal_a_plain_loop(transform):
    nll = compressed_nll(transform, PROMPT)
    close(nll, by_hand(transform, TOKENS, PROMPT))
    full = one_pass()[:, PROMPT - 1 :]
    # The prompt is read in full: only what comes after its first new token can differ.
    close(nll[:, 0], full[:, 0])
    assert np.abs(nll[:, 1:] - full[:, 1:]).max() > 0.01, "the method takes something away"


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([1, 2], ValueError, r"tokens must have the shape \[B, M\], got \[2\]"),
        ([[1.0]], TypeError, "tokens must be integers, got float64"),
        ([[-1]], ValueError, r"tokens must lie in \[0, 64\), got -1"),
        ([[1 + 2**32]], ValueError, r"tokens must lie in \[0, 64\), got 42949"),
        (np.zeros((1, 0), int), ValueError, "tokens of a row must be at least 1, got 0"),
        ([[1], [2]], ValueError, "tokens must have the context's 1 rows, got 2 of them"),
        ([[1] * (LENGTH + 1)], ValueError, "the context has"),
    ],
)
def test_tokens_that_do_not_follow_a_context(tokens, error, message, monkeypatch):
    context = kvjax.read(model(), [[1, 2, 3]], max_new=8)
    monkeypatch.setattr(perplexity, "_nll", lambda *args: pytest.fail("something was computed"))
    with pytest.raises(error, match=message):
        context_nll(model(), context, tokens)


def test_a_context_with_tokens_that_wait_for_a_flush():
    def written(transform: kvjax.KVTransform) -> kvjax.Context:
        context = kvjax.read(model(), [TOKENS[0, :20]], transform=transform, max_new=12)
        return kvjax.generate(  # pyright: ignore[reportReturnType]  # it is to go on
            model(), None, context=context, max_new_tokens=3, end_tokens=()
        ).context

    tokens = TOKENS[:1, 20:25]
    assert context_nll(model(), written(kvjax.H2O(10)), tokens).shape == (1, 5)
    repeated = kvjax.Every(kvjax.SnapKV(10, window=4), steps=5)
    with pytest.raises(ValueError, match="3 written tokens wait for a flush"):
        context_nll(model(), written(repeated), tokens)


QUESTIONS, ANSWERS = [TOKENS[0, 20:25].tolist(), [7, 8, 9]], [[3], TOKENS[0, 25:29].tolist()]


def document(transform: kvjax.KVTransform | str | None = None, rows: int = 1) -> kvjax.Context:
    read = [TOKENS[0, :20]] * rows
    return kvjax.read(model(), read, transform=transform, max_prompt=30, max_new=8)


def one_pass_per_row() -> list[float]:
    """Mean nats of each answer from one prompt pass over document, question and answer."""
    means = []
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        row = np.array([[*TOKENS[0, :20], *question, *answer]])
        step = Stepper(model(), 1, LENGTH, 1)
        logits = step(row, np.arange(row.shape[1])[None], "prompt")
        nats = paid(logits[:, :-1], row[:, 1:])
        means.append(nats[0, -len(answer) :].mean())
    return means


def test_answers_to_questions_equal_one_uncompressed_pass():
    """Rows differ in the lengths of questions and answers; the document has one row or two."""
    expected = one_pass_per_row()
    assert abs(expected[0] - expected[1]) > 0.5, "answers differ"
    whole = document()
    for context in (whole, document(rows=2), document("streaming_llm(budget=40)"), whole):
        losses = answer_nll(model(), context, ANSWERS, QUESTIONS)
        assert losses.shape == (2,)
        close(losses, expected)
    inside = kvjax.read(model(), [[*TOKENS[0, :20], *row] for row in QUESTIONS], max_new=8)
    close(answer_nll(model(), inside, ANSWERS), expected)


def test_lost_tokens_are_an_error():
    with pytest.raises(RuntimeError, match="keeps more than its `extent` promises"):
        compressed_nll(KeepsTooMuch(10), 10)


def test_questions_and_answers_go_through_the_cache_as_in_generate():
    """After an answer that `generate` wrote, its logits say what one more token costs."""
    context, question, more = document(kvjax.H2O(10)), QUESTIONS[:1], 3
    result = kvjax.generate(
        model(), question, context=context, max_new_tokens=4, end_tokens=()
    )  # fmt: skip
    (answer,) = result.tokens
    losses = [
        len(tokens) * answer_nll(model(), context, [tokens], question)[0]
        for tokens in (answer, [*answer, more])
    ]
    close(losses[1] - losses[0], paid(result.context.logits, [more])[0])
    lossless = answer_nll(model(), document(), [answer], question)[0]
    assert abs(losses[0] / 4 - lossless) > 0.01, "the method takes something away"


@pytest.mark.parametrize(
    ("answers", "questions", "message"),
    [
        ([[1]], QUESTIONS, "there must be an answer for each of 2 rows, got 1"),
        ([[1], []], QUESTIONS, "tokens of an answer must be at least 1, got 0"),
        ([[1], [64]], QUESTIONS, r"tokens must lie in \[0, 64\), got 64"),
        ([[1], [1] * 10], QUESTIONS, "the context has max_new = 8"),  # the last is only predicted
        ([[1]], [[1] * 60], "the context has max_prompt = 40"),
    ],
)
def test_answers_that_do_not_follow_a_context(answers, questions, message, monkeypatch):
    context = document()
    monkeypatch.setattr(perplexity, "further_turn", lambda *_: pytest.fail("a question was read"))
    with pytest.raises(ValueError, match=message):
        answer_nll(model(), context, answers, questions)
