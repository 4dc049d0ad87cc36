"""kvjax in the Gemma of keras_hub 0.32.0 (keras 3.15, JAX backend): their loop, and kvjax's calls.

`lm.generate` is theirs, unchanged, sampler and all: `kvjax_inside` gives it caches that flush
themselves. `functional` makes the same model one for `kvjax.generate`, `read` and evaluation.

Keras refuses two things, and each costs lines here. A block asks its cache for a shape, to make a
mask that kvjax does not need. And `call_with_cache` stacks the caches of all layers, which are
values of their own here.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

import kvjax


def attend(attention: Any, x: Any, cache: kvjax.guests.GuestCache, **_: Any) -> tuple:
    """Their attention layer, with kvjax between its projections."""
    positions = jnp.maximum(cache.positions, 0)
    q = attention._apply_rope(attention.query_dense(x), 0, positions=positions)
    k = attention._apply_rope(attention.key_dense(x), 0, positions=positions)
    out, cache = cache.attend(q, k, attention.value_dense(x))
    return attention.output_dense(out), cache


def forward(lm: Any, tokens: Any, caches: tuple) -> tuple[Any, tuple]:
    """Their model up to the last norm."""
    x = lm.backbone.token_embedding(tokens)
    x, written = x * jnp.asarray(lm.backbone.hidden_dim**0.5, x.dtype), []
    for block, cache in zip(lm.backbone.transformer_layers, caches, strict=True):
        block._compute_attention_mask = lambda *_: None
        block.attention.call = functools.partial(attend, block.attention)
        x, cache = block(x, cache=cache)
        written.append(cache)
    return lm.backbone.layer_norm(x), tuple(written)


def sizes(lm: Any) -> dict[str, Any]:
    """The sizes of a model, as kvjax names them."""
    b = lm.backbone
    windows = [
        b.sliding_window_size if x.attention.use_sliding_window_attention else None
        for x in b.transformer_layers
    ]
    per_head = b.head_dim if b.query_head_dim_normalize else b.hidden_dim // b.num_query_heads
    return {
        "num_layers": b.num_layers, "query_heads": b.num_query_heads,
        "kv_heads": b.num_key_value_heads, "head_dim": b.head_dim, "windows": tuple(windows),
        "scale": per_head**-0.5, "soft_cap": b.attention_logit_soft_cap,
    }  # fmt: skip


def kvjax_inside(lm: Any, transform: kvjax.KVTransform | str, max_new: int) -> None:
    """Lets `lm.generate` keep its keys and values in caches of kvjax.

    Args:
      lm: a `GemmaCausalLM`.
      transform: the method.
      max_new: most new tokens of a row. Their loop knows the length of whole texts alone.
    """

    def build_cache(tokens: Any, mask: Any) -> tuple[Any, tuple]:
        new = {"batch": tokens.shape[0], "max_prompt": tokens.shape[1], "max_new": max_new}
        caches = kvjax.init_caches(transform, **new, **sizes(lm))
        positions = kvjax.positions_of(mask)
        return forward(
            lm, tokens, kvjax.guests.guest_caches(kvjax.self_flushing(caches), positions)
        )

    def call_with_cache(tokens: Any, guests: tuple, index: Any) -> tuple:
        caches, positions = [x.cache for x in guests], jnp.full(tokens.shape, index, jnp.int32)
        x, guests = forward(lm, tokens, kvjax.guests.guest_caches(caches, positions))
        # Their loop carries values of one shape: positions are those of each call.
        return head(lm, x), x, kvjax.guests.guest_caches([x.cache for x in guests])

    def generate_step(inputs: dict, stop_token_ids: Any = None) -> dict:
        def build(tokens: Any) -> tuple:
            x, guests = build_cache(tokens, inputs["padding_mask"])
            return x, kvjax.guests.guest_caches([x.cache for x in guests])

        lm._build_cache = build
        return type(lm).generate_step(lm, inputs, stop_token_ids)

    def make_generate_function() -> Any:
        generate = type(lm).make_generate_function(lm)

        def checked(inputs: dict, stop_token_ids: Any = None) -> dict:
            shortest = int(jnp.asarray(inputs["padding_mask"]).sum(1).min())
            if inputs["token_ids"].shape[1] - shortest > max_new:
                raise ValueError(f"a row would get more than max_new={max_new} tokens")
            return generate(inputs, stop_token_ids)

        return checked

    lm.call_with_cache, lm.generate_step = call_with_cache, generate_step
    lm.make_generate_function, lm.generate_function = make_generate_function, None


def head(lm: Any, x: Any) -> Any:
    """Logits of the states that leave the last norm."""
    return lm.backbone.token_embedding(x, reverse=True)


def functional(lm: Any) -> Any:
    """The model for `kvjax.generate`, `read`, contexts and evaluation, with its own weights."""
    of_model = sizes(lm)
    scale, cap = of_model.pop("scale"), of_model.pop("soft_cap")
    variables = [*lm.trainable_variables, *lm.non_trainable_variables]

    def with_weights(weights: list) -> Any:
        import keras  # pyright: ignore[reportMissingImports]

        return keras.StatelessScope(state_mapping=list(zip(variables, weights, strict=True)))

    def states(weights: list, tokens: Any, positions: Any, caches: tuple) -> tuple:
        with with_weights(weights):
            return forward(lm, tokens, caches)

    def logits(weights: list, x: Any) -> Any:
        with with_weights(weights):
            return head(lm, x)

    return kvjax.guests.functional_model(
        states, [x.value for x in variables], head=logits, attention_scale=scale,
        attention_soft_cap=cap, vocab_size=lm.backbone.vocabulary_size, **of_model,
    )  # fmt: skip
