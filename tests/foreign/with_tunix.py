"""Gemma 3 of google-tunix, its `Sampler`, and kvjax's adapter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import tunix_gemma as adapter
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.gemma3 import model as gemma3

from kvjax.models import Decoder
from tests.foreign.port import weights_of

FED_AGAIN = None
NORMS = {
    "attention_norm": "pre_attention_norm", "attention_post_norm": "post_attention_norm",
    "mlp_norm": "pre_ffw_norm", "mlp_post_norm": "post_ffw_norm",
}  # fmt: skip


class Tokenizer:
    """Numbers in words; 0 is padding, and texts have no end."""

    pad_id = staticmethod(lambda: 0)
    bos_id = staticmethod(lambda: None)
    eos_id = staticmethod(lambda: -1)
    encode = staticmethod(lambda text: [int(word) for word in text.split()])
    decode = staticmethod(lambda tokens: " ".join(map(str, tokens)))


def converted(port: Decoder) -> gemma3.Gemma3:
    """Makes their model of the port's weights."""
    c, rest, layers = weights_of(port)
    config = gemma3.ModelConfig(
        num_layers=c.num_layers, num_embed=c.vocab_size, embed_dim=c.hidden_size,
        hidden_dim=c.intermediate_size, num_heads=c.query_heads, head_dim=c.head_dim,
        num_kv_heads=c.kv_heads, sliding_window_size=c.layers[0].window,
        local_base_frequency=10_000, global_base_frequency=1_000_000, param_dtype=jnp.float32,
    )  # fmt: skip
    model = nnx.eval_shape(lambda: gemma3.Gemma3(config, rngs=nnx.Rngs(0)))
    model.embedder.input_embedding.value = rest["embed"]
    model.final_norm.scale.value = rest["norm"]
    for layer, w in zip(model.layers, layers, strict=True):
        for ours, name in NORMS.items():
            getattr(layer, name).scale.value = w[ours]
        layer.attn._query_norm.scale.value = w["q_norm"]
        layer.attn._key_norm.scale.value = w["k_norm"]
        layer.attn.q_einsum.w.value, layer.attn.attn_vec_einsum.w.value = w["q"], w["o"]
        layer.attn.kv_einsum.w.value = jnp.stack((w["k"], w["v"]))
        layer.mlp.gate_proj.kernel.value, layer.mlp.up_proj.kernel.value = w["gate"], w["up"]
        layer.mlp.down_proj.kernel.value = w["down"]
    return model


def functional(model: gemma3.Gemma3) -> Any:
    """Makes it one for kvjax's calls."""
    adapter.kvjax_inside(model, "full")
    return adapter.functional(model)


def their_loop(
    model: gemma3.Gemma3, method: str | None, prompts: list[list[int]], count: int
) -> list[list[int]]:
    """Writes with their sampler, in their caches (None) or in kvjax's."""
    if method is not None:
        adapter.kvjax_inside(model, method)
    width, c = max(map(len, prompts)), model.config
    cache = CacheConfig(
        cache_size=width + count, num_layers=c.num_layers, num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
    )  # fmt: skip
    texts = [" ".join(map(str, prompt)) for prompt in prompts]
    out = Sampler(model, Tokenizer(), cache)(texts, count, max_prompt_length=width)
    return [row.tolist() for row in jax.device_get(out.tokens)]
