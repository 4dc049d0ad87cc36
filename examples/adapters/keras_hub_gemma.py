"""kvjax in the Gemma 3 of keras_hub 0.32.0 (keras 3.15, JAX backend): `generate`, kvjax's calls.

`kvjax_inside` lets `lm.generate`, sampler and all, keep its keys and values in caches of kvjax.
`functional` makes the same model one for `kvjax.generate`, `read`, contexts and evaluation. Their
block asks its cache for a shape, to make a mask that kvjax does not need.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import keras  # pyright: ignore[reportMissingImports]

import kvjax


def attend(layer: Any, x: Any, cache: Any, cache_update_index: Any = 0, **_: Any) -> tuple:
    """Calls kvjax between the projections of their attention layer."""
    positions = cache.positions
    if positions is None:  # a step of their loop
        positions = jnp.full(x.shape[:2], cache_update_index, jnp.int32)
    rotate = functools.partial(layer.rope_layer, positions=positions)
    q = rotate(layer.query_norm(layer.query_dense(x)))
    k = rotate(layer.key_norm(layer.key_dense(x)))
    out, cache = cache.attend(q, k, layer.value_dense(x), positions)
    return layer.output_dense(out), cache


def functional(lm: Any) -> Any:
    """Makes a `Gemma3CausalLM` one for kvjax's calls, with its own weights."""
    b, variables = lm.backbone, [*lm.trainable_variables, *lm.non_trainable_variables]
    for block in b.transformer_layers:
        block._compute_attention_mask = lambda *_: None
        block.attention.call = functools.partial(attend, block.attention)

    def with_weights(call: Any, weights: list, *args: Any) -> Any:
        with keras.StatelessScope(state_mapping=list(zip(variables, weights, strict=True))):
            return call(*args)

    def states(tokens: Any, positions: Any, caches: tuple) -> tuple:
        return lm.call_with_cache(tokens, caches, 0)[1:]

    per_head = b.head_dim if b.query_head_dim_normalize else b.hidden_dim // b.num_query_heads
    return kvjax.guests.functional_model(
        functools.partial(with_weights, states), [x.value for x in variables],
        head=functools.partial(with_weights, functools.partial(b.token_embedding, reverse=True)),
        num_layers=b.num_layers,
        query_heads=b.num_query_heads, kv_heads=b.num_key_value_heads, head_dim=b.head_dim,
        vocab_size=b.vocabulary_size, attention_scale=per_head**-0.5,
        attention_soft_cap=b.attention_logit_soft_cap,
        windows=tuple(b.sliding_window_size if x.use_sliding_window_attention else None
                      for x in b.transformer_layers),
    )  # fmt: skip


def kvjax_inside(lm: Any, transform: kvjax.KVTransform | str, max_new: int) -> None:
    """Lets `lm.generate` keep its keys and values in caches of kvjax.

    Args:
      lm: a `Gemma3CausalLM`.
      transform: the method.
      max_new: most new tokens of a row. Their loop knows the length of whole texts alone.
    """
    model = functional(lm)

    def build_cache(tokens: Any, _images: Any, _vision: Any, mask: Any, _indices: Any) -> tuple:
        sizes = {"batch": tokens.shape[0], "max_prompt": tokens.shape[1], "max_new": max_new}
        positions = kvjax.positions_of(mask)
        caches = kvjax.guests.loop_caches(model, transform, positions=positions, **sizes)
        _, x, caches = lm.call_with_cache(tokens, caches, 0)
        return x, kvjax.guests.guest_caches([guest.cache for guest in caches])

    def make_generate_function() -> Any:
        generate = type(lm).make_generate_function(lm)

        def checked(inputs: dict, stop_token_ids: Any = None) -> dict:
            shortest = int(jnp.asarray(inputs["padding_mask"]).sum(1).min())
            if inputs["token_ids"].shape[1] - shortest > max_new:
                raise ValueError(f"a row would get more than max_new={max_new} tokens")
            return generate(inputs, stop_token_ids)

        return checked

    lm._build_cache, lm.generate_function = build_cache, None
    lm.make_generate_function = make_generate_function
