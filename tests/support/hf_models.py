"""Small random models of `transformers` as references, and one jitted step for ours."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

import kvjax
from kvjax.models import Decoder
from tests.support.attending import init_cache

torch.set_num_threads(1)  # the models are so small that more threads would only wait

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}


def random_reference(model_type: str = "llama", seed: int = 0, **changes):
    """A `transformers` model with weights large enough for differences to show.

    The library's own initialisation (0.02) makes all logits nearly equal, with norms and biases
    that do nothing.
    """
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "norm" in name:
                parameter.copy_(1.0 + 0.2 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.3 * noise)
            else:
                scale = 1.0 if "embed" in name else parameter.shape[1] ** -0.5
                parameter.copy_(scale * noise)
    return model


def save_reference(folder: Path, model_type: str = "llama", **changes):
    """`random_reference`, saved to `folder` as a checkpoint."""
    model = random_reference(model_type, **changes)
    model.save_pretrained(folder)
    return model


def reference_logits(model, tokens: np.ndarray, prompt: int) -> np.ndarray:
    """Logits `[L, V]` of one row: `prompt` tokens in one call, the others one by one."""
    # The dynamic rope of `transformers` remembers the longest row it has seen: start afresh.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    pieces = [(0, prompt), *((t, t + 1) for t in range(prompt, len(tokens)))]
    logits, cache = [], None
    with torch.no_grad():
        for start, end in pieces:
            out = model(ids[:, start:end], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits[0])
    return torch.cat(logits).numpy()


class Stepper:
    """One jitted function for a model: `stepper(tokens, positions, phase)` keeps the caches."""

    def __init__(self, model: Decoder, rows: int, max_prompt: int, max_new: int) -> None:
        self.layers = kvjax.bind(kvjax.Full(), model.num_layers)
        self.graphdef, self.state = nnx.split(model)
        make = partial(
            init_cache,
            batch=rows,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            max_prompt=max_prompt,
            max_new=max_new,
            dtype=jnp.float32,
            query_heads=model.query_heads,
        )
        self.caches = tuple(make(layer) for layer in self.layers)
        self._jitted = jax.jit(self._run, static_argnames="phase")

    def _run(self, state, tokens, positions, caches, logits_at=None, *, phase):
        model = nnx.merge(self.graphdef, state)
        return model(
            tokens, positions, caches, layers=self.layers, phase=phase, logits_at=logits_at
        )

    def __call__(self, tokens, positions, phase: str, logits_at=None) -> np.ndarray:
        """Logits of the new tokens; the caches move on."""
        given = [jnp.asarray(x, jnp.int32) for x in (tokens, positions)]
        if logits_at is not None:
            logits_at = jnp.asarray(logits_at, jnp.int32)
        logits, self.caches = self._jitted(self.state, *given, self.caches, logits_at, phase=phase)
        return np.asarray(logits)
