"""Empty caches of attention layers: `init_cache`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from kvjax.attention.layer import Cache, LayerCache, QueryWindow, kept_rope
from kvjax.budgets.layers import layers_of
from kvjax.cache.remainders import with_remainders
from kvjax.cache.rope import Rope, check_rope
from kvjax.cache.slots import KVCache, empty_cache
from kvjax.checks import as_scale, check_count, check_logits, floating
from kvjax.compose.chain import parts_of
from kvjax.compose.wrappers import HeadGroups
from kvjax.devices import Placement, check_mesh
from kvjax.protocol import (
    AttentionOptions,
    Extent,
    KVTransform,
    check_transform,
    is_bound,
    takes_part,
)

# Flushes at which a value may be rounded again and again. Each adds several tokens at once, which
# are not lost as a whole, and errors add up like a random walk: after 64 to some 8 roundings.
MOST_WRITES = 64


def default_dtype() -> DTypeLike:
    """Returns the default dtype of keys and values: float32 on CPU, else bfloat16.

    On CPUs bfloat16 is several times slower.
    """
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def init_cache(
    transform: KVTransform,
    *,
    batch: int,
    kv_heads: int,
    head_dim: int,
    max_prompt: int,
    max_new: int,
    query_heads: int | None = None,
    dtype: DTypeLike | None = None,
    layer: int | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    max_length: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    rope: Rope | None = None,
) -> Cache:
    """Makes an empty cache for one attention layer, with the slots that the transform promises.

    Args:
      transform: the layer's transform (one element of `bind`'s result).
      batch: rows; in `jax.eval_shape`, a symbolic dimension of `jax.export` too.
      kv_heads, head_dim: number of KV heads, and channels of each, as in the model.
      max_prompt, max_new: most prompt tokens and most new tokens of a row, all turns together.
      query_heads: as in the model; `kv_heads` by default.
      dtype: dtype of keys and values; by default float32 on CPU, where bfloat16 is several times
        slower, and bfloat16 elsewhere.
      layer: the number of the layer, on which budgets, random numbers and calibrations depend. By
        default 0, or the layer that the transform was bound to, if it stands for that one alone.
      mesh: devices that `attend` divides the cache among, with axes "data" for its rows and
        "tensor" for its heads. Rows that the axis does not divide evenly are on all of its
        devices, and so are KV heads, and those of `HeadGroups`. None: one device, or
        as XLA divides the arrays that it is given.
      max_length: length of a text for models that depend on it, such as those with the frequencies
        of LongRoPE (`LayerCache.max_length`); `max_prompt + max_new` by default. It bounds nothing.
      scale: scale of the logits in every call of `attend`, a Python number; `head_dim ** -0.5` by
        default.
      window: number of newest positions that a query sees. None: all, or the window of a
        `kvjax.Ring`, which does not hold other tokens.
      soft_cap: bound c of the logits, `c · tanh(logit / c)`; None: no bound.
      rope: the `Rope` of the prompts to come, or one with arrays of the same shapes. Methods that
        look at unrotated keys at a flush keep it in the cache, whose structure is then that of a
        used one, as `jax.lax.cond` and restored checkpoints need. None: such a method puts it into
        the cache with the first prompt.

    Returns:
      A `LayerCache`, or a tuple of them, one per group, for `HeadGroups`.

    Raises:
      TypeError, ValueError: a count is not a positive int, `query_heads` is not a multiple of
        `kv_heads`, `dtype` is not floating, `scale` is an array or traced (`1 / jnp.sqrt(16)`), the
        transform must be bound to a layer first or was bound to others than `layer`, or `mesh` has
        other axes.

    Example:
      >>> import kvjax
      >>> cache = kvjax.init_cache(kvjax.SnapKV(budget=64), batch=2, kv_heads=4, query_heads=8,
      ...                          head_dim=16, max_prompt=512, max_new=32)
      >>> cache.kv.shape
      (2, 4, 96)
    """
    check_transform(transform, "init_cache")
    query_heads = kv_heads if query_heads is None else query_heads
    counts = {
        "kv_heads": kv_heads, "query_heads": query_heads, "batch": batch, "head_dim": head_dim,
        "max_prompt": max_prompt,
    }  # fmt: skip
    for name, value in counts.items():
        if name != "batch" or not jax.export.is_symbolic_dim(value):
            check_count(name, value, 1)
    check_count("max_new", max_new, 0)
    scale = head_dim**-0.5 if scale is None else as_scale(scale)
    check_logits(window, soft_cap)
    check_rope(rope, head_dim)
    max_length = max_prompt + max_new if max_length is None else max_length
    check_count("max_length", max_length, 1)
    bound = layers_of(transform)
    if layer is None and len(bound or (0,)) == 1:
        layer = (bound or (0,))[0]
    if bound is not None and layer not in bound:
        raise ValueError(
            f"{transform!r} stands for some layers of a model: give init_cache layer=, one of "
            f"{list(bound)}, got {layer}"
        )
    check_count("layer", layer, 0)
    if query_heads % kv_heads:
        raise ValueError(
            f"query_heads must be a multiple of kv_heads, got {query_heads} and {kv_heads}"
        )
    if dtype is None:
        dtype = default_dtype()
    dtype = floating(dtype)
    if not is_bound(transform):
        raise ValueError(
            f"{transform!r} decides per layer: give init_cache one element of "
            "kvjax.bind(transform, num_layers)"
        )
    mesh = None if mesh is None else check_mesh(mesh)
    if isinstance(transform, HeadGroups):
        transform.check_heads(kv_heads)
        same: dict[str, Any] = {"batch": batch, "head_dim": head_dim, "max_prompt": max_prompt}
        same |= {"max_new": max_new, "dtype": dtype, "layer": layer, "max_length": max_length}
        same |= {"scale": scale, "window": window, "soft_cap": soft_cap, "rope": rope}
        group, whole = query_heads // kv_heads, Placement.of(mesh, kv_heads, divisible=False)
        made = (
            init_cache(tx, kv_heads=len(heads), query_heads=len(heads) * group, **same)
            for heads, tx in transform.groups
        )
        caches = tuple(
            dataclasses.replace(cache, placement=whole, group_heads=heads)  # pyright: ignore[reportArgumentType]  # each has one rectangle
            for cache, (heads, _) in zip(made, transform.groups, strict=True)
        )
        if transform.order is None:
            return caches
        return tuple(
            dataclasses.replace(cache, heads=jnp.array(of_layers[layer], jnp.int32))
            for cache, of_layers in zip(caches, transform.heads, strict=True)
        )
    extent, needs = transform.extent(Extent(max_prompt, max_new)), transform.needs
    if needs.reposition and needs.decode_queries:
        raise ValueError(
            f"{transform!r} compares queries of earlier steps with keys whose ranks have changed "
            "since: reposition=True cannot be combined with Every or WhenFull of a method that "
            "observes queries"
        )
    lists = query_heads if needs.unfold else kv_heads
    kv = empty_cache(
        batch, lists, head_dim, extent.total, max_prompt=max_prompt, max_new=max_new, dtype=dtype,
        group=query_heads // lists, unfolded=lists // kv_heads, interval=extent.interval,
        unrotated_keys=needs.unrotated_keys,
    )  # fmt: skip
    if needs.accumulated_attention:
        kv = kv.with_column("attention", jnp.zeros((*kv.shape, kv.group), jnp.float32))
    kv, state = transform.init(kv, layer)  # pyright: ignore[reportArgumentType]  # `check_count` has seen a number
    if _writes_often(transform, kv):
        kv = with_remainders(kv)
    last_queries = None
    if needs.decode_queries:
        last_queries = QueryWindow.empty(
            batch, query_heads, needs.queries(max_prompt), head_dim, dtype
        )
    # From the beginning, since a prompt may not change the structure of a cache.
    sinks = None if extent.interval is None else jnp.full((query_heads,), -jnp.inf, jnp.float32)
    window = extent.window if window is None else window
    options = AttentionOptions(scale, window, soft_cap, sinks)
    placement = Placement.of(mesh, kv_heads, divisible=True)
    rope = kept_rope(transform, rope)
    return LayerCache(
        kv, state, last_queries, rope, None, transform, max_length, options, placement
    )  # fmt: skip


def _writes_often(transform: KVTransform, kv: KVCache) -> bool:
    """Tells whether a part may write values in decode steps, or at many flushes."""
    parts = [part for part in parts_of(transform) if part.needs.writes_values]
    if kv.max_new and any(takes_part(part, "step") for part in parts):
        return True
    flushes = 0 if kv.interval is None else kv.max_new // kv.interval
    return flushes > MOST_WRITES and any(takes_part(part, "flush") for part in parts)
