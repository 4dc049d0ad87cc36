"""Gemma 3 of keras_hub, its `generate`, and kvjax's adapter."""

from __future__ import annotations

from typing import Any

import keras_hub
import keras_hub_gemma as adapter
import numpy as np

from kvjax.models import Decoder
from tests.foreign.port import weights_of

FED_AGAIN = "shortest"
NORMS = {
    "attention_norm": "pre_attention_norm", "attention_post_norm": "post_attention_norm",
    "mlp_norm": "pre_ffw_norm", "mlp_post_norm": "post_ffw_norm",
}  # fmt: skip


def converted(port: Decoder) -> Any:
    """Makes their model of the port's weights."""
    c, rest, layers = weights_of(port)
    backbone = keras_hub.models.Gemma3Backbone(
        vocabulary_size=c.vocab_size, image_size=16, num_layers=c.num_layers,
        num_query_heads=c.query_heads, num_key_value_heads=c.kv_heads, hidden_dim=c.hidden_size,
        intermediate_dim=c.intermediate_size, head_dim=c.head_dim, use_post_ffw_norm=True,
        use_post_attention_norm=True, use_sliding_window_attention=True,
        sliding_window_size=c.layers[0].window, dtype="float32",
    )  # fmt: skip
    backbone.token_embedding.embeddings.assign(rest["embed"])
    backbone.layer_norm.scale.assign(rest["norm"])
    for layer, w in zip(backbone.transformer_layers, layers, strict=True):
        for ours, name in NORMS.items():
            getattr(layer, name).scale.assign(w[ours])
        attention = layer.attention
        attention.query_norm.scale.assign(w["q_norm"])
        attention.key_norm.scale.assign(w["k_norm"])
        for ours, name in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output")):
            getattr(attention, f"{name}_dense").kernel.assign(w[ours])
        layer.gating_ffw.kernel.assign(w["gate"])
        layer.gating_ffw_2.kernel.assign(w["up"])
        layer.ffw_linear.kernel.assign(w["down"])
    lm = keras_hub.models.Gemma3CausalLM(backbone=backbone, preprocessor=None)
    lm.compile(sampler="greedy")
    return lm


def functional(lm: Any) -> Any:
    """Makes it one for kvjax's calls."""
    return adapter.functional(lm)


def their_loop(
    lm: Any, method: str | None, prompts: list[list[int]], count: int
) -> list[list[int]]:
    """Writes with their loop, in their cache (None) or in kvjax's."""
    lengths = [len(prompt) for prompt in prompts]
    if method is not None:
        adapter.kvjax_inside(lm, method, max_new=max(lengths) + count - min(lengths))
    tokens = np.zeros((len(prompts), max(lengths) + count), np.int32)
    mask = np.arange(tokens.shape[1]) < np.array(lengths)[:, None]
    tokens[mask] = np.concatenate(prompts)
    no_images = np.zeros((len(prompts), 0, 1, 1, 3))  # they cannot give None back
    inputs = {"token_ids": tokens, "padding_mask": mask, "images": no_images}
    text = lm.generate(inputs, stop_token_ids=None)
    rows = zip(np.asarray(text["token_ids"]), lengths, strict=True)
    return [row[length : length + count].tolist() for row, length in rows]
