"""Tokens that a layer keeps in all of its heads, for models that prune hidden states."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.attention.layer import Cache, check_caches, layer_caches
from kvjax.protocol import PASSED, Extent


def kept_tokens(cache: Cache) -> Int[Array, "B T"]:
    """Positions of the tokens that survive in every KV head of a layer, in order, -1 padded.

    For models that prune hidden states after a layer's prompt. Where a transform `passes` fewer
    tokens to the next layer than its own layer caches (PyramidInfer at the paper's ratios), only
    those. The newest token is always among them.

    Args:
      cache: of one layer, after its prompt.

    Returns:
      `[B, T]`; T is what the transform `passes` at most, or else the cache's slots.

    Raises:
      TypeError, ValueError: no caches, or caches stacked by layer.

    Example:
      >>> import jax, jax.numpy as jnp, kvjax
      >>> attend = jax.jit(kvjax.attend, static_argnames="phase")
      >>> tx = kvjax.StreamingLLM(budget=3, sinks=1)
      >>> cache = kvjax.init_cache(tx, batch=1, kv_heads=2, head_dim=4, max_prompt=5, max_new=1)
      >>> rows = jnp.ones((1, 2, 5, 4))
      >>> _, cache = attend(cache, rows, rows, rows, jnp.arange(5)[None], phase="prompt")
      >>> kvjax.kept_tokens(cache).tolist()
      [[0, 3, 4, -1]]
    """
    check_caches(cache, "kept_tokens")
    parts, none = layer_caches(cache), jnp.iinfo(jnp.int32).max
    held, sizes = [], []
    for part in parts:
        kv = part.kv
        kept = kv.live & kv.column(PASSED) if PASSED in kv.columns else kv.live
        held.append(jnp.where(kept, kv.position, none).reshape(kept.shape[0], -1))
        passed = part.transform.extent(Extent(kv.max_prompt, kv.max_new)).passed
        sizes.append(kv.slots if passed is None else min(passed, kv.slots))
    position = jnp.sort(jnp.concatenate(held, axis=1), axis=1)
    # A position stands here once per head that holds it: as often as there are heads, if all do.
    more = sum(part.kv.shape[1] for part in parts) - 1
    first, last = position[:, : position.shape[1] - more], position[:, more:]
    common = jnp.sort(jnp.where(first == last, first, none), axis=1)[:, : min(sizes)]
    return jnp.where(common == none, -1, common)
