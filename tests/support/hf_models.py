"""Small random models of `transformers` as references, and one jitted step for ours."""

from __future__ import annotations

import inspect
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import kvjax
from kvjax.generation.model import as_functional
from kvjax.models import Decoder
from tests.support.attending import init_cache

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": None,
}  # fmt: skip


def pytorch():
    """PyTorch, which computes what `transformers` does; where it is absent the test is skipped."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)  # the models are so small that more threads would only wait
    return torch


def random_reference(model_type: str = "llama", seed: int = 0, attention: str = "sdpa", **changes):
    """A `transformers` model with weights large enough for differences to show.

    The library's own initialisation (0.02) makes all logits nearly equal, with norms and biases
    that do nothing.
    """
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **changes})
    return random_model(config, seed, attention)


def random_model(config, seed: int = 0, attention: str = "sdpa"):
    """The same of a configuration."""
    torch = pytorch()
    torch.manual_seed(seed)
    model_type = config.model_type
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model = made.eval()
    middle = 0.0 if model_type.startswith("gemma") else 1.0  # of norms; Gemma's add 1
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "norm" in name:
                parameter.copy_(middle + 0.2 * noise)
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


def decide_rope(model, max_length: int) -> None:
    """Gives a reference the frequencies of a text of `max_length` tokens, whatever it reads.

    `transformers` looks at the tokens so far: rope of types "dynamic" and "longrope" changes while
    a text grows.
    """
    rope = type(model.model.rotary_emb)(model.config)
    model.model.rotary_emb = rope
    if rope.rope_type in ("dynamic", "longrope"):
        make = ROPE_INIT_FUNCTIONS[rope.rope_type]
        rope.inv_freq = make(model.config, seq_len=max_length)[0]
        rope.forward = types.MethodType(inspect.unwrap(type(rope).forward), rope)


def reference_logits(
    model, tokens: np.ndarray, prompt: int, max_length: int | None = None
) -> np.ndarray:
    """Logits `[L, V]` of one row: `prompt` tokens in one call, the others one by one.

    `max_length` is what a cache would be made for; that of the row by default.
    """
    torch = pytorch()
    decide_rope(model, len(tokens) if max_length is None else max_length)
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    pieces = [(0, prompt), *((t, t + 1) for t in range(prompt, len(tokens)))]
    cache, logits = transformers.DynamicCache(config=model.config), []
    with torch.no_grad():
        for start, end in pieces:
            # By position: newer versions of `transformers` have another name for the cache.
            logits.append(model(ids[:, start:end], None, None, cache).logits[0])
    return torch.cat(logits).numpy()


class Stepper:
    """One jitted function for a model: `stepper(tokens, positions, phase)` keeps the caches."""

    def __init__(self, model: Decoder, rows: int, max_prompt: int, max_new: int) -> None:
        self.layers = kvjax.bind(kvjax.Full(), model.num_layers)
        self.graphdef, self.state = nnx.split(model)
        size = {
            "batch": rows, "kv_heads": model.kv_heads, "query_heads": model.query_heads,
            "head_dim": model.head_dim, "max_prompt": max_prompt, "max_new": max_new,
        }  # fmt: skip
        attention = as_functional(model).attention
        self.caches = tuple(
            init_cache(layer, **size, dtype=jnp.float32, **attention(number).static)
            for number, layer in enumerate(self.layers)
        )
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


PROMPT, NEW = 22, 6
LENGTHS = (22, 13, 9, 15)


def padded_rows() -> np.ndarray:
    """Positions `[4, PROMPT]`: a full row, then padding right, left and in the middle."""
    positions = np.full((len(LENGTHS), PROMPT), -1)
    positions[0] = np.arange(PROMPT)
    positions[1, : LENGTHS[1]] = np.arange(LENGTHS[1])
    positions[2, -LENGTHS[2] :] = np.arange(LENGTHS[2])
    middle = [t for t in range(PROMPT) if t % 3 != 1]
    positions[3, middle[: LENGTHS[3]]] = np.arange(LENGTHS[3])
    return positions


def both_logits(model: Decoder, reference) -> tuple[list, list]:
    """Ours, one padded batch, and the reference, each row alone: `[(prompt, new)]` per row."""
    rows = np.random.default_rng(1).integers(0, SIZES["vocab_size"], (len(LENGTHS), PROMPT + NEW))
    step = Stepper(model, len(LENGTHS), PROMPT, NEW)
    positions = padded_rows()
    valid = positions >= 0
    # What stands at padding must not matter: here a token outside of the table.
    tokens = np.where(valid, np.take_along_axis(rows, positions.clip(0), 1), 10**6)
    prompt = step(tokens, positions, "prompt")
    lengths = np.array(LENGTHS)
    new = [
        step(rows[np.arange(len(rows)), lengths + t][:, None], (lengths + t)[:, None], "decode")
        for t in range(NEW)
    ]
    new = np.concatenate(new, axis=1)
    ours = [(prompt[row][valid[row]], new[row]) for row in range(len(rows))]
    theirs = []
    for row, length in zip(rows, LENGTHS, strict=True):
        logits = reference_logits(reference, row[: length + NEW], length, PROMPT + NEW)
        theirs.append((logits[:length], logits[length:]))
    return ours, theirs
