"""kvjax in the Llama 3 of jax-llm-examples (plain JAX): their `prefill` and `decode_step`.

    with jax.set_mesh(cfg.mesh):
        cache = kvjax_cache(cfg, "h2o(budget=1024)", batch=2, max_prompt=8192, max_new=512)
        following, logits, cache = llama.prefill(tokens, weights, cache, cfg)
        following, cache = llama.decode_step(following[:, -1:], weights, cache, cfg)
        kvjax.check_dropped(tuple(cache.k))

`max_prompt` counts what `prefill` pads a prompt to. Each device of the mesh has all of the caches,
and the method says how keys and values are stored, where theirs asks for `quant_cache`.

`functional` makes the model one for `kvjax.generate`, `read`, contexts and evaluation, which are
called in the same `jax.set_mesh`. The axes of the mesh are `AxisType.Auto` for that, and all
`ShardingRules` None. Their repository is not a package: its folder `llama3` goes on Python's path.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from llama3_jax import model as llama  # pyright: ignore[reportMissingImports]

import kvjax


def attention_block(
    x: Any, segments: Any, layer: Any, sin: Any, cos: Any, cfg: Any, cache: Any, number: int
) -> tuple[Any, tuple]:
    """Calls kvjax between the projections of their attention, in whose place it is."""
    q, k, v = (llama.einsum("btd,dhq->bhtq", x.astype(cfg.dtype), w).astype(cfg.dtype)
               for w in (layer.q, layer.k, layer.v))  # fmt: skip
    q, k = (llama.apply_rotary_embedding(y, sin, cos) for y in (q, k))
    positions = cache.fill_len()[:, None] + llama.segment_ids_to_positions(segments)
    positions = jnp.where(segments == 0, -1, positions)  # their padding is 0
    out, written = cache.k[number].attend(q, k, v, positions, layout="BHTD")
    axes = llama.logical_to_physical(("batch", "sequence", "act_embed"), cfg.rules)
    return llama.einsum("bhtq,hqd->btd", out, layer.o, axes), (written, ())


def kvjax_cache(cfg: Any, transform: kvjax.KVTransform | str, batch: int, **sizes: Any) -> Any:
    """Makes a cache for `prefill`, with `max_prompt` and `max_new` as in `loop_caches`."""
    caches = kvjax.guests.loop_caches(
        functional(cfg, None), transform, batch=batch, dtype=cfg.dtype, **sizes
    )
    nothing_yet = jnp.array(-1), jnp.zeros(batch, jnp.int32)
    return llama.KVCache(list(caches), [()] * len(caches), *nothing_yet, batch, cfg.max_seq_len)


def states(cfg: Any, weights: Any, tokens: Any, positions: Any, caches: tuple) -> tuple[Any, tuple]:
    """Calls their layers, up to the last norm. The caches know the positions."""
    angles = llama._generate_pos_embeddings(positions, cfg.head_dim, cfg)
    sin, cos = (y.astype(cfg.dtype) for y in angles)
    theirs = llama.KVCache(list(caches), [], jnp.array(-1), jnp.zeros(len(tokens), jnp.int32))
    x, written = weights.embedding[tokens], []
    for number, layer in enumerate(weights.layers):
        x, (cache, _) = llama.forward_layer(x, tokens, layer, sin, cos, number, cfg, theirs)
        written.append(cache)
    return llama.rms_norm(x, weights.gamma_final), tuple(written)


def functional(cfg: Any, weights: Any) -> Any:
    """Makes their model one for kvjax's calls."""
    llama.attention_block = attention_block
    whole = jax.sharding.NamedSharding(cfg.mesh, jax.sharding.PartitionSpec())
    llama.KVCache.shardings = classmethod(lambda *_: whole)
    return kvjax.guests.functional_model(
        functools.partial(states, cfg), weights,
        head=lambda weights, x: llama.einsum("btd,dv->btv", x, weights.lm_head),
        num_layers=cfg.num_layers, query_heads=cfg.q_heads, kv_heads=cfg.kv_heads,
        head_dim=cfg.head_dim, vocab_size=cfg.vocab_size,
    )  # fmt: skip
