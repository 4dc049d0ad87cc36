"""Gemma 2 and the text models of Gemma 3, with their differences from Llama.

- Both: embeddings are multiplied by the root of their width. Norms are before and after attention
  and MLP, and multiply by `1 + w`. The MLP has GELU. Attention logits are multiplied by
  `query_pre_attn_scalar ** -0.5`. Embeddings are tied.
- `gemma2`: attention logits and logits have soft caps; every other layer has a window.
- `gemma3_text`: queries and keys are normalised head by head; five of six layers have a window and
  a theta of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from .config import DecoderConfig
from .hf_config import (
    read_decoder,
    read_flag,
    read_number,
    read_optional_number,
    read_rope_of_types,
    read_size,
    read_window,
    refuse,
)
from .tensor_names import QK_NORMS, TensorNames

GEMMA2_NAMES = TensorNames(
    norms={
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "attention_post_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
    }
)
GEMMA3_NAMES = TensorNames(norms={**GEMMA2_NAMES.norms, **QK_NORMS})


def gemma2_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads a `Gemma2ForCausalLM` configuration from the content of its `config.json`."""
    return _config(
        raw,
        max_positions=8192,
        attention_soft_cap=read_optional_number(raw, "attn_logit_softcapping", 50.0),
        logit_soft_cap=read_optional_number(raw, "final_logit_softcapping", 30.0),
        slides=lambda index: index % 2 == 0,
    )


def gemma3_text_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads a `Gemma3ForCausalLM` configuration from the content of its `config.json`.

    `rope_parameters` without layer types means what `rope_scaling` means: it applies to the layers
    without a window. `transformers` 5.24 ignores its type and factor there.
    """
    refuse(raw, {"attn_logit_softcapping": None})
    period = read_size(raw, "sliding_window_pattern", 6)
    local_theta = ("rope_local_base_freq", 10_000.0)
    return _config(
        raw,
        max_positions=131_072,
        logit_soft_cap=read_optional_number(raw, "final_logit_softcapping"),
        qk_norm="head",
        rope=partial(read_rope_of_types, raw, theta=1_000_000.0, local_theta=local_theta),
        slides=lambda index: (index + 1) % period != 0,
    )


def _config(raw: Mapping[str, Any], **family: Any) -> DecoderConfig:
    return read_decoder(
        raw,
        kv_heads=4,
        head_dim=256,
        tied=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        attention_bias=read_flag(raw, "attention_bias"),
        attention_scale=read_number(raw, "query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=read_size(raw, "hidden_size") ** 0.5,
        window=read_window(raw, 4096),
        norms="both",
        norm_plus_one=True,
        **family,
    )
