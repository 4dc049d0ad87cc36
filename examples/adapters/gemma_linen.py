"""kvjax in Gemma 3 of gemma 4.0.1 (flax.linen): their `Sampler` and `ChatSampler`, kvjax's calls.

`Gemma` is their model with caches of kvjax, for their samplers:

    model = Gemma(model, "h2o(budget=1024)", max_new=4096)
    chat = gm.text.ChatSampler(model=model, params=params, cache_length=65536, multi_turn=True)
    chat.chat("Hello.")
    kvjax.check_dropped(chat.last_state.cache["layers"]["k"].caches)  # raises if one was lost

A `cache_length` of theirs bounds positions, which cost a byte each, and memory is that of the
method. So a chat goes on beyond their 4096. `functional` makes the model one for `kvjax.generate`,
`read`, contexts and evaluation.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, struct
from gemma.gm.nn import _modules, _transformer  # pyright: ignore[reportMissingImports]

import kvjax


def attend(call: Any, args: tuple, kwargs: dict, context: Any) -> Any:
    """Calls kvjax between the projections of their attention layers, and other layers as ever."""
    layer = context.module
    if not isinstance(layer, _modules.Attention) or context.method_name != "__call__":
        return call(*args, **kwargs)
    x, positions, cache, _ = args
    rotate = functools.partial(
        _modules._positional_embeddings.apply_rope, positions=positions,
        base_frequency=layer.rope_base_frequency, scale_factor=layer.rope_scale_factor,
    )  # fmt: skip
    q, (k, v) = layer.q_einsum("BTD,NDH->BTNH", x), layer.kv_einsum("BSD,CKDH->CBSKH", x)
    q, k = rotate(layer._query_norm(q)), rotate(layer._key_norm(k))
    out, cache = cache.attend(q, k, v, positions)
    return cache, layer.attn_vec_einsum("BTNH,NHD->BTD", out)


def states(model: Any, tokens: Any, positions: Any, caches: tuple) -> tuple[Any, tuple]:
    """Calls their model up to the last norm."""
    inputs = model._encode_and_get_inputs(tokens=tokens, positions=positions)
    named = {f"layer_{number}": cache for number, cache in enumerate(caches)}
    x, named = model._apply_attention(inputs, named)
    return x, tuple(named.values())


def head(model: Any, x: Any) -> Any:
    """Returns logits of the states that leave the last norm."""
    return model.embedder.decode(x)


def applied(model: Any, method: Any, params: Any, *args: Any) -> Any:
    """Calls a method of their model with kvjax in its attention layers."""
    with linen.intercept_methods(attend):
        return model.apply({"params": params}, *args, method=method)


def functional(model: Any, params: Any) -> Any:
    """Makes their model one for kvjax's calls, with the `params` that their samplers take."""
    c, local = model.config, _modules.AttentionType.LOCAL_SLIDING
    return kvjax.guests.functional_model(
        functools.partial(applied, model, states), params,
        head=functools.partial(applied, model, head), num_layers=c.num_layers,
        query_heads=c.num_heads, kv_heads=c.num_kv_heads, head_dim=c.head_dim,
        vocab_size=c.num_embed, attention_scale=c.query_pre_attn_scalar(),
        windows=tuple(c.sliding_window_size if x == local else None for x in c.attention_types),
    )  # fmt: skip


@struct.dataclass
class Whole:
    """Caches in the place of keys, which their samplers cut to a length and put back."""

    caches: tuple[kvjax.guests.GuestCache, ...]
    shape: tuple[int, ...] = struct.field(pytree_node=False)
    at = property(lambda self: self)
    __getitem__ = lambda self, key: self  # noqa: E731
    set = lambda self, new: new  # noqa: E731


@dataclasses.dataclass(frozen=True)
class Gemma:
    """Their model for their samplers, with caches of kvjax.

    Args:
      model: their `Transformer`.
      transform: the method.
      max_new: most new tokens of all turns. Prompts may have `cache_length - max_new` tokens.
    """

    model: Any
    transform: kvjax.KVTransform | str
    max_new: int
    config = property(lambda self: self.model.config)
    INFO = property(lambda self: self.model.INFO)

    def init_cache(self, *, batch_size: int, dtype: Any, cache_length: int, **_: Any) -> dict:
        """Makes the caches of all layers, in the form that their samplers know."""
        caches = kvjax.guests.loop_caches(
            functional(self.model, None), self.transform, batch=batch_size, dtype=dtype,
            max_prompt=cache_length - self.max_new, max_new=self.max_new,
        )  # fmt: skip
        keys, nothing = Whole(caches, (batch_size, cache_length, 0, 0)), Whole((), ())
        end = jnp.zeros(batch_size, jnp.int32)
        return {"layers": {"k": keys, "v": nothing, "positions": nothing, "end_index": end}}

    @functools.partial(jax.jit, static_argnums=0, static_argnames="return_last_only")
    def apply(
        self, variables: dict, tokens: Any, *, positions: Any, cache: dict,
        return_last_only: bool = False, **_: Any,
    ) -> Any:  # fmt: skip
        """Calls the model as their samplers do."""
        there = (tokens != 0) | (tokens.shape[1] == 1)  # their padding is 0, in prompts
        positions, layers = jnp.where(there, positions, -1), cache["layers"]
        call = functools.partial(applied, self.model)
        x, caches = call(states, variables["params"], tokens, positions, layers["k"].caches)
        if return_last_only:
            x = x[jnp.arange(len(x)), there.sum(1) - 1]
        end = layers["end_index"] + tokens.shape[1]
        layers = layers | {"k": layers["k"].replace(caches=caches), "end_index": end}
        logits = call(head, variables["params"], x)
        return _transformer.Output(logits=logits, cache={"layers": layers}, hidden_states=None)
