"""Llama 2, 3, 3.1 and 3.2; Mistral and Ministral, which add a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import DecoderConfig
from .hf_config import read_decoder, read_flag, read_window


def llama_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads a `LlamaForCausalLM` configuration from the content of its `config.json`.

    Missing values have the defaults of `transformers.LlamaConfig`; sizes have none.
    """
    return read_decoder(
        raw,
        max_positions=2048,
        attention_bias=read_flag(raw, "attention_bias"),
        mlp_bias=read_flag(raw, "mlp_bias"),
    )


def mistral_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads a `MistralForCausalLM` or `MinistralForCausalLM` configuration from `config.json`.

    Missing values have the defaults of `transformers.MistralConfig`: 8 KV heads and a sliding
    window of 4,096 tokens in all layers. A window of `null` means that there is none. A Mistral
    with `layer_types` is a Ministral, as in `transformers`: only the layers that it names have the
    window.
    """
    window = read_window(raw, 4096)
    return read_decoder(
        raw,
        max_positions=131072,
        kv_heads=8,
        window=window,
        slides=lambda _: window is not None,
    )
