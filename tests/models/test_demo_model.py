"""The bundled model: its folder, and that it really retrieves."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import kvjax
from kvjax.evaluation import Haystack, is_right
from kvjax.models import demo, from_pretrained, load_tokenizer, read_config
from kvjax.models.demo.training.train_step import forward

MEGABYTES = 2**20
pytestmark = pytest.mark.usefixtures("optimised")


@pytest.fixture(scope="module")
def model():
    return from_pretrained(demo.directory())


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(demo.directory())


@pytest.fixture(scope="module")
def haystack(tokenizer):
    return Haystack(tokenizer, demo.held_out_text())


def accuracy(model, tokenizer, haystack, task, length, cases):
    """Share of cases answered exactly with the full cache, evenly over the depths."""
    made = [haystack.case(task, length=length, depth=i % 5 / 4, seed=i) for i in range(cases)]
    right = 0
    for first in range(0, cases, 4):
        rows = made[first : first + 4]
        result = kvjax.generate(
            model, [row.prompt for row in rows], buckets=(length,),
            max_new_tokens=made[0].max_new, end_tokens=model.config.eos_token_ids,
        )  # fmt: skip
        texts = [tokenizer.decode(tokens) for tokens in result.tokens]
        right += sum(is_right(text, row.answers[0]) for text, row in zip(texts, rows, strict=True))
    return right / cases


def test_folder_is_an_ordinary_hugging_face_one_of_at_most_8_mb():
    folder = demo.directory()
    assert (folder / "model.safetensors").stat().st_size <= 8 * MEGABYTES
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama" and config["dtype"] == "bfloat16"
    assert (folder / "generation_config.json").is_file()
    read = read_config(folder)
    assert read.query_heads > read.kv_heads > 1
    assert read.max_positions >= 8192 + 16, "no room for an answer after 8,192 tokens"


@pytest.mark.slow
def test_transformers_gives_the_same_logits(model, tokenizer):
    torch = pytest.importorskip("torch")
    from transformers import AutoTokenizer, LlamaForCausalLM

    theirs = LlamaForCausalLM.from_pretrained(demo.directory(), dtype=torch.float32)
    text = demo.document().text[:3000]
    tokens = np.array([tokenizer(text).input_ids])
    assert AutoTokenizer.from_pretrained(demo.directory())(text).input_ids == tokens[0].tolist()
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    layers = kvjax.bind(kvjax.Full(), model.num_layers)
    caches = tuple(
        kvjax.init_cache(
            layer, batch=1, kv_heads=model.kv_heads, query_heads=model.query_heads,
            head_dim=model.head_dim, max_prompt=tokens.shape[1], max_new=0,
        )
        for layer in layers
    )  # fmt: skip
    positions = jnp.arange(tokens.shape[1])[None]
    logits, _ = model(jnp.asarray(tokens), positions, caches, layers=layers, phase="prompt")
    np.testing.assert_allclose(np.asarray(logits), expected, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_answers_the_bundled_question_only_if_it_sees_the_needle(model, tokenizer):
    text, question, answer = demo.document()
    assert answer in text and answer not in question

    def reply(document, transform):
        prompt = tokenizer(document + question).input_ids
        result = kvjax.generate(model, [prompt], transform=transform, max_new_tokens=8)
        return tokenizer.decode(result.tokens[0])

    assert is_right(reply(text, kvjax.Full()), answer)
    assert is_right(reply(text, kvjax.SnapKV(0.1)), answer)
    assert not is_right(reply(text, kvjax.StreamingLLM(0.1)), answer)
    without = text.replace(answer, "")
    assert not is_right(reply(without, kvjax.Full()), answer)


@pytest.mark.parametrize(
    ("task", "length", "cases", "least"),
    [
        ("multi_needle", 1024, 20, 0.95),
        pytest.param("needle", 2048, 200, 0.97, marks=pytest.mark.slow),
        pytest.param("multi_needle", 2048, 200, 0.95, marks=pytest.mark.slow),
    ],
)
def test_retrieves_what_it_never_saw(model, tokenizer, haystack, task, length, cases, least):
    assert accuracy(model, tokenizer, haystack, task, length, cases) >= least


def test_predicts_held_out_text_better_than_words_alone(model, tokenizer):
    tokens = np.array(tokenizer(demo.held_out_text(), add_special_tokens=False).input_ids)
    counts = np.bincount(tokens, minlength=model.vocab_size)
    shares = counts / counts.sum()
    entropy = -(shares[shares > 0] * np.log(shares[shares > 0])).sum()
    rows = jnp.asarray(tokens[:2048].reshape(2, 1024))
    start = jnp.full((2, 1), model.config.bos_token_id)
    logits = nnx.jit(forward)(
        model, jnp.concatenate((start, rows[:, :-1]), 1), jnp.arange(1024)[None]
    )
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, rows)
    # A unigram model can do no better than the text's own entropy.
    assert float(nats.mean()) < 0.8 * entropy
