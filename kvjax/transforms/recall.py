"""What the methods share that keep everything and attend to a selection."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.budgets.budgets import check_count
from kvjax.cache.slots import KVCache, Tail


def check_dense_layers(layers: tuple[int, ...]) -> None:
    """Raises unless `layers` is a tuple of layer numbers."""
    if not isinstance(layers, tuple):
        raise TypeError(f"dense_layers must be a tuple of layer numbers, got {layers!r}")
    for layer in layers:
        check_count("a dense layer", layer, 0)


def check_flag(name: str, value: bool) -> None:
    """Raises TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def lists_per_row(cache: KVCache, per_query_head: bool) -> int:
    """How many selections a row makes: one per KV head, or one per query head."""
    return cache.shape[1] * (cache.group if per_query_head else 1)


def begin_tail(cache: KVCache, size: int | None, lists: tuple[int, int]) -> KVCache:
    """Gives an empty cache its tail: see `kvjax.cache.slots.Tail`."""
    start, count, settled = (jnp.zeros((), jnp.int32) for _ in range(3))
    tail = Tail(start, count, settled, size, lists)
    return cache.replace(tail=tail)


def by_group(query: Float[Array, "B Q 1 D"], cache: KVCache) -> Float[Array, "B H G D"]:
    """The query of a step, KV head by KV head."""
    batch, kv_heads, _ = cache.shape
    return query.reshape(batch, kv_heads, cache.group, query.shape[-1])
