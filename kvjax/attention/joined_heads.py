"""One reading of a prompt for a whole layer, and the caches that are cut from it.

A layer with head groups is read once for all of its heads. So are layers whose transforms differ,
and prompts that several methods compress. Each cache then gets the reading of its own heads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.attention.call import add_attention, query_heads
from kvjax.attention.init_cache import init_cache
from kvjax.attention.layer import Cache, LayerCache, QueryWindow, Reading, layer_caches
from kvjax.attention.prompt import begin, compress, evicted, stored
from kvjax.budgets.layers import layers_of
from kvjax.cache.payload import Dense
from kvjax.cache.rearrange import widen
from kvjax.cache.slots import FREE, NEG_INF, STORED_SLOT, Column, KVCache
from kvjax.compose.chain import parts_of, state_of_parts, states_of_parts
from kvjax.compose.wrappers import HeadGroups, Heads, in_head_order, needs_of
from kvjax.protocol import KVTransform, State, accumulated_attention

AllHeads = tuple[State, Int[Array, " H"]]
"""State of the method for all heads (`HeadGroups.whole`), and the KV heads in its order."""


def can_join(cache: Cache) -> bool:
    """Returns whether the head groups of a layer can read a further prompt together.

    On a mesh, only `attend` reads. Groups read by themselves if they need different things of a
    prompt, keep tokens query head by query head, or rotate keys by rank.
    """
    parts = layer_caches(cache)
    kinds = {(part.transform.needs, *part.kv.columns) for part in parts}
    needs = parts[0].transform.needs
    apart = needs.unfold or needs.reposition or parts[0].placement is not None
    return isinstance(cache, tuple) and len(kinds) == 1 and not apart


def join(
    observer: KVTransform,
    transform: KVTransform,
    cache: Sequence[LayerCache],
    slots: int,
    most: int,
    document: Int[Array, " B"] | None,
) -> Reading:
    """Begins one reading of a further prompt for all heads of a layer.

    Tokens have the slots of their rectangles. Rectangles with fewer slots get free ones behind
    them.

    Args:
      observer: the transform of the reading; it keeps all tokens.
      transform: the head groups.
      cache: of the groups, which `can_join`.
      slots: of each head; at least those of the largest rectangle.
      most: slots of each head, at most, while the prompt is read.
      document: as in `begin`.

    Returns:
      A reading of the heads in their own order, with the columns of the groups.
    """
    first, readings = cache[0], [begin(part) for part in cache]
    kvs, group = [reading.kv for reading in readings], first.kv.group
    (made,) = layer_caches(_cache_like(observer, first, sum(kv.shape[1] for kv in kvs)))

    def joined(arrays: Sequence[Array], fill: float) -> Array:
        """Joins arrays `[B, H, S, ...]` of the rectangles, with so many slots."""
        wide = [
            jnp.pad(
                x, ((0, 0), (0, 0), (0, slots - x.shape[2]), *((0, 0),) * (x.ndim - 3)),
                constant_values=fill,
            )
            for x in arrays
        ]  # fmt: skip
        return in_head_order(transform, cache, wide)

    columns = {
        name: dataclasses.replace(
            column, values=joined([kv.column(name) for kv in kvs], column.fill)
        )
        for name, column in kvs[0].columns.items()
    }
    kv = made.kv.replace(
        k=Dense(joined([kv.k.read() for kv in kvs], 0)),
        v=Dense(joined([kv.v.read() for kv in kvs], 0)),
        position=joined([kv.position for kv in kvs], FREE),
        log_mass=joined([kv.log_mass for kv in kvs], NEG_INF),
        pinned=joined([kv.pinned for kv in kvs], False),
        columns=columns,
        used=in_head_order(transform, cache, [kv.used for kv in kvs]),
        dropped=in_head_order(transform, cache, [kv.dropped for kv in kvs]),
        length=first.kv.length,
        capacity=slots,
        max_new=most - first.kv.max_prompt,
    )
    reading = begin(dataclasses.replace(made, kv=kv), document=document)
    kv = reading.kv.with_column(STORED_SLOT, columns[STORED_SLOT].values)
    queries = readings[0].queries
    if queries is not None:
        of_groups = [x.queries.query for x in readings]
        by_kv_head = [x.reshape(len(x), -1, group, *x.shape[2:]) for x in of_groups]
        query = in_head_order(transform, cache, by_kv_head)
        query = query.reshape(len(query), -1, *query.shape[3:])
        queries = queries._replace(query=query)
    whole = dataclasses.replace(reading.cache, kv=kv)
    return dataclasses.replace(reading, cache=whole, queries=queries)


def all_heads_of(transform: KVTransform, cache: Cache) -> AllHeads | None:
    """Returns the state of a layer's method for all heads; None: it has no such method."""
    if not isinstance(transform, HeadGroups) or (whole := transform.whole) is None:
        return None
    parts, kv_heads = layer_caches(cache), transform.kv_heads
    made = jax.eval_shape(functools.partial(_cache_like, whole, parts[0], kv_heads))
    states = [_deciding(part, whole) for part in parts]
    state = jax.tree.map(_join_state, made.state, *states)
    return state, jnp.concatenate([jnp.asarray(heads) for heads in transform.heads_in(parts)])


def method_for_all(transform: KVTransform) -> KVTransform | None:
    """Returns the method that decides for all heads of a layer what stays of a reading, if any.

    It is compiled once for all layers. Each group decides for itself where keys are stored
    unrotated, or query head by query head.
    """
    needs = needs_of(transform)
    if not isinstance(transform, HeadGroups) or needs.unrotated_keys or needs.unfold:
        return None
    return transform.whole


def decide_for_all(cache: LayerCache, heads: Int[Array, " H"], reading: Reading) -> Reading:
    """Lets the method for all heads evict or merge, for `cut`.

    Args:
      cache: an empty one of the method, with its state.
      heads: KV heads in its order.
      reading: of the whole layer.

    Returns:
      A reading of the heads in the method's order, whose tokens are in the first slots.
    """
    of_method = _reading_of(cache, of_heads(reading, heads))
    return evicted(_with_slots_as_read(of_method, reading.kv), to_front=True)


def cut(transform: KVTransform, cache: Cache, reading: Reading) -> Cache:
    """Ends a prompt that was read for a whole layer, in each rectangle of the layer's cache.

    Nothing is attended to: the reading holds what the methods need of the prompt's attention.

    Args:
      transform: of the cache.
      cache: as it was before the prompt. Donate it.
      reading: by a transform whose needs include those of the cache's; or what `decide_for_all`
        has left of it, which is only stored.

    Returns:
      The cache after the prompt. Rows that were stored stay as they are, bit for bit.
    """
    parts = layer_caches(cache)
    if not isinstance(transform, HeadGroups):
        return compress(_with_slots_as_read(_reading_of(parts[0], reading), reading.kv))
    whole = transform.whole
    if whole is None or reading.transform != whole:
        heads_of_parts = zip(parts, transform.heads_in(parts), strict=True)
        of_parts = (_reading_of(part, of_heads(reading, heads)) for part, heads in heads_of_parts)
        return tuple(compress(_with_slots_as_read(of_part, reading.kv)) for of_part in of_parts)
    after, start = [], 0
    for part in parts:
        heads = range(start, start + part.kv.shape[1])
        start = heads.stop
        after.append(stored(_decided_reading_of(part, whole, heads, reading)))
    return tuple(after)


def of_heads(reading: Reading, heads: Heads) -> Reading:
    """Returns the reading of some KV heads, each with its query heads."""
    kv, kv_heads, query = reading.kv, jnp.asarray(heads), query_heads(heads, reading.kv.group)
    k, v = (Dense(payload.read()[:, kv_heads]) for payload in (kv.k, kv.v))
    used, dropped = kv.used[:, kv_heads], kv.dropped[:, kv_heads]
    kv = kv.map_slots(lambda x: x[:, kv_heads]).replace(k=k, v=v, used=used, dropped=dropped)
    queries, record = reading.queries, reading.record
    if queries is not None:
        queries = queries._replace(query=queries.query[:, query])
    if record is not None:
        record = record.of_heads(kv_heads)
    cache, options = dataclasses.replace(reading.cache, kv=kv), reading.options.of_heads(query)
    return dataclasses.replace(
        reading, cache=cache, queries=queries, record=record, options=options
    )


def _reading_of(cache: LayerCache, reading: Reading) -> Reading:
    """Makes, of a reading, the one that a cache would have of the same prompt, with these heads."""
    seen = reading.kv
    begun = begin(cache, empty=STORED_SLOT not in seen.columns)  # as it is in first prompts
    needs, kv, k = cache.transform.needs, begun.kv, seen.k.read()
    if seen.unrotated_keys and not needs.unrotated_keys:
        k = reading.rope.rotate(k, seen.position[:, 0])

    def new_values(name: str, column: Column) -> Array:
        if name in seen.columns and name != "attention":  # which is added below, by query head
            return kv.unfold(seen.columns[name].values)
        shape = (*kv.shape[:2], seen.slots, *column.values.shape[3:])
        return jnp.full(shape, column.fill, column.values.dtype)

    columns = {
        name: dataclasses.replace(column, values=new_values(name, column))
        for name, column in kv.columns.items()
    }
    names = ("position", "log_mass", "pinned", "used", "dropped")
    kv = kv.replace(
        k=Dense(kv.unfold(k)), v=Dense(kv.unfold(seen.v.read())), length=seen.length,
        columns=columns,
        **{name: kv.unfold(getattr(seen, name)) for name in names},
    )  # fmt: skip
    if needs.accumulated_attention:
        kv = add_attention(kv, accumulated_attention(seen))
    queries = begun.queries
    if queries is not None and reading.queries is not None:
        size = queries.position.shape[1]
        last, position = reading.queries
        queries = QueryWindow(last[:, :, -size:], position[:, -size:])
    layer = dataclasses.replace(begun.cache, kv=kv)
    return dataclasses.replace(reading, cache=layer, stored=begun.stored, queries=queries)


def _with_slots_as_read(reading: Reading, seen: KVCache) -> Reading:
    """Returns a reading with as many slots as `read` makes: slots are sorted when they are cut.

    Args:
      seen: the slots of the reading that it was made of.
    """
    kv, record = reading.kv, reading.record
    if STORED_SLOT in kv.columns:  # others have more slots; tokens are in the first ones
        slots = min(kv.capacity + seen.slots - seen.capacity, kv.max_tokens)
        kv = _first_slots(kv, slots)
    elif kv.slots <= kv.capacity:
        kv = widen(kv, min(kv.capacity + kv.slots, kv.max_tokens))
        more = (0, kv.slots - seen.slots)
        k, v = (  # slots of zeros, as there
            jnp.pad(x.read(), ((0, 0), (0, 0), more, (0, 0))) for x in (reading.kv.k, reading.kv.v)
        )
        kv = kv.replace(k=Dense(k), v=Dense(v))
    if record is not None:
        record = record.with_slots(kv.slots)
    cache = dataclasses.replace(reading.cache, kv=kv)
    return dataclasses.replace(reading, cache=cache, record=record)


def _first_slots(kv: KVCache, slots: int) -> KVCache:
    """Returns the first slots of each head; tokens in others are dropped."""
    k, v = (Dense(payload.read()[:, :, :slots]) for payload in (kv.k, kv.v))
    dropped = kv.dropped + jnp.maximum(kv.used - slots, 0)
    used = jnp.minimum(kv.used, slots)
    return kv.map_slots(lambda x: x[:, :, :slots]).replace(k=k, v=v, used=used, dropped=dropped)


def _decided_reading_of(
    part: LayerCache, whole: KVTransform, heads: range, decided: Reading
) -> Reading:
    """Cuts the decision of the method for all heads to the rectangle of some of them."""
    reading = _reading_of(part, of_heads(decided, heads))
    kv = _first_slots(reading.kv, part.kv.capacity)
    changed = jax.tree.map(
        lambda x, of_part: _cut_state(x, of_part, heads),
        decided.cache.state, _deciding(part, whole),
    )  # fmt: skip
    others = states_of_parts(part.transform, part.state)[len(parts_of(whole)) :]
    states = (*states_of_parts(whole, changed), *others)
    state = state_of_parts(part.transform, states)
    return dataclasses.replace(
        reading, cache=dataclasses.replace(reading.cache, kv=kv, state=state)
    )


def _cache_like(transform: KVTransform, part: LayerCache, kv_heads: int) -> Cache:
    """Makes an empty cache of a transform with so many heads, in all else as this one."""
    kv = part.kv
    return init_cache(
        transform, batch=kv.shape[0], kv_heads=kv_heads, query_heads=kv_heads * kv.group,
        head_dim=kv.k.shape[3], max_prompt=kv.max_prompt, max_new=kv.max_new, dtype=kv.k.dtype,
        layer=(layers_of(transform) or (0,))[0], max_length=part.max_length, **part.options.static,
    )  # fmt: skip


def _deciding(part: LayerCache, whole: KVTransform) -> State:
    """Returns the state of a group's method, without those of parts that store, index or place."""
    states = states_of_parts(part.transform, part.state)[: len(parts_of(whole))]
    return state_of_parts(whole, states)


def _join_state(whole: Array, *parts: Array) -> Array:
    """Joins arrays of the groups' states along the axis of heads, if they have one."""
    axis = _axis_of_heads(whole, parts[0])
    # A copy, since the cache of the groups is donated before the joined state is gone.
    return jnp.copy(parts[0]) if axis is None else jnp.concatenate(parts, axis)


def _cut_state(whole: Array, part: Array, heads: range) -> Array:
    """Cuts an array of the joined state to the heads of a group."""
    axis = _axis_of_heads(whole, part)
    if axis is None:
        return whole
    return jax.lax.slice_in_dim(whole, heads.start, heads.stop, axis=axis)


def _axis_of_heads(whole: Array, part: Array) -> int | None:
    """Returns the axis along which an array grows with the number of heads; None: there is none."""
    sizes = zip(whole.shape, part.shape, strict=True)
    return next((axis for axis, (a, b) in enumerate(sizes) if a != b), None)
