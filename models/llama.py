"""Llama 2, 3, 3.1 and 3.2, and Mistral, which adds a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import DecoderConfig
from .reading import read_decoder, read_window
from .tensor_names import TensorNames
from .writing import decoder_options, divided_heads

LLAMA_NAMES = TensorNames()


def llama_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """A `LlamaForCausalLM` configuration, from the content of its `config.json`.

    Values that the file leaves out are those of `transformers.LlamaConfig`; sizes have no default.

    Raises:
      ValueError: a value is missing, of the wrong type, or not supported; names it.
    """
    return read_decoder(
        raw,
        max_positions=2048,
        attention_bias=bool(raw.get("attention_bias")),
        mlp_bias=bool(raw.get("mlp_bias")),
    )


def mistral_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """A `MistralForCausalLM` configuration, from the content of its `config.json`.

    Values that the file leaves out are those of `transformers.MistralConfig`: 8 KV heads and a
    sliding window of 4,096 tokens. A window of `null` is none.

    Raises:
      ValueError: a value is missing, of the wrong type, or not supported; names it.
    """
    return read_decoder(
        raw,
        max_positions=131072,
        kv_heads=8,
        sliding_window=read_window(raw, 4096),
    )


def llama_options(config: DecoderConfig) -> dict[str, Any]:
    """The content of a `LlamaForCausalLM`'s `config.json`.

    Raises:
      ValueError: `transformers` refuses such sizes.
    """
    divided_heads(config)
    return decoder_options(config)


def mistral_options(config: DecoderConfig) -> dict[str, Any]:
    """The content of a `MistralForCausalLM`'s `config.json`."""
    return {**decoder_options(config), "sliding_window": config.sliding_window}
