"""The error for tokens that were lost: `check_dropped`."""

from __future__ import annotations

from typing import Any

import jax
import jax.core

from kvjax.attention.layer import LayerCache, Part, check_caches


def check_dropped(caches: object) -> None:
    """Raises if tokens were lost because they found no free slot.

    Code inside `jit` cannot raise, so `attend` counts such tokens in `KVCache.dropped`, and what
    follows is text of another prompt. Call this outside of `jit` behind a loop of your own, once a
    text or as often as you like: it waits for the caches and reads a number of each one.
    `kvjax.generate`, `stream` and `read` call it.

    Args:
      caches: of one layer, or a pytree of them, such as a list by layer; also stacked by layer, and
        with prompts that are not complete.

    Raises:
      RuntimeError: names the first cache that lost tokens, their number, and what to do.
      TypeError: `caches` holds something else.
      ValueError: it is called inside `jit`.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> tx, x = kvjax.Full(), jnp.ones((1, 2, 6, 16))
      >>> cache = kvjax.init_cache(tx, batch=1, kv_heads=2, head_dim=16, max_prompt=4, max_new=1)
      >>> _, cache = kvjax.attend(cache, x, x, x, jnp.arange(6)[None], phase="prompt")
      >>> kvjax.check_dropped(cache)
      Traceback (most recent call last):
      RuntimeError: caches lost tokens that found no free slot, up to 1 of a row: the row has more \
tokens, 6, than the max_prompt + max_new = 5 of init_cache
    """
    check_caches(caches, "check_dropped", stacked=True, reading=True, resting=True)
    leaves, _ = jax.tree.flatten_with_path(caches, is_leaf=lambda x: isinstance(x, Part))
    if any(isinstance(part.kv.dropped, jax.core.Tracer) for _, part in leaves):
        raise ValueError("check_dropped is called outside of jit, where an error can be raised")
    for path, part in leaves:
        lost = int(part.kv.dropped.max())
        if lost:
            raise RuntimeError(
                f"caches{_name(path)} lost tokens that found no free slot, up to {lost:,} of a "
                f"row: {_reason(part)}"
            )


def _name(path: tuple[Any, ...]) -> str:
    """Returns where a cache stands in a pytree, without the fields that only kvjax knows."""
    return jax.tree_util.keystr(tuple(key for key in path if not hasattr(key, "name")))


def _reason(part: Part) -> str:
    """Returns why tokens were lost, and what to do."""
    kv, length = part.kv, int(part.kv.length.max())
    if length > kv.max_tokens:
        return (
            f"the row has more tokens, {length:,}, than the max_prompt + max_new = "
            f"{kv.max_tokens:,} of init_cache"
        )
    if kv.interval is not None and isinstance(part, LayerCache) and part.clock is None:
        return (
            f"call kvjax.flush(caches) after every {kv.interval} decode steps "
            "(kvjax.flush_interval), or make caches that flush themselves with "
            "kvjax.self_flushing(caches)"
        )
    return (
        f"{part.transform!r:.200} keeps more than its `extent` promises, which "
        "kvjax.testing.check finds"
    )
