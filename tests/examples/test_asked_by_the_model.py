"""A method with a probe, in one file of its own, works wherever a shipped one does."""

from __future__ import annotations

import numpy as np
import pytest

import kvjax
from tests.examples.test_examples import example  # noqa: F401
from tests.generation.test_repetition import PROMPTS, model, whole_pass
from tests.references.attention import softmax_attention
from tests.references.slots import best
from tests.support.attending import slots_of

WRITTEN, BUDGET, SINKS = 12, 0.2, 3


@pytest.fixture
def asked(example):  # noqa: F811
    return example("asked_by_the_model")[0]


class Request:
    """A tokenizer that knows one text."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert "questions" in text and not add_special_tokens
        return [251, 252]


def read(asked, prompts=PROMPTS, transform=None, **options):
    transform = transform or asked.Asked(BUDGET, sinks=SINKS, tokens=WRITTEN, room=32)
    return kvjax.read(
        model("plain"), prompts, transform=transform, max_prompt=256, max_new=64,
        dtype=np.float32, document=Request(), **options,
    )  # fmt: skip


@pytest.mark.slow
def test_it_keeps_what_questions_of_the_model_look_at(asked):
    """Three prompts of unequal length, against whole passes in float64."""
    context = read(asked)
    for row, prompt in enumerate(PROMPTS):
        length, asks = len(prompt), [*prompt, 251, 252]
        result = kvjax.generate(model("plain"), [asks], max_new_tokens=WRITTEN, dtype=np.float32)
        for number, (q, k, v) in enumerate(whole_pass("plain", [*asks, *result.tokens[0]])):
            at = np.arange(k.shape[1])
            for head in range(2):
                group = slice(head * 2, head * 2 + 2)
                _, p = softmax_attention(
                    q[group, length:], k[head], v[head], at[length:], at, scale=8**-0.5
                )
                score = p[..., :length].max((0, 1))
                score[:SINKS] = np.inf
                kept = best(score, max(int(BUDGET * length), SINKS + 1))
                slots = slots_of(context.caches[number], row, head)
                np.testing.assert_array_equal(slots["position"], kept)


@pytest.mark.slow
def test_check_finds_nothing(asked):
    kvjax.testing.check(asked.Asked(0.5, sinks=1))


@pytest.mark.slow
def test_turns_contexts_and_heads(asked, tmp_path):
    """Under `ByHead` too, whose heads keep unequal numbers of tokens, and from a file."""
    table = np.linspace(0.2, 1, 2 * 2 * 8).reshape(2, 2, 8)
    table[..., -1] = 1
    base = asked.Asked(0.3, sinks=1, tokens=WRITTEN, room=32)
    for transform in (base, kvjax.ByHead(base, kvjax.kit.HeadProfile(np.sort(table)))):
        document = read(asked, PROMPTS[:1], transform)
        answers = kvjax.generate(
            model("plain"), [[7, 3], [9] * 5], context=document, max_new_tokens=4
        )
        again = kvjax.generate(
            model("plain"), [[1, 2], None], context=answers.context, max_new_tokens=4
        )
        assert again.context.length.tolist() == [150 + 2 + 4 + 2 + 4, 150 + 5 + 4]
        kvjax.save_context(tmp_path / "context", document, model=model("plain"))
        loaded = kvjax.load_context(tmp_path / "context", model("plain"))
        assert loaded.transform == transform
        same = kvjax.generate(model("plain"), [[7, 3], [9] * 5], context=loaded, max_new_tokens=4)
        assert same.tokens == answers.tokens
        for cache in kvjax.attention.layer.layer_caches(document.caches):
            assert (np.asarray(cache.kv.live.sum(-1)) < 150).all()


def test_its_example_answers(example):  # noqa: F811
    assert example("asked_by_the_model")[1]
