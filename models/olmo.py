"""OLMo 2 and OLMo 3, with their differences from Llama.

- Both: norms are after attention and MLP, none before; queries and keys are normalised over all
  heads together.
- `olmo3`: three of four layers have a window of 4,096 tokens; a stretched rotary embedding applies
  to the other layers only.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from .config import DecoderConfig
from .hf_config import read_decoder, read_flag, read_rope_of_types, read_window
from .tensor_names import QK_NORMS, TensorNames

OLMO_NAMES = TensorNames(
    norms={
        "post_attention_layernorm": "attention_post_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
        **QK_NORMS,
    }
)


def olmo2_config(raw: Mapping[str, Any], **family: Any) -> DecoderConfig:
    """Reads an `Olmo2ForCausalLM` configuration from the content of its `config.json`.

    `family` holds further arguments of `read_decoder`.
    """
    return read_decoder(
        raw,
        max_positions=2048,
        norm_eps=1e-5,
        attention_bias=read_flag(raw, "attention_bias"),
        norms="after",
        norm_in_float32=True,
        qk_norm="width",
        **family,
    )


def olmo3_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads an `Olmo3ForCausalLM` configuration from the content of its `config.json`.

    A `rope_theta` beside `rope_scaling` applies to all layers, as in the model's original code.
    `transformers` 5.24 uses its default, that of the published models, for layers with a window.
    `"truncate": false` is read from the object of a layer type too, where `transformers` 5.24 does
    not look for it.
    """
    local_theta = ("rope_theta", 500_000.0)
    return olmo2_config(
        raw,
        rope=partial(read_rope_of_types, raw, theta=500_000.0, local_theta=local_theta),
        window=read_window(raw, 4096),
        slides=lambda index: (index + 1) % 4 != 0,
    )
