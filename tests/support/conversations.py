"""Calls of a layer one after the other: to be traced, compiled, or run on a mesh."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import kvjax

MAX_NEW = 8


def arrays(rows: int, kv_heads: int, query_heads: int, length: int, head_dim: int, put=jnp.asarray):
    """Queries, keys, values and positions of all tokens."""
    rng = np.random.default_rng(0)
    sizes = [(rows, heads, length, head_dim) for heads in (query_heads, kv_heads, kv_heads)]
    position = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    return [*(put(rng.normal(size=size).astype(np.float32)) for size in sizes), put(position)]


def conversation(
    tx, calls, max_prompt: int, q, k, v, position, mesh=None, flushes_itself=False, **options
):
    """Outputs of calls `(tokens, phase, last)`, and the caches after them.

    Every decode step is followed by a flush, unless the cache flushes itself. `options` are those
    of `kvjax.attend`.
    """
    cache = kvjax.init_cache(
        tx, batch=len(q), kv_heads=k.shape[1], query_heads=q.shape[1], head_dim=q.shape[3],
        max_prompt=max_prompt, max_new=MAX_NEW, dtype=jnp.float32, mesh=mesh,
    )  # fmt: skip
    cache = kvjax.self_flushing(cache) if flushes_itself else cache
    frequencies = 1e4 ** -(jnp.arange(0, q.shape[3], 2, dtype=jnp.float32) / q.shape[3])
    rope = kvjax.Rope(frequencies) if tx.needs.unrotated_keys else None
    outs, caches, seen = [], [], 0
    for count, phase, last in calls:
        own = slice(seen, seen + count)
        new = (x[:, :, own] for x in (q, k, v))
        out, cache = kvjax.attend(
            cache, *new, position[:, own], phase=phase, last=last, rope=rope, **options
        )
        cache, seen = kvjax.flush(cache) if phase == "decode" else cache, seen + count
        outs.append(out)
        caches.append(cache)
    return outs, caches
