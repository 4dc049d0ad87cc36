"""Rows of similar length are read together: the same results from fewer padded tokens."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvjax
import kvjax.evaluation
from kvjax.generation import groups, prompt_pass
from kvjax.generation.compiler import Compiler
from kvjax.generation.groups import row_groups
from kvjax.generation.model import as_functional
from kvjax.generation.turns import further_turn
from tests.generation.test_context import STORED
from tests.generation.test_generate import RNG, VOCAB, generate, method, model
from tests.support.marks import some_slow
from tests.support.tolerances import close

BUCKETS = (4, 8, 16, 64)
PROMPTS = [RNG.integers(VOCAB, size=size).tolist() for size in (5, 60, 3, 13, 41, 7)]
QUESTIONS = [[1, 2], None, list(range(40)), [3, 4, 5], None, [6]]


@pytest.fixture(autouse=True)
def worth_it(monkeypatch):
    """Short prompts are worth a shape more."""
    monkeypatch.setattr(groups, "_TOKENS_PER_SHAPE", 0)


@pytest.fixture
def together():
    """Reads all rows together, as one batch that is padded to its longest row."""

    def run(function, *args, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(groups, "row_groups", lambda widths: [None])
            return function(*args, **options)

    return run


@pytest.fixture
def shapes(monkeypatch):
    """The shape of what each call of a layer is given: rows and tokens."""
    found, read_layer = [], prompt_pass._read_layer

    class Watched:
        lower, trace = read_layer.lower, read_layer.trace

        def __call__(self, *args):
            found.append(args[4].shape[:2])
            return read_layer(*args)

    monkeypatch.setattr(prompt_pass, "_read_layer", Watched())
    return found


@given(st.lists(st.sampled_from([0, 64, 80, 128, 320, 2048, 8192]), min_size=1, max_size=20))
def test_groups_are_few_and_little_of_them_is_padding(widths):
    if not any(widths):
        return
    found = row_groups(widths)
    whole = len(widths) * max(widths)
    if found == [None]:
        return
    active = [row for row, width in enumerate(widths) if width]
    assert sorted(row for rows in found for row in rows) == active
    for rows in found:
        longest = max(widths[row] for row in rows)
        assert all(longest < 2 * widths[row] for row in rows)
        assert len(rows) & (len(rows) - 1) == 0, "1, 2, 4, ... rows"
    assert 2 * sum(len(rows) * max(widths[row] for row in rows) for rows in found) <= whole


def test_rows_are_apart_where_it_is_worth_a_shape_more(monkeypatch):
    assert row_groups([64, 2048, 64, 64]) == [[1], [0, 2], [3]]
    monkeypatch.setattr(groups, "_TOKENS_PER_SHAPE", 512)
    assert row_groups([64, 2048, 64, 64]) == [[1], [0, 2], [3]]
    assert row_groups([64, 256, 64, 64]) == [None]
    assert row_groups([4096]) == [None]
    assert row_groups([0, 0, 0, 2048]) == [[3]]


def same_answers(one: kvjax.Generation, other: kvjax.Generation) -> None:
    """The same tokens, and caches that hold the same tokens of every row, head and layer."""
    assert one.tokens == other.tokens
    assert one.cache_bytes == other.cache_bytes
    first, second = one.context, other.context
    if first is None:
        return
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for name in ("length", "prompt_tokens", "new_tokens", "waiting"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
    for caches in zip(first.caches, second.caches, strict=True):
        for x, y in zip(*map(kvjax.attention.layer.layer_caches, caches), strict=True):
            held = [np.sort(np.asarray(part.kv.position), axis=-1) for part in (x, y)]
            np.testing.assert_array_equal(*held)


def conversation(transform: kvjax.KVTransform, of=None, **options) -> list[kvjax.Generation]:
    """A batch of prompts, a turn of some rows, and one of all."""
    of = of or model()
    context = kvjax.read(
        of, PROMPTS, transform=transform, max_prompt=128, max_new=64, buckets=BUCKETS,
        **options,
    )  # fmt: skip
    found = []
    for asked in (None, QUESTIONS, [[7]] * len(PROMPTS)):
        result = kvjax.generate(
            of, asked, context=context, max_new_tokens=5, end_tokens=(), buckets=(*BUCKETS, 128)
        )
        context = result.context
        found.append(result)
    return found


# What is decided by scores, by all heads, by layers and by groups of slots, and what is flushed.
KINDS = ("h2o", "snapkv", "pyramidinfer", "chelsea", "clusterkv", "spindlekv", "4 bits", "every")


# The methods of other kinds run before a release.
@pytest.mark.parametrize("name", some_slow(KINDS, exhaustive={*KINDS} - {"clusterkv"}))
def test_results_are_those_of_one_padded_batch(name, together):
    transform = method(STORED.get(name, name))
    pairs = zip(conversation(transform), together(conversation, transform), strict=True)
    for one, other in pairs:
        same_answers(one, other)


@pytest.mark.parametrize("shows_parts", [True, False])
def test_a_turn_of_a_long_row_and_a_short_one(shows_parts, together):
    """Each is read into its row of the caches that there are; a third row takes no part."""
    functional = as_functional(model())
    if not shows_parts:
        functional = dataclasses.replace(functional, parts=None)
    assert row_groups([8, 64, 0]) == [[1], [0]]
    read = kvjax.read(model(), PROMPTS[:3], max_prompt=128, max_new=4, buckets=[64])

    def turn() -> kvjax.Context:
        asked = [[1, 2], list(range(40)), None]
        return further_turn(functional, read.copy().awake(), asked, [8, 64], Compiler())

    one, other = turn(), together(turn)
    assert one.length.tolist() == [5 + 2, 60 + 40, 3]
    close(one.logits[:2], other.logits[:2])
    for x, y in zip(jax.tree.leaves(one.caches), jax.tree.leaves(other.caches), strict=True):
        close(x, y)


@pytest.mark.slow
def test_no_more_tokens_are_read_than_groups_have(shapes):
    layers = model().num_layers
    context = kvjax.read(model(), PROMPTS, max_prompt=128, buckets=BUCKETS)
    assert shapes == [(2, 64), (1, 16), (2, 8), (1, 4)] * layers
    shapes.clear()
    generate(QUESTIONS, context=context, buckets=BUCKETS, max_new_tokens=1)
    assert shapes == [(1, 64), (2, 4), (1, 4)] * layers


@pytest.mark.slow
def test_a_model_that_does_not_show_its_parts(together):
    whole, seen = dataclasses.replace(as_functional(model()), parts=None), []
    run = functools.partial(conversation, kvjax.H2O(16), whole, on_layer=seen.append)
    for one, other in zip(run(), together(run), strict=True):
        same_answers(one, other)
    assert seen == list(range(whole.num_layers)) * 2


@pytest.mark.parametrize(
    "name", some_slow(["snapkv", "spindlekv"], "snapkv", exhaustive={"spindlekv"})
)
def test_a_prompt_that_is_read_once_is_read_in_groups(name, shapes, together):
    """What methods need of the attention is seen group by group."""
    transform = method(name)

    def run() -> kvjax.Generation:
        once = kvjax.evaluation.ReadOnce(model(), PROMPTS, [transform], max_new=64, buckets=BUCKETS)
        return generate(None, context=once.context(transform), max_new_tokens=5, end_tokens=())

    one = run()
    assert (2, 8) in shapes
    same_answers(one, together(run))


def test_what_is_in_host_memory_stays_together(shapes):
    if "offload" not in STORED:
        pytest.skip("no host memory on this platform")
    generate(PROMPTS, method(STORED["offload"]), buckets=BUCKETS, max_new_tokens=1)
    assert shapes == [(6, 64)] * model().num_layers
