"""Llama 2, 3, 3.1 and 3.2; Mistral and Ministral, which add a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import DecoderConfig
from .hf_config import read_decoder, read_flag, read_window


def llama_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """A `LlamaForCausalLM` configuration, from the content of its `config.json`.

    Values that the file leaves out are those of `transformers.LlamaConfig`; sizes have no default.
    """
    return read_decoder(
        raw,
        max_positions=2048,
        attention_bias=read_flag(raw, "attention_bias"),
        mlp_bias=read_flag(raw, "mlp_bias"),
    )


def mistral_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """A `MistralForCausalLM` or `MinistralForCausalLM` configuration, from its `config.json`.

    Values that the file leaves out are those of `transformers.MistralConfig`: 8 KV heads and a
    sliding window of 4,096 tokens in all layers. A window of `null` is none. With `layer_types` a
    Mistral is a Ministral, as `transformers` has it: the window is that of the layers it names.
    """
    window = read_window(raw, 4096)
    return read_decoder(
        raw,
        max_positions=131072,
        kv_heads=8,
        window=window,
        slides=lambda _: window is not None,
    )
