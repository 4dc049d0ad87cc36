"""Phi-3, Phi-3.5, Phi-4-mini and Phi-4, dense, with their differences from Llama.

- All: one tensor holds queries, keys and values, another the gate and up projections.
- Long contexts: LongRoPE, under the names `longrope`, `su` and `yarn`.
- Phi-4-mini: some of a head's channels are rotated (`partial_rotary_factor`).
- Some models: one sliding window for all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from kvjax.messages import brief

from .config import DecoderConfig
from .hf_config import read_decoder, read_rope, read_size, read_window
from .tensor_names import FUSED_GATE_UP, FUSED_QKV, TensorNames

PHI3_NAMES = TensorNames(
    linears={
        "self_attn.qkv_proj": FUSED_QKV,
        "self_attn.o_proj": ("attention.o_proj",),
        "mlp.gate_up_proj": FUSED_GATE_UP,
        "mlp.down_proj": ("mlp.down_proj",),
    }
)
_LONGROPE = {"su": "longrope", "yarn": "longrope"}


def phi3_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads a `Phi3ForCausalLM` configuration from the content of its `config.json`."""
    original = read_size(raw, "original_max_position_embeddings", 4096)
    scaled = {**raw, "original_max_position_embeddings": original}
    window = read_window(raw, None)
    config = read_decoder(
        raw,
        max_positions=4096,
        norm_eps=1e-5,
        window=window,
        slides=lambda _: window is not None,
        rope=partial(read_rope, scaled, share=1.0, names=_LONGROPE),
    )
    if config.layers or config.sliding_window != window:
        raise ValueError(
            "layer_types must say of all layers what sliding_window says: layers of this model "
            f"type have one window, or none has any, got {brief(raw['layer_types'])}"
        )
    return config
