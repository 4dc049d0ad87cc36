"""Small configurations of every family, for `transformers`."""

from __future__ import annotations

THETA = {"rope_theta": 1000.0}
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, **THETA,
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"
LONG, SHORT = [4.0, 3.0, 2.0, 1.5], [1.0, 1.1, 1.2, 1.3]  # of 8 rotated channels
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, **THETA}

LLAMAS: dict[str, dict[str, dict]] = {
    "llama": {
        "mha": {"num_key_value_heads": 4},
        "mqa": {"num_key_value_heads": 1},
        "tied": {"tie_word_embeddings": True},
        "biases": {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
        "head_dim": {"head_dim": 16, "rms_norm_eps": 1e-3},
        "theta": {"rope_parameters": {"rope_type": "default", **THETA}},
        "linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, **THETA}},
        # The context of 16 lies inside the longest prompt.
        "dynamic": {
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **THETA},
            "max_position_embeddings": 16,
        },
        # One wavelength is kept, one lies on the ramp, two are stretched.
        "llama3": {"rope_parameters": {
            "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 48, "rope_theta": 100.0,
        }},
    },
    "mistral": {"no-window": {"sliding_window": None}, "window": {"sliding_window": 7}},
}  # fmt: skip
"""As `NAMED`, of the families whose logits alone are compared: methods run on them elsewhere."""

QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 7}
ORIGINAL = {"original_max_position_embeddings": 16}  # it lies inside the longest prompt
NAMED: dict[str, dict[str, dict]] = {
    "qwen2": {
        "plain": {},
        "window-yarn": {
            **QWEN_WINDOW, "max_window_layers": 1, "num_hidden_layers": 3, "rope_parameters": YARN,
            "tie_word_embeddings": True,
        },
    },
    "qwen3": {
        "head_dim": {"head_dim": 16},
        "window-bias": {
            **QWEN_WINDOW, "layer_types": [FULL, SLIDING], "attention_bias": True, "head_dim": 8,
        },
    },
    "glm": {
        "plain": {"head_dim": 16, "num_key_value_heads": 1},
        "yarn-tied": {
            "head_dim": 16, "rope_parameters": {**YARN, "partial_rotary_factor": 0.5},
            "tie_word_embeddings": True,
        },
    },
    "glm4": {"plain": {"head_dim": 16}, "no-bias": {"head_dim": 8, "attention_bias": False}},
    "phi3": {
        "plain": {"sliding_window": 7},
        "longrope": {"rope_parameters": {**LONGROPE, **ORIGINAL}, **ORIGINAL},
        "partial-tied": {
            "hidden_size": 64, "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.5},
            "tie_word_embeddings": True, **ORIGINAL,
        },
    },
    "gemma2": {
        "plain": {"sliding_window": 7, "head_dim": 8, "query_pre_attn_scalar": 16},
        "low-caps": {
            "sliding_window": 7, "head_dim": 16, "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0, "num_hidden_layers": 3,
        },
    },
    "gemma3_text": {
        "plain": {"sliding_window": 7, "head_dim": 8, "num_hidden_layers": 6},
        "ropes": {
            "sliding_window": 5, "head_dim": 16, "layer_types": [SLIDING, FULL],
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, **THETA},
                SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            },
            "final_logit_softcapping": 3.0,
        },
    },
    "smollm3": {
        "plain": {"num_hidden_layers": 4},
        "windows": {
            **QWEN_WINDOW, "num_hidden_layers": 3, "no_rope_layers": [0, 1, 0],
            "tie_word_embeddings": False,
        },
    },
    "olmo2": {"plain": {}, "bias": {"attention_bias": True, "tie_word_embeddings": True}},
    "olmo3": {
        "plain": {"sliding_window": 7, "num_hidden_layers": 4},
        "yarn": {
            "sliding_window": 7, "layer_types": [SLIDING, FULL],
            "rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default", **THETA}},
        },
    },
    "ministral": {
        "plain": {"sliding_window": 7, "head_dim": 8},  # transformers 5.23 needs head_dim here
        "mixed": {"sliding_window": 7, "layer_types": [FULL, SLIDING], "head_dim": 16},
    },
}  # fmt: skip
"""Family → name → what `transformers` is given beside `hf_models.SIZES`."""
