"""A layer's cache on a mesh: which axes divide its arrays, and calls on each device's part."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.core
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from kvjax.attention.init_cache import init_cache
from kvjax.attention.layer import (
    Cache,
    Part,
    QueryWindow,
    Reading,
    layer_caches,
    map_parts,
)
from kvjax.budgets.layers import layers_of
from kvjax.cache.rope import Rope
from kvjax.devices import Placement, put
from kvjax.protocol import AttentionOptions, KVTransform
from kvjax.storage.offload.payload import HOST_MEMORY

AnyCache = TypeVar("AnyCache", bound=Cache)


def placement_of(cache: Cache) -> Placement | None:
    """Returns the placement of a layer's cache; None: on one device, or wherever XLA puts it."""
    parts = layer_caches(cache)
    return parts[0].placement if parts and isinstance(parts[0], Part) else None


def mesh_of_cache(cache: Cache) -> Mesh | AbstractMesh | None:
    """The mesh that a layer's cache is divided among, if any."""
    placement = placement_of(cache)
    return None if placement is None else placement.mesh


def has_rows(cache: Part) -> Part:
    """Marks the arrays of a cache whose first axis counts rows: `True` and `False` as leaves.

    All arrays of the slots have one. In a transform's state it is the arrays that grow with the
    number of rows.
    """

    def every(tree: Any, has: bool = True) -> Any:
        return jax.tree.map(lambda x: has, tree)

    # Only frequencies that depend on a row's length have an axis of rows.
    rope = jax.tree.map(lambda x: x.ndim == 2, cache.rope)
    options = every(cache.options, False)
    if isinstance(cache, Reading):
        whole, stored, queries = has_rows(cache.cache), every(cache.stored), every(cache.queries)
        return dataclasses.replace(
            cache, cache=whole, stored=stored, rows=True, length_before=True,
            document_length=every(cache.document_length), queries=queries,
            record=every(cache.record), rope=rope, options=options,
        )  # fmt: skip
    kv = cache.kv
    flags = _rows_of_state(
        cache.transform, kv.shape[1] // kv.unfolded, kv.shape[1] * kv.group, kv.k.shape[3],
        kv.max_prompt, kv.max_new, kv.k.dtype,
    )  # fmt: skip
    state = jax.tree.unflatten(jax.tree.structure(cache.state), flags)
    return dataclasses.replace(
        cache,
        kv=every(kv),
        state=state,
        window=every(cache.window),
        rope=rope,
        heads=every(cache.heads, False),
        options=options,
        clock=every(cache.clock),
    )


@functools.lru_cache(maxsize=256)
def _rows_of_state(
    transform: KVTransform,
    kv_heads: int,
    query_heads: int,
    head_dim: int,
    max_prompt: int,
    max_new: int,
    dtype: DTypeLike,
) -> tuple[bool, ...]:
    """Marks the arrays of a transform's state that grow with the number of rows."""

    def state(rows: int) -> list[jax.ShapeDtypeStruct]:
        make = functools.partial(
            init_cache, transform, batch=rows, kv_heads=kv_heads, query_heads=query_heads,
            head_dim=head_dim, max_prompt=max_prompt, max_new=max_new, dtype=dtype,
            layer=(layers_of(transform) or (0,))[0],
        )  # fmt: skip
        made: Any = jax.eval_shape(make)
        return jax.tree.leaves(made.state)

    pairs = zip(state(1), state(2), strict=True)
    return tuple(of_one_row.shape != of_two_rows.shape for of_one_row, of_two_rows in pairs)


def cache_specs(cache: Cache) -> Cache:
    """Returns a cache with a `PartitionSpec` in the place of each array.

    Rows are the first axis and heads, or lists of slots, the second one. Arrays of a state that
    hold for all rows alike have heads as the first of two axes or more.

    Args:
      cache: of one layer, arrays or shapes, whole.
    """
    return map_parts(_specs, cache)


def _specs(cache: Part) -> Part:
    placement = cache.placement
    return divided_by(cache, placement.rows_axis(cache.kv.shape[0]), placement.heads_axis)  # pyright: ignore[reportOptionalMemberAccess]  # it is divided among devices


def divided_by(cache: Part, rows: Any, heads: Any) -> Part:
    """Returns the `cache_specs` of a cache whose rows and heads are divided by these axes."""
    kv = cache.kv
    lists = kv.shape[1], kv.shape[1] * kv.group  # per KV head, or per query head

    def spec(x: Any, has: bool) -> P:
        if not has:
            alike = x.ndim > 1 and x.shape[0] == kv.shape[1]
            return P(heads) if alike else P()
        return P(rows, heads) if x.ndim > 1 and x.shape[1] in lists else P(rows)

    specs = jax.tree.map(spec, cache, has_rows(cache))
    changed = {"rope": rope_specs(cache.rope, rows), "options": sinks_specs(cache.options, heads)}
    # The number of its queries may be that of heads.
    window = QueryWindow._make((P(rows, heads), P(rows)))
    if isinstance(cache, Reading):
        queries = None if cache.queries is None else window
        whole = divided_by(cache.cache, rows, heads)
        record = None if cache.record is None else cache.record.specs(rows, heads)
        return dataclasses.replace(specs, cache=whole, queries=queries, record=record, **changed)
    window = None if cache.window is None else window
    return dataclasses.replace(specs, window=window, **changed)


def on_each_device(
    function: Callable[..., Any], placement: Placement, args: tuple, specs: tuple, out: Callable
) -> Any:
    """Calls a function of arrays on each device's part of them.

    Args:
      function: of `args`; its parts depend on each other through `kvjax.devices.all_heads` alone.
      placement: the devices.
      args: pytrees of whole arrays.
      specs: their partition specs.
      out: returns the specs of the function's result, whose shapes it is given.
    """
    shapes = jax.eval_shape(function, *args)
    mapped = jax.shard_map(
        function, mesh=placement.mesh, in_specs=specs, out_specs=out(shapes), check_vma=False
    )
    return mapped(*args)


def rope_specs(rope: Rope | None, rows: str | None) -> Rope | None:
    """Returns the specs of frequencies, which are divided by rows where they depend on them."""
    return jax.tree.map(lambda x: P(rows) if x.ndim == 2 else P(), rope)


def sinks_specs(options: AttentionOptions, heads: Any) -> AttentionOptions:
    """Divides the sinks of an attention by its heads."""
    return jax.tree.map(lambda _: P(heads), options)


def divided_among(cache: Cache, mesh: Mesh | AbstractMesh | None, kv_heads: int) -> Cache:
    """Returns a layer's cache as one for a mesh, as `init_cache(mesh=)` makes it.

    Args:
      cache: of one layer, arrays or shapes.
      mesh: the devices; None: one device.
      kv_heads: of the layer.
    """
    placement = Placement.of(mesh, kv_heads, divisible=isinstance(cache, Part))
    return map_parts(lambda part: dataclasses.replace(part, placement=placement), cache)


def placed(cache: AnyCache) -> AnyCache:
    """Brings a layer's cache to its place; on one device it stays as it is.

    Outside of `jit` arrays are moved, inside of it XLA is told where they belong.
    """
    placement = placement_of(cache)
    if placement is None:
        return cache

    def place(x: jax.Array, spec: P) -> jax.Array:
        on_host = jax.typeof(x).memory_space == jax.memory.Space.Host
        where = NamedSharding(placement.mesh, spec, memory_kind=HOST_MEMORY if on_host else None)
        if isinstance(x, jax.core.Tracer):
            # On the host it stays where the call on each device has put it.
            return x if on_host else jax.lax.with_sharding_constraint(x, where)
        if x.is_fully_addressable and not where.is_fully_addressable:
            return put(x, placement.mesh, *spec, memory=where.memory_kind)
        move = jax.device_put if on_host else jax.lax.with_sharding_constraint
        return move(x, where)

    return jax.tree.map(place, cache, cache_specs(cache))
