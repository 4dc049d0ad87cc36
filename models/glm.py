"""GLM-4 in the formats of `transformers` and of ChatGLM, with its differences from Llama.

- All: half of a head's channels are rotated, as neighbouring pairs. One tensor holds the gate and
  up projections. Queries, keys and values have a bias, the output projection has none.
- `glm4` (GLM-4-0414): norms are also after attention and MLP.
- `chatglm` (glm-4-9b and glm-4-9b-chat as first published): one tensor holds queries, keys and
  values; theta is 10,000 · `rope_ratio`; options and tensors have other names. Checkpoints of this
  format come with code, which is never run.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from .config import DecoderConfig
from .hf_config import read_decoder, read_flag, read_number, read_rope, refuse
from .tensor_names import FUSED_GATE_UP, FUSED_QKV, SEPARATE, TensorNames

_FUSED_MLP = {name: linears for name, linears in SEPARATE.items() if "self_attn" in name} | {
    "mlp.gate_up_proj": FUSED_GATE_UP,
    "mlp.down_proj": ("mlp.down_proj",),
}
GLM_NAMES = TensorNames(linears=_FUSED_MLP)
GLM4_NAMES = TensorNames(
    norms={
        **GLM_NAMES.norms,
        "post_self_attn_layernorm": "attention_post_norm",
        "post_mlp_layernorm": "mlp_post_norm",
    },
    linears=_FUSED_MLP,
)
CHATGLM_NAMES = TensorNames(
    embed="transformer.embedding.word_embeddings",
    norm="transformer.encoder.final_layernorm",
    head="transformer.output_layer",
    layers="transformer.encoder.layers",
    linears={
        "self_attention.query_key_value": FUSED_QKV,
        "self_attention.dense": ("attention.o_proj",),
        "mlp.dense_h_to_4h": FUSED_GATE_UP,
        "mlp.dense_4h_to_h": ("mlp.down_proj",),
    },
)


def glm_config(raw: Mapping[str, Any], **family: Any) -> DecoderConfig:
    """Reads a `GlmForCausalLM` configuration from the content of its `config.json`.

    `family` holds further arguments of `read_decoder`.
    """
    return read_decoder(
        raw,
        max_positions=131072,
        kv_heads=2,
        head_dim=128,
        norm_eps=1.5625e-7,
        attention_bias=read_flag(raw, "attention_bias", True),
        output_bias=False,
        rope=partial(read_rope, raw, share=0.5, interleaved=True),
        **family,
    )


def glm4_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads a `Glm4ForCausalLM` configuration from the content of its `config.json`."""
    return glm_config(raw, norms="both")


_CHATGLM_ONLY = {
    "rmsnorm": True,
    "post_layer_norm": True,
    "multi_query_attention": True,
    "add_bias_linear": False,
    "apply_residual_connection_post_layernorm": False,
    "original_rope": True,
    "quantization_bit": 0,
    "pre_seq_len": None,
}
_CHATGLM_OPTIONS = {
    "padded_vocab_size": "vocab_size",
    "ffn_hidden_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "kv_channels": "head_dim",
    "multi_query_group_num": "num_key_value_heads",
    "layernorm_epsilon": "rms_norm_eps",
    "seq_length": "max_position_embeddings",
    "add_qkv_bias": "attention_bias",
}
CHATGLM_KEYS = {name: chatglm_name for chatglm_name, name in _CHATGLM_OPTIONS.items()} | {
    "rope_theta": "rope_ratio"
}


def chatglm_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads a configuration in the format of ChatGLM from the content of its `config.json`.

    Theta is 10,000 · `rope_ratio`, as in ChatGLM3 and GLM-4. (ChatGLM2 divides positions by the
    ratio; its published files with a ratio cannot be told from these.)
    """
    refuse(raw, _CHATGLM_ONLY)
    for name in ("multi_query_attention", "rmsnorm"):
        if name not in raw:
            raise ValueError(f"{name} is missing")
    missing = [name for name in _CHATGLM_OPTIONS if raw.get(name) is None]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    renamed = {name: raw[chatglm_name] for chatglm_name, name in _CHATGLM_OPTIONS.items()}
    tokens = ("bos_token_id", "eos_token_id")
    for name in ("hidden_size", "num_attention_heads", "tie_word_embeddings", *tokens):
        renamed[name] = raw.get(name)
    renamed["rope_theta"] = 10000.0 * read_number(raw, "rope_ratio", 1.0)
    return glm_config(renamed)
