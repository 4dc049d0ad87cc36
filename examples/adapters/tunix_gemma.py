"""kvjax in the Gemma 3 of google-tunix 0.1.7 (flax.nnx): their `Sampler`, and kvjax's calls.

`kvjax_inside` lets their `Sampler` keep its keys and values in caches of kvjax. `functional` makes
the same model one for `kvjax.generate`, `read`, contexts and evaluation. Their beam search repeats
all arrays of a cache, some of which have no rows here, and cannot be used.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx
from tunix.models.gemma3 import model as gemma3  # pyright: ignore[reportMissingImports]

import kvjax


class Attention(gemma3.Attention):
    """Their layer, with kvjax between its projections."""

    def block(self, x: Any, positions: Any, cache: kvjax.guests.GuestCache, attn_mask: Any) -> Any:
        """Attends over the cache."""
        rotate = functools.partial(
            gemma3.apply_rope, positions=positions, head_dim=self.head_dim,
            base_frequency=self.rope_base_frequency, scale_factor=self.rope_scale_factor,
        )  # fmt: skip
        q, (k, v) = self.q_einsum(x), self.kv_einsum(x)
        q, k = rotate(self._query_norm(q)), rotate(self._key_norm(k))
        out, cache = cache.attend(q, k, v, positions)
        return cache, self.attn_vec_einsum(out)


class Gemma3(gemma3.Gemma3):
    """Their model, which makes caches of kvjax when it reads a prompt, and knows padding."""

    def init_cache(self, batch_size: int, cache_size: int, dtype: Any) -> tuple:
        """Leaves the caches to the prompt, whose length says how many tokens may follow."""
        return ()

    def states(self, tokens: Any, positions: Any, caches: tuple) -> tuple[Any, tuple]:
        """Calls their model up to the last norm."""
        x, written = self._encode_and_get_inputs(tokens=tokens), []
        for layer, cache in zip(self.layers, caches, strict=True):
            cache, x = layer(x, positions, cache, None)
            written.append(cache)
        return self.final_norm(x), tuple(written)

    def __call__(self, tokens: Any, positions: Any, cache: tuple, attention_mask: Any) -> tuple:
        """Calls it as `Sampler` does."""
        if not cache:
            rows, width = tokens.shape
            cache = kvjax.guests.loop_caches(
                functional(self), self.transform, batch=rows, max_prompt=width,
                max_new=attention_mask.shape[-1] - width, dtype=self.config.param_dtype,
            )  # fmt: skip
            # The last token of a prompt sees all of it, and no padding.
            positions = jnp.where(attention_mask[:, -1, :width], positions, -1)
        x, cache = self.states(tokens, positions, cache)
        return self.embedder.decode(x), cache


def kvjax_inside(model: Any, transform: kvjax.KVTransform | str) -> None:
    """Lets a `Sampler` of this model keep its keys and values in caches of kvjax.

    Args:
      model: a `Gemma3` of theirs.
      transform: the method. `Sampler` says how many tokens there may be: its `cache_size`.
    """
    model.__class__, model.transform = Gemma3, transform
    for layer in model.layers:
        layer.attn.__class__ = Attention


def functional(model: Gemma3) -> Any:
    """Makes the model one for kvjax's calls, once `kvjax_inside` has had it."""
    graph, weights = nnx.split(model)
    c, local = model.config, gemma3.AttentionType.LOCAL_SLIDING
    return kvjax.guests.functional_model(
        lambda weights, *call: nnx.merge(graph, weights).states(*call), weights,
        head=lambda weights, x: nnx.merge(graph, weights).embedder.decode(x),
        num_layers=c.num_layers, query_heads=c.num_heads, kv_heads=c.num_kv_heads,
        head_dim=c.head_dim, vocab_size=c.num_embed,
        attention_scale=model.layers[0].attn.query_pre_attn_scalar,
        windows=tuple(c.sliding_window_size if x.attn.attn_type == local else None
                      for x in model.layers),
    )  # fmt: skip
