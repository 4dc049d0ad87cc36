"""`ReadOnce`: one prompt pass, compressed by many methods, equals a pass for each of them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import kvjax.evaluation
from kvjax.generation.model import as_functional
from tests.generation.test_context import TRANSFORMS, transform_of
from tests.generation.test_generate import RAGGED, model
from tests.generation.test_rings import model as model_with_windows
from tests.support.attending import numbers
from tests.support.marks import some_slow
from tests.support.tolerances import close

SIZES = {"max_prompt": 96, "max_new": 32}
QUESTIONS = [[7, 3], [11], [5, 9, 2]]
MORE = {
    "reposition": "streaming_llm(reposition=True)",
    "unrotated": "chain(snapkv, codebook)",
    "cam of h2o": "cam(h2o)",
    "outlier heads": None,
    "another probe": "own_queries(piece=16)",
}


def made(name: str) -> kvjax.KVTransform:
    if name == "outlier heads":
        few = kvjax.StreamingLLM(budget=12)
        return kvjax.HeadGroups((((1,), kvjax.H2O(budget=20)), ((0,), few)))
    return transform_of(MORE.get(name, name))


NAMES = [*TRANSFORMS, *MORE]
FAST = "snapkv", "h2o", "another probe"
# What looks at a prompt, or keeps it, in other ways; all others run before a release.
KEPT = {"pyramidinfer", "clusterkv", "4 bits", "unrotated", "outlier heads"}


def equal(one: kvjax.Context, other: kvjax.Context, kind: str = "accumulated") -> None:
    """Two contexts are alike: the same slots, and numbers but for roundings."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if jnp.issubdtype(x.dtype, jnp.floating):
            close(x, y, kind)
        else:
            np.testing.assert_array_equal(numbers(x), numbers(y))


@pytest.fixture(scope="module")
def once() -> kvjax.evaluation.ReadOnce:
    return kvjax.evaluation.ReadOnce(model(), RAGGED, [made(name) for name in NAMES], **SIZES)


@pytest.mark.parametrize("name", some_slow(NAMES, *FAST, exhaustive={*NAMES} - KEPT))
def test_a_context_equals_the_one_that_read_gives(once, name):
    transform = made(name)
    shared, alone = (
        once.context(transform),
        kvjax.read(model(), RAGGED, transform=transform, **SIZES),
    )
    equal(shared, alone)
    answers = [
        kvjax.generate(model(), QUESTIONS, context=context, max_new_tokens=6).tokens
        for context in (shared, alone)
    ]
    assert answers[0] == answers[1]


def test_the_prompt_is_read_once(monkeypatch):
    """One pass, whatever the number of methods; those that change the pass make their own."""
    calls = []
    read_prompt = kvjax.generation.turns.read_prompt
    monkeypatch.setattr(
        kvjax.generation.turns, "read_prompt",
        lambda *args, **options: calls.append(args[1]) or read_prompt(*args, **options),
    )  # fmt: skip
    transforms = [made(name) for name in ("full", "snapkv", "h2o")]
    once = kvjax.evaluation.ReadOnce(model(), RAGGED, [*transforms, kvjax.PyramidInfer()], **SIZES)
    for transform in [*transforms, *transforms]:
        once.context(transform)
    assert len(calls) == 1
    once.context(kvjax.PyramidInfer())
    assert len(calls) == 2


def test_contexts_are_independent(once):
    """What one call takes over (`donate`) is not another's."""
    transform = made("snapkv")
    first = once.context(transform)
    expected = kvjax.generate(model(), QUESTIONS, context=first, max_new_tokens=6, donate=True)
    again = kvjax.generate(
        model(), QUESTIONS, context=once.context(transform), max_new_tokens=6, donate=True
    )
    assert again.tokens == expected.tokens


def test_a_method_that_needs_more_is_refused(once):
    few = kvjax.evaluation.ReadOnce(model(), RAGGED, [kvjax.Full(), kvjax.SnapKV(36)], **SIZES)
    with pytest.raises(ValueError, match="needs more of the prompt than was observed"):
        few.context(kvjax.H2O(budget=12))
    few.context(kvjax.SnapKV(40))
    with pytest.raises(ValueError, match="max_prompt must hold the prompt of 53 tokens, got 5"):
        kvjax.evaluation.ReadOnce(model(), RAGGED, [kvjax.Full()], max_prompt=5)


@pytest.mark.parametrize(
    ("which", "name"),
    some_slow(
        [(which, name) for which in ("gemma", "mistral") for name in ("full", "snapkv", "8 bits")],
        ("gemma", "snapkv"),
    ),
)
def test_windows_are_rings(which, name):
    given, transform = model_with_windows(which), made(name)
    once = kvjax.evaluation.ReadOnce(given, RAGGED, [transform], **SIZES)
    equal(once.context(transform), kvjax.read(given, RAGGED, transform=transform, **SIZES))


@pytest.mark.slow
def test_a_model_that_does_not_show_its_parts():
    whole = dataclasses.replace(as_functional(model()), parts=None)
    transforms = [made(name) for name in ("full", "h2o", "clusterkv")]
    once = kvjax.evaluation.ReadOnce(whole, RAGGED, transforms, **SIZES)
    for transform in transforms:
        equal(once.context(transform), kvjax.read(whole, RAGGED, transform=transform, **SIZES))
