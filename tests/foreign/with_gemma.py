"""Gemma 3 of gemma (Linen), its `Sampler` and `ChatSampler`, and kvjax's adapter."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import dialog
import gemma_linen as adapter
import jax.numpy as jnp
from gemma import gm

import kvjax
from kvjax.models import Decoder
from tests.foreign.port import weights_of

FED_AGAIN = "last"
NORMS = {
    "attention_norm": "pre_attention_norm", "attention_post_norm": "post_attention_norm",
    "mlp_norm": "pre_ffw_norm", "mlp_post_norm": "post_ffw_norm",
}  # fmt: skip


class Theirs(NamedTuple):
    """A model of theirs and its weights."""

    model: Any
    params: dict[str, Any]


class Tokenizer:
    """Numbers in words; 0 is padding, and texts have no end. Other words have any number."""

    class special_tokens:
        """Numbers that no text has."""

        EOS, END_OF_TURN, BEGIN_OF_TOOL_RESPONSE = -1, -2, -3

    VERSION, FORMAT, FORBIDDEN_TOKENS = 0, gm.text.Gemma3Tokenizer.FORMAT, ()

    @staticmethod
    def encode(text: str, add_bos: bool = False) -> list[int]:
        """Returns a number for each word."""
        return [int(x) if x.isdigit() else 3 + sum(map(ord, x)) % 60 for x in text.split()]

    decode = staticmethod(lambda tokens: " ".join(str(int(token)) for token in tokens))


class Gemma3(gm.nn.Gemma3_270M):
    """Their model of any size, for any tokenizer."""

    INFO = dataclasses.replace(gm.nn.Gemma3_270M.INFO, tokenizer_version=None)


def converted(port: Decoder) -> Theirs:
    """Makes their model of the port's weights."""
    c, rest, layers = weights_of(port)
    kinds = gm.nn._gemma.GEMMA3_ATTENTION_PATTERN
    config = dataclasses.replace(
        gm.nn.Gemma3_270M.config, num_embed=c.vocab_size, embed_dim=c.hidden_size,
        hidden_dim=c.intermediate_size, num_heads=c.query_heads, head_dim=c.head_dim,
        num_kv_heads=c.kv_heads, sliding_window_size=c.layers[0].window,
        attention_types=(kinds * c.num_layers)[: c.num_layers],
    )  # fmt: skip
    params = {
        "embedder": {"input_embedding": rest["embed"]}, "final_norm": {"scale": rest["norm"]}
    }  # fmt: skip
    for number, w in enumerate(layers):
        attention = {
            "_query_norm": {"scale": w["q_norm"]}, "_key_norm": {"scale": w["k_norm"]},
            "q_einsum": {"w": w["q"]}, "kv_einsum": {"w": jnp.stack((w["k"], w["v"]))},
            "attn_vec_einsum": {"w": w["o"]},
        }  # fmt: skip
        mlp = {"gating_einsum": jnp.stack((w["gate"].T, w["up"].T)), "linear": w["down"]}
        norms = {name: {"scale": w[ours]} for ours, name in NORMS.items()}
        params[f"layer_{number}"] = {"attn": attention, "mlp": mlp, **norms}
    return Theirs(Gemma3(config=config, dtype=jnp.float32), params)


def functional(theirs: Theirs) -> Any:
    """Makes it one for kvjax's calls."""
    return adapter.functional(*theirs)


def their_loop(
    theirs: Theirs, method: str | None, prompts: list[list[int]], count: int
) -> list[list[int]]:
    """Writes with their sampler, in their caches (None) or in kvjax's."""
    width = max(map(len, prompts))
    model = theirs.model
    if method is not None:
        model = adapter.Gemma(model, method, max_new=count + 2)
    # Their loop ends a token before a cache is full.
    sampler = gm.text.Sampler(
        model=model, params=theirs.params, tokenizer=Tokenizer(), cache_length=width + count + 2,
        max_out_length=count, pad_length=width,
    )  # fmt: skip
    texts = [" ".join(map(str, prompt)) for prompt in prompts]
    out = sampler.sample(texts, max_new_tokens=count, return_state=True)
    if method is not None:
        kvjax.check_dropped(out.state.cache["layers"]["k"].caches)
    return out.tokens.tolist()


def as_turn(tokens: list[int], first: bool) -> list[int]:
    """Returns a turn of a chat as their template and this tokenizer have it."""
    said = dialog.Conversation(dialog.User(" ".join(map(str, tokens))))
    return Tokenizer.encode(said.as_text(format=Tokenizer.FORMAT), add_bos=first)


def chat(
    theirs: Theirs, method: str | None, turns: list[list[int]], count: int, most: int
) -> tuple[list[list[int]], tuple]:
    """Chats with their `ChatSampler`, and returns the answers and kvjax's caches of all layers."""
    model = theirs.model
    if method is not None:
        model = adapter.Gemma(model, method, max_new=most // 2)
    sampler = gm.text.ChatSampler(
        model=model, params=theirs.params, tokenizer=Tokenizer(), cache_length=most,
        max_out_length=count, multi_turn=True,
    )  # fmt: skip
    said = (sampler.chat(" ".join(map(str, turn)), max_new_tokens=count) for turn in turns)
    answers = [[int(word) for word in answer.split()] for answer in said]
    return answers, () if method is None else sampler.last_state.cache["layers"]["k"].caches
