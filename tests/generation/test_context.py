"""Contexts: what is read once and gone on from, in turns, in rows, and in many questions."""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import pytest

import kvjax
from kvjax.attention.layer import layer_caches
from kvjax.budgets.layers import layers_of
from kvjax.cache.nbytes import nbytes
from kvjax.compiled_code import clear_compiled_functions
from kvjax.generation import new_caches, prompt_pass
from kvjax.generation.new_caches import CacheSize
from kvjax.models import random_decoder
from kvjax.protocol import AttentionOptions
from kvjax.storage.offload.payload import HOST_MEMORY, memory_kinds
from tests.generation.test_generate import CONFIG, RAGGED, VOCAB, method, model
from tests.support.attending import same_arrays
from tests.support.cases import BUDGET, compositions, names, registered
from tests.support.marks import slow, some_slow

STORED = {
    "8 bits": "quantize",
    "4 bits": "chain(snapkv, quantize(bits=4, group=8, residual=8))",
    "3 and 2 bits": "chain(snapkv, quantize(bits=2, group=8, key_bits=3))",
    "every": "every(snapkv, steps=4)",
    "when_full": "when_full(snapkv, room=8)",
    "kvcrush": "kvcrush(snapkv, representatives=4)",
    "cam": "cam(streaming_llm)",
}
OFFLOADED = "chain(clusterkv(tokens_per_cluster=8, sinks=4, interval=5, dense_layers=()), offload)"
if HOST_MEMORY in memory_kinds():
    STORED["offload"] = OFFLOADED
TRANSFORMS = [*kvjax.registry.METHODS, *STORED]
LAYERED = {
    name: tx
    for name, tx in {**registered(), **compositions(BUDGET)}.items()
    if layers_of(tx) is None  # those that are bound to one layer already
}
FAST = ("snapkv",)
QUESTIONS = [[7, 3], [11], [5, 9, 2]]


def transform_of(name: str) -> kvjax.KVTransform:
    return method(STORED.get(name, name))


def read(name: str, prompts=RAGGED, **options):
    options = {"max_prompt": 128, "max_new": 64, **options}
    return kvjax.read(model(), prompts, transform=transform_of(name), **options)


def generate(prompts, context, **options):
    options = {"max_new_tokens": 6, **options}
    return kvjax.generate(model(), prompts, context=context, **options)


# Methods that hold their rows in other ways; all others run before a release.
ROWS = {"kvzip", "chelsea", "clusterkv", "4 bits"}


@pytest.mark.parametrize("name", some_slow(TRANSFORMS, *FAST, exhaustive={*TRANSFORMS} - ROWS))
def test_many_questions_about_one_document(name):
    """Asked together, one by one, and after reading the document again: the same answers."""
    document = read(name, RAGGED[:1])
    before = document.copy()
    together = generate(QUESTIONS, document)
    same_arrays(document, before)
    assert together.prompt_tokens == [len(question) for question in QUESTIONS]
    assert together.context.rows == len(QUESTIONS)
    alone = [generate([question], document) for question in QUESTIONS]
    again = [generate([question], read(name, RAGGED[:1])) for question in QUESTIONS]
    for row, answers in enumerate(zip(alone, again, strict=True)):
        for answer in answers:
            assert answer.tokens[0] == together.tokens[row]
    assert len({tuple(row) for row in together.tokens}) > 1, "equal answers show nothing"


@pytest.mark.parametrize("name", some_slow(TRANSFORMS, *FAST, exhaustive={*TRANSFORMS} - ROWS))
def test_rows_that_take_no_part(name):
    """Their caches stay bit for bit, and their next turn is as if they had been alone."""
    whole = read(name)
    turn = generate([QUESTIONS[0], None, QUESTIONS[2]], whole)
    assert turn.tokens[1] == [] and turn.ended[1] is False and turn.prompt_tokens == [2, 0, 3]
    assert turn.context.length.tolist() == [53 + 2 + 6, 9, 41 + 3 + 6]
    assert turn.context.prompt_tokens.tolist() == [55, 9, 44]
    assert turn.context.new_tokens.tolist() == [6, 0, 6]
    later = generate([None, QUESTIONS[1], None], turn.context)
    alone = read(name, [RAGGED[1]], buckets=[64])
    assert later.tokens[1] == generate([QUESTIONS[1]], alone).tokens[0]


@pytest.mark.parametrize("name", some_slow(["full", "h2o", "8 bits"], "full"))
def test_going_on_without_a_prompt(name):
    """In pieces as at once, for methods that do the same in every step."""
    at_once = generate(None, read(name), max_new_tokens=12)
    first = generate(None, read(name), max_new_tokens=5)
    second = generate(None, first.context, max_new_tokens=7)
    joined = [a + b for a, b in zip(first.tokens, second.tokens, strict=True)]
    assert joined == at_once.tokens
    same_arrays(second.context, at_once.context)


def test_a_conversation_is_what_was_said():
    """With the full cache: as the whole conversation read at once, end tokens included."""
    context, said = read("full"), [list(row) for row in RAGGED]
    for turn in range(3):
        asked = [[turn + 1, row + 2] for row in range(3)]
        ends = (generate(asked, context).tokens[0][3],)
        answer = generate(asked, context, end_tokens=ends)
        for row in range(3):
            said[row] += asked[row] + answer.tokens[row] + list(ends) * answer.ended[row]
        context = answer.context
        assert context.length.tolist() == [len(row) for row in said]
    whole = kvjax.read(model(), said, max_prompt=256, max_new=64)
    np.testing.assert_allclose(context.logits, whole.logits, atol=1e-4)
    assert any(answer.ended) and not all(answer.ended)  # pyright: ignore[reportPossiblyUnboundVariable]  # the loop runs


def test_donating_gives_the_memory_away():
    context = read("full")
    answer = generate(QUESTIONS, context, donate=True)
    assert answer.tokens == generate(QUESTIONS, read("full")).tokens
    with pytest.raises(ValueError, match="given away"):
        generate(QUESTIONS, context)


def test_what_a_context_says():
    context = read("snapkv")
    assert context.rows == 3 and context.max_prompt == 128 and context.max_new == 64
    assert context.awake_nbytes == nbytes(context.caches)
    said = f"transform={context.transform!r}, rows=3, max_prompt=128, max_new=64, layers=2"
    assert repr(context) == f"Context({said})", "not the numbers that it holds"
    assert context.length.tolist() == context.prompt_tokens.tolist() == [53, 9, 41]
    with pytest.raises(ValueError, match="one row"):
        context.repeat(2)
    one = read("snapkv", RAGGED[:1])
    assert one.repeat(4).nbytes == pytest.approx(4 * one.nbytes, rel=0.01)


def test_rows_of_a_context():
    """Some rows in another order, one of them twice: each goes on as it would have gone on."""
    context, rows = read("snapkv"), [2, 0, 2]
    taken = context.take(rows)
    assert taken.length.tolist() == [41, 53, 41] and taken.rows == 3
    whole = generate(QUESTIONS, context).tokens
    asked = [QUESTIONS[row] for row in rows]
    assert generate(asked, taken, donate=True).tokens == [whole[row] for row in rows]
    assert generate(QUESTIONS, context).tokens == whole, "it has memory of its own"
    with pytest.raises(ValueError, match="3"):
        context.take([3])


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1]] * 2, {}, "the context's 3 rows, got 2"),
        ([None] * 3, {}, "a prompt of one row"),
        ([[1], [], [2]], {}, "row 1 is empty"),
        ([[1], [64], [2]], {}, r"\[0, 64\)"),
        (
            [[1] * 80, None, None],
            {},
            "max_prompt = 128, and row 0 would need 133: 53 so far and 80",
        ),
        (None, {"max_new_tokens": 65}, "max_new = 64, and row 0 would need 65"),
        (QUESTIONS, {"transform": kvjax.Full()}, "its own transform"),
        (QUESTIONS, {"dtype": "bfloat16"}, "its own dtype"),
        (QUESTIONS, {"buckets": [0, 64]}, "a length of buckets must be at least 1, got 0"),
    ],
)
def test_what_does_not_fit(prompts, options, message):
    with pytest.raises(ValueError, match=message):
        generate(prompts, read("full"), **options)


def test_nothing_to_go_on_from():
    with pytest.raises(ValueError, match="needs prompts, or a context to go on from"):
        kvjax.generate(model(), None)
    with pytest.raises(
        TypeError, match=r"prompts are token ids, got the text 'Who asks\?' in row 1"
    ):
        kvjax.generate(model(), [[1], "Who asks?"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buckets": 64}, "buckets must be a sequence of lengths, got 64"),
        ({"buckets": "64"}, "buckets must be a sequence of lengths, got '64'"),
        ({"buckets": [64.5]}, "a length of buckets must be an int, got 64.5"),
        ({"on_layer": 1}, "on_layer must be a function or None, got 1"),
        ({"on_compile": 1}, "on_compile must be a function or None, got 1"),
        ({"on_tokens": 1}, "on_tokens must be a function or None, got 1"),
        ({"document": "book"}, "document must be True, False or a tokenizer, got 'book'"),
    ],
)
def test_options_of_a_wrong_type(options, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        kvjax.generate(model(), QUESTIONS, **options)


def test_what_is_no_context_any_more():
    """Every call says so, before JAX finds that the arrays have gone."""
    context = read("full", RAGGED[:1])
    awake = generate([[1]], context).context
    generate([[1]], awake, donate=True)
    calls = (
        awake.at_rest, awake.copy, lambda: awake.repeat(2), lambda: awake.take([0]),
        lambda: kvjax.save_context("never", awake, model=model()),
        lambda: kvjax.read(model(), RAGGED[:1], piece=16, context=awake),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError, match="given away with donate=True"):
            call()
    with pytest.raises(TypeError, match=r"must be a kvjax\.Context.*got 'folder'"):
        kvjax.save_context("never", "folder", model=model())
    with pytest.raises(TypeError, match=r"rows must be an int, got 1\.5"):
        context.repeat(1.5)


def test_another_model():
    other = random_decoder(dataclasses.replace(CONFIG, num_layers=1))
    with pytest.raises(ValueError, match="of this model"):
        kvjax.generate(other, QUESTIONS, context=read("full"))
    with pytest.raises(ValueError, match="max_prompt must hold"):
        read("full", max_prompt=20)


def test_streams():
    context = read("full")
    steps = kvjax.stream(model(), QUESTIONS, context=context, max_new_tokens=6)
    with pytest.raises(RuntimeError, match="all tokens"):
        _ = steps.result
    pieces = list(steps)
    expected = generate(QUESTIONS, context)
    joined = [[token for piece in pieces for token in piece[row]] for row in range(3)]
    assert joined == steps.result.tokens == expected.tokens
    same_arrays(steps.result.context, expected.context)
    assert [len(row) for row in pieces[0]] == [1, 1, 1] and len(pieces) > 1


def test_a_stream_may_be_stopped():
    """The context then holds what has come, and nothing else."""
    context = read("full")
    steps = kvjax.stream(model(), QUESTIONS, context=context, max_new_tokens=40)
    come = [new[0][0] for new, _ in zip(steps, range(1), strict=False)]
    result = steps.stop()
    assert result.tokens[0][: len(come)] == come and len(result.tokens[0]) < 40
    assert list(steps) == [] and steps.result is result
    written = len(result.tokens[0])
    shorter = generate(QUESTIONS, context, max_new_tokens=written)
    assert shorter.tokens == result.tokens
    same_arrays(shorter.context, result.context)


OPTIONS = AttentionOptions(scale=0.5, window=9, soft_cap=None)


@pytest.mark.parametrize("name", names(LAYERED, "clusterkv", "full", "pyramidinfer", "spindlekv"))
def test_layers_that_are_alike_differ_in_their_states_alone(name):
    """What the compiled layer makes for itself is what `init_cache` gives for each layer."""
    # Calibrations are those of three layers.
    layers = kvjax.bind(LAYERED[name], 3 if "infinigen" in name or "outlier" in name else 8)
    size = CacheSize(2, 2, 4, 8, 24, 4, "float32")

    @jax.jit
    def both():
        states = new_caches.states_of_layers(layers, size)
        made = [
            new_caches.new_cache(one, size, OPTIONS, own)
            for one, own in zip(layers, states, strict=True)
        ]
        given = [size.cache(one, layer, OPTIONS) for layer, one in enumerate(layers)]
        return made, given

    same_arrays(*both())


# Progress


PROGRESS = {
    "full": kvjax.Full(),
    "head groups": kvjax.HeadGroups((((1,), kvjax.Full()), ((0,), kvjax.StreamingLLM(16)))),
    "pyramidinfer": kvjax.PyramidInfer(ratio=0.3, context=6, interval=4),
}
if HOST_MEMORY in memory_kinds():
    PROGRESS["offload"] = kvjax.parse(OFFLOADED, 36)


@pytest.mark.parametrize("name", some_slow(PROGRESS, "full"))
def test_layers_report_once_in_order_and_change_nothing(name):
    options = {"transform": PROGRESS[name], "max_new_tokens": 6}
    for _ in range(2):  # the listener is not compiled in
        layers = []
        watched = kvjax.generate(model(), RAGGED, on_layer=layers.append, **options)
        assert layers == [0, 1] and all(type(layer) is int for layer in layers)
    plain = kvjax.generate(model(), RAGGED, **options)
    assert watched.tokens == plain.tokens and watched.cache_bytes == plain.cache_bytes  # pyright: ignore[reportPossiblyUnboundVariable]  # the loop runs


def test_layers_that_are_alike_share_one_program():
    clear_compiled_functions()  # other tests may have read the same prompt
    compiled: list[str] = []
    for listen in ({"on_layer": print}, {"on_layer": [].append, "on_compile": compiled.append}):
        kvjax.generate(model(), RAGGED, transform=kvjax.H2O(30), max_new_tokens=6, **listen)
        assert prompt_pass._read_layer._cache_size() == 1
    assert compiled == [
        "the caches", "the embedding", "the prompt pass of layer 1 of 2", "the logits",
        "the choice of a token", "the decode loop",
    ]  # fmt: skip


# Conversations of 20 turns


TURNS, NEW = 20, 3


def questions(turn: int) -> list[list[int] | None]:
    """Questions of different lengths; every third turn one row has none."""
    rng = np.random.default_rng(turn)
    asked = [rng.integers(VOCAB, size=1 + (turn + row) % 3).tolist() for row in range(3)]
    if turn % 3 == 2:
        asked[turn % 2] = None
    return asked


# Most live slots per layer, row and KV head after a turn of three new tokens.
@pytest.mark.parametrize(
    ("name", "most"),
    [("full", None), *slow(("every", 36 + 4 + 3), ("h2o", 36), ("clusterkv", None))],
)
def test_20_turns_stay_within_the_bound(name, most):
    """Of slots and bytes; what keeps everything keeps exactly what was said."""
    context = read(name)
    size, length = context.awake_nbytes, np.array([len(row) for row in RAGGED])
    for turn in range(TURNS):
        asked = questions(turn)
        answer = generate(asked, context, max_new_tokens=NEW, donate=True)
        context = answer.context
        length += [0 if row is None else len(row) + NEW for row in asked]
        live = [part.kv.live.sum(-1) for part in layer_caches(context.caches)]
        assert context.length.tolist() == length.tolist()
        assert context.nbytes == size
        for count in live:
            if most is None:
                np.testing.assert_array_equal(count, np.broadcast_to(length[:, None], count.shape))
            else:
                assert int(count.max()) <= most
