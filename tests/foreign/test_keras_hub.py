"""The adapter of keras_hub's Gemma: their loop, and kvjax's calls, on a tiny random model."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax

keras_hub = pytest.importorskip("keras_hub", reason="keras_hub 0.32.0 is not installed")
sys.path.append(str(Path(__file__).parents[2] / "examples" / "adapters"))
adapter = importlib.import_module("keras_hub_gemma")

LENGTH, LENGTHS = 40, (28, 20)
# Keras promotes ranks and dtypes, and warns under newer versions of NumPy.
pytestmark = [pytest.mark.slow, pytest.mark.lenient, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def lm():
    backbone = keras_hub.models.GemmaBackbone(
        vocabulary_size=64, num_layers=2, num_query_heads=4, num_key_value_heads=2, hidden_dim=32,
        intermediate_dim=64, head_dim=8,
    )  # fmt: skip
    lm = keras_hub.models.GemmaCausalLM(backbone=backbone, preprocessor=None)
    rng = np.random.default_rng(0)
    lm.set_weights([w + rng.normal(size=w.shape) * 0.3 for w in lm.get_weights()])
    lm.compile(sampler="greedy")
    return lm


def prompts() -> dict[str, np.ndarray]:
    mask = np.arange(LENGTH) < np.array(LENGTHS)[:, None]
    tokens = np.random.default_rng(1).integers(1, 64, mask.shape) * mask
    return {"token_ids": tokens, "padding_mask": mask.astype(int)}


def of_row(row: int) -> list[int]:
    return prompts()["token_ids"][row, : LENGTHS[row]].tolist()


def by_hand(model, method: str, prompt: list[int], count: int) -> list[int]:
    """Their loop, which feeds the last token of the prompt once more, with flushes of a loop."""
    caches = kvjax.init_caches(
        method, num_layers=2, batch=1, kv_heads=2, query_heads=4, head_dim=8, max_prompt=LENGTH,
        max_new=count,
    )  # fmt: skip

    def call(tokens, positions, phase):
        tokens, positions = jnp.array([tokens]), jnp.array([positions])
        return model.apply(model.params, tokens, positions, caches, layers=(), phase=phase)

    _, caches = call(prompt, list(range(len(prompt))), "prompt")
    text, interval = [prompt[-1]], kvjax.flush_interval(caches)
    for step in range(count):
        logits, caches = call([text[-1]], [len(prompt) - 1 + step], "decode")
        if interval and step and step % interval == 0:
            caches = kvjax.flush(caches)
        text.append(int(logits[0, -1].argmax()))
    kvjax.check_dropped(caches)
    return text[1:]


def test_their_loop_with_all_tokens_kept_writes_the_same(lm):
    expected = lm.generate(prompts(), stop_token_ids=None)["token_ids"]
    adapter.kvjax_inside(lm, "full", max_new=20)
    np.testing.assert_array_equal(
        lm.generate(prompts(), stop_token_ids=None)["token_ids"], expected
    )
    answers = kvjax.generate(
        adapter.functional(lm), [of_row(0), of_row(1)], max_new_tokens=12, end_tokens=()
    )
    assert answers.tokens[0] == expected[0, 28:].tolist()
    assert answers.tokens[1] == expected[1, 20:32].tolist()


@pytest.mark.parametrize(
    "method", ["every(snapkv(budget=12, window=4), steps=4)", "h2o(budget=10)"]
)
def test_their_loop_with_a_method_writes_what_kvjax_writes(lm, method):
    adapter.kvjax_inside(lm, method, max_new=20)
    row = {name: x[1:] for name, x in prompts().items()}
    text = lm.generate(row, stop_token_ids=None)["token_ids"][0, 20:].tolist()
    assert text == by_hand(adapter.functional(lm), method, of_row(1), 20)
    adapter.kvjax_inside(lm, method, max_new=19)
    with pytest.raises(ValueError, match="max_new=19"):
        lm.generate(row, stop_token_ids=None)


def test_a_document_is_read_and_asked_about(lm):
    model = adapter.functional(lm)
    document = kvjax.read(model, [of_row(0)], transform="kvzip(budget=20, room=8)", max_prompt=64)
    lm.generate(prompts(), stop_token_ids=None)  # changes nothing that a context knows it by
    answer = kvjax.generate(model, [[3, 4, 5]], context=document, max_new_tokens=5, end_tokens=())
    assert len(answer.tokens[0]) == 5
