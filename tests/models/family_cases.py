"""Small configurations of every family, named ones and drawn ones, for `transformers`."""

from __future__ import annotations

import numpy as np

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

SEEDS = 20


def drawn(family: str, seed: int) -> dict:
    """A configuration drawn at random: heads, widths, ties, biases, windows, rotary embedding."""
    rng = np.random.default_rng([seed, *family.encode()])
    kv_heads, group = int(rng.choice([1, 2, 3])), int(rng.choice([1, 2, 4]))
    heads, head_dim = kv_heads * group, int(rng.choice([8, 16]))
    layers = int(rng.integers(1, 5))
    tied = family in ("phi3", "olmo2", "olmo3")  # their heads divide the residual stream
    own = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * head_dim if tied else heads * int(rng.choice([6, 8])),
        "intermediate_size": int(rng.choice([40, 48])),
        "tie_word_embeddings": bool(rng.integers(2)),
        "rms_norm_eps": float(rng.choice([1e-6, 1e-3])),
    }
    if family == "qwen2":
        own["hidden_size"] = heads * head_dim
    elif not tied:
        own["head_dim"] = head_dim
    if family in ("qwen3", "glm", "glm4", "olmo2", "olmo3", "smollm3", "gemma2", "gemma3_text"):
        own["attention_bias"] = bool(rng.integers(2))
    share = float(rng.choice([0.5, 1.0])) if family in ("phi3", "glm", "glm4") else None
    own |= _windows(family, layers, rng)
    own |= _ropes(family, head_dim, share, rng)
    if family.startswith("gemma"):
        own["query_pre_attn_scalar"] = int(rng.integers(4, 40))
        own["final_logit_softcapping"] = rng.choice([None, 2.0, 30.0])
    if family == "gemma2":
        own["attn_logit_softcapping"] = rng.choice([None, 2.0, 50.0])
    if family == "smollm3":
        own["mlp_bias"] = bool(rng.integers(2))
        own["no_rope_layers"] = rng.integers(0, 2, layers).tolist()
    return own


def _windows(family: str, layers: int, rng) -> dict:
    if family in ("glm", "glm4", "olmo2"):
        return {}
    # Not 1: the sliding cache of transformers 5.23 keeps every token then (`keys[-1 + 1 :]`).
    own = {"sliding_window": int(rng.integers(2, 12))}
    if family == "phi3":
        return own if rng.integers(2) else {"sliding_window": None}
    if family.startswith("qwen") or family == "smollm3":
        own["use_sliding_window"] = bool(rng.integers(2))
    if own.get("use_sliding_window", True) and rng.integers(2):
        own["layer_types"] = rng.choice([SLIDING, FULL], layers).tolist()
    elif family.startswith("qwen"):
        own["max_window_layers"] = int(rng.integers(0, layers + 1))
    return own


def _ropes(family: str, head_dim: int, share: float | None, rng) -> dict:
    if family in ("gemma3_text", "olmo3"):
        return {"rope_parameters": {kind: _rope(head_dim, rng) for kind in (FULL, SLIDING)}}
    if family == "phi3":
        own = {"rope_type": "default", **THETA}
        if rng.integers(2):
            pairs = int(head_dim * share) // 2
            own = {
                "rope_type": "longrope",
                "short_factor": rng.uniform(1, 2, pairs).tolist(),
                "long_factor": rng.uniform(1, 8, pairs).tolist(),
                **THETA,
            }
            if rng.integers(2):
                own["attention_factor"] = 1.5
        own["partial_rotary_factor"] = share
        original = int(rng.choice([8, 16, 64]))
        return {"rope_parameters": own, "original_max_position_embeddings": original}
    more = {} if share is None else {"partial_rotary_factor": share}
    if rng.integers(4) == 0:
        dynamic = {"rope_type": "dynamic", "factor": 4.0, **THETA}
        return {"rope_parameters": {**dynamic, **more}, "max_position_embeddings": 16}
    return {"rope_parameters": {**_rope(head_dim, rng), **more}}


def _rope(head_dim: int, rng) -> dict:
    kind = str(rng.choice(["default", "linear", "llama3", "yarn", "yarn"]))
    own = {"rope_type": kind, "rope_theta": float(rng.choice([100.0, 10000.0]))}
    if kind != "default":
        own["factor"] = float(rng.choice([2.0, 3.0, 8.0]))
    if kind in ("llama3", "yarn"):
        own["original_max_position_embeddings"] = int(rng.choice([8, 16, 48]))
    if kind == "llama3":
        own |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "yarn":
        own |= [{}, {"attention_factor": 1.3}, {"mscale": 0.7, "mscale_all_dim": 1.3}][
            rng.integers(3)
        ]
        if rng.integers(2):
            own |= {"beta_fast": 4.0, "beta_slow": 0.5}
    return own
