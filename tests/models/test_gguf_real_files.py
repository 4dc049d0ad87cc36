"""Tokens of two real GGUF files, with what llama.cpp says of them."""

from __future__ import annotations

import dataclasses

import pytest

import kvjax
from kvjax.cli.templates import Dialogue
from kvjax.models import gguf_tokenizer, load_tokenizer, read_config
from kvjax.models.gguf_header import read_header

pytestmark = pytest.mark.slow


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


def shown(tokenizer, text):
    return tokenizer.decode(ids(tokenizer, text), skip_special_tokens=True)


def test_end_tokens(qwen, gemma):
    ends = 128247, 151643, 151645, 151662, 151663, 151664
    assert read_config(qwen).eos_token_ids == ends
    assert read_config(gemma).eos_token_ids == (1, 106, 212)


def test_special_tokens_of_qwen(qwen):
    tokenizer = load_tokenizer(qwen)
    assert ids(tokenizer, "<|im_start|>user\nHi</s>") == [151644, 872, 198, 13048, 128247]
    assert shown(tokenizer, "<|im_start|>Hi</s><tool_call>") == "Hi<tool_call>"
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 151645
    assert kvjax.models.chat_end_tokens(tokenizer) == (151645,)
    text = "<|im_start|> is not a marker here"
    assert text in tokenizer.decode(prompt := Dialogue(tokenizer).prompt(text))
    assert prompt.count(151644) == 3, "system, user, assistant"


@pytest.mark.parametrize("kind", [1, 4])
def test_markers_of_qwen_of_another_type(qwen, kind, monkeypatch):
    """The file as converters that know no special tokens would have written it."""
    tokenizer, header = load_tokenizer(qwen), read_header(qwen)
    types = [kind if own == 3 else own for own in header.metadata["tokenizer.ggml.token_type"]]
    metadata = {**header.metadata, "tokenizer.ggml.token_type": types}
    changed = dataclasses.replace(header, metadata=metadata)
    monkeypatch.setattr(gguf_tokenizer, "read_header", lambda path: changed)
    other = load_tokenizer(qwen)
    for text in (
        "<|im_start|>user\nHi<|im_end|>",
        "<|fim_prefix|>a<|file_sep|>",
        "<|box_end|> <T>",
    ):
        assert ids(other, text) == ids(tokenizer, text)
        assert shown(other, text) == shown(tokenizer, text)
    assert ids(other, "<|im_start|>") == [151644]
    assert Dialogue(other).prompt("Hello") == Dialogue(tokenizer).prompt("Hello")


def test_special_tokens_of_gemma(gemma):
    tokenizer = load_tokenizer(gemma)
    assert tokenizer("Hi").input_ids == [2, 10979]
    assert ids(tokenizer, "<start_of_turn>user</s>") == [105, 2364, 212]
    text = "<table>\n\n\t\t<h1>a    b</h1>[multimodal]"
    assert shown(tokenizer, text) == text and shown(tokenizer, f"<start_of_turn>{text}</s>") == text
