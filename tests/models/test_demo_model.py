"""The bundled model: its folder, and that it really retrieves."""

import json

import pytest

import kvjax
from kvjax.evaluation import Haystack, is_right
from kvjax.models import demo, from_pretrained, load_tokenizer, read_config

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


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("task", "length", "cases", "least"),
    [
        ("multi_needle", 1024, 20, 0.95), ("needle", 2048, 40, 0.97),
        ("multi_needle", 2048, 80, 0.95),
    ],
)  # fmt: skip
def test_retrieves_what_it_never_saw(model, tokenizer, haystack, task, length, cases, least):
    assert accuracy(model, tokenizer, haystack, task, length, cases) >= least
