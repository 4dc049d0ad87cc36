"""The Llama family: Llama 2, 3, 3.1 and 3.2, and Mistral, which adds a sliding window."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvjax.messages import brief

from .config import MOST_LAYERS, DecoderConfig
from .reading import (
    Weight,
    read_choice,
    read_number,
    read_rope,
    read_size,
    read_token_ids,
    usable_positions,
)

LAYER = re.compile(r"model\.layers\.(\d+)\.")
"""How the names of a layer's tensors begin."""


def llama_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """A `LlamaForCausalLM` configuration, from the content of its `config.json`.

    Values that the file leaves out are those of `transformers.LlamaConfig`; sizes have no default.

    Raises:
      ValueError: a value is missing, of the wrong type, or not supported; names it.
    """
    return _config(
        raw,
        kv_heads=read_size(raw, "num_key_value_heads", read_size(raw, "num_attention_heads")),
        max_positions=read_size(raw, "max_position_embeddings", 2048),
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
    heads = 8 if "num_key_value_heads" not in raw else read_size(raw, "num_attention_heads")
    window = raw.get("sliding_window", 4096)
    return _config(
        raw,
        kv_heads=read_size(raw, "num_key_value_heads", heads),
        max_positions=read_size(raw, "max_position_embeddings", 131072),
        sliding_window=None if window is None else read_size(raw, "sliding_window", window),
    )


def _config(raw: Mapping[str, Any], *, max_positions: int, **family: Any) -> DecoderConfig:
    hidden, heads = read_size(raw, "hidden_size"), read_size(raw, "num_attention_heads")
    if raw.get("head_dim") is None and hidden % heads:
        raise ValueError(
            f"hidden_size must be a multiple of num_attention_heads, got {hidden} and {heads}"
        )
    head_dim = read_size(raw, "head_dim", max(hidden // heads, 1))
    rope = read_rope(raw, rotary_dim=head_dim, max_positions=max_positions)
    for place in (raw, raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}):
        if place.get("partial_rotary_factor") not in (None, 1):
            raise ValueError(
                "partial_rotary_factor must be 1 for this model type, "
                f"got {brief(place['partial_rotary_factor'])}"
            )
    return DecoderConfig(
        vocab_size=read_size(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=read_size(raw, "intermediate_size"),
        num_layers=read_size(raw, "num_hidden_layers", most=MOST_LAYERS),
        query_heads=heads,
        head_dim=head_dim,
        rope=rope,
        max_positions=usable_positions(rope, max_positions),
        norm_eps=read_number(raw, "rms_norm_eps", 1e-6),
        tie_embeddings=bool(raw.get("tie_word_embeddings")),
        activation=read_choice(raw, "hidden_act", "silu"),
        bos_token_id=next(iter(read_token_ids(raw, "bos_token_id")), None),
        eos_token_ids=read_token_ids(raw, "eos_token_id"),
        **family,
    )


_PROJECTIONS = {
    "self_attn.q_proj": ("attention", "q_proj"),
    "self_attn.k_proj": ("attention", "k_proj"),
    "self_attn.v_proj": ("attention", "v_proj"),
    "self_attn.o_proj": ("attention", "o_proj"),
    "mlp.gate_proj": ("mlp", "gate_proj"),
    "mlp.up_proj": ("mlp", "up_proj"),
    "mlp.down_proj": ("mlp", "down_proj"),
}
_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}


def llama_weights(config: DecoderConfig) -> dict[str, Weight]:
    """Tensor name in the checkpoint → place in the decoder, for Llama and Mistral.

    The output projection is among them even where it is tied to the embedding: then both names
    have the same place.
    """
    table = ("embed", "embedding")
    weights = {
        "model.embed_tokens.weight": Weight(table),
        "model.norm.weight": Weight(("norm", "scale")),
        "lm_head.weight": Weight(table)
        if config.tie_embeddings
        else Weight(("lm_head", "kernel"), transpose=True),
    }
    for index in range(config.num_layers):
        ours, theirs = ("layers", index), f"model.layers.{index}"
        for name, norm in _NORMS.items():
            weights[f"{theirs}.{name}.weight"] = Weight((*ours, norm, "scale"))
        for name, place in _PROJECTIONS.items():
            weights[f"{theirs}.{name}.weight"] = Weight((*ours, *place, "kernel"), transpose=True)
            biased = config.attention_bias if place[0] == "attention" else config.mlp_bias
            if biased:
                weights[f"{theirs}.{name}.bias"] = Weight((*ours, *place, "bias"))
    return weights
