"""One cache of all heads of a layer, in the place of head groups, while a prompt is read."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax.attention.call import query_heads
from kvjax.attention.init_cache import init_cache
from kvjax.attention.layer import LayerCache, QueryWindow, Reading, layer_caches
from kvjax.attention.prompt import stored
from kvjax.budgets.layers import layers_of
from kvjax.cache.payload import Dense
from kvjax.cache.slots import FREE, NEG_INF, STORED_SLOT, slot_numbers
from kvjax.compose.chain import parts_of, state_of_parts, states_of_parts
from kvjax.compose.wrappers import HeadGroups
from kvjax.protocol import State

# Column of a cache of all heads: the slot of each token in its rectangle, -1 for new tokens.
RECTANGLE_SLOT = "rectangle_slot"


def of_all_heads(transform: HeadGroups) -> HeadGroups:
    """Returns the transform that reads a prompt for all heads: one group, with their method."""
    heads = tuple(range(transform.kv_heads))
    return HeadGroups(((heads, transform.whole),), transform.order)  # pyright: ignore[reportArgumentType]


def joined(
    transform: HeadGroups, cache: tuple[LayerCache, ...], slots: int, most: int
) -> tuple[LayerCache]:
    """Joins the rectangles of a layer into one cache, whose keys and values are dense.

    Tokens stay in the slots that they have in their rectangle. Where a rectangle has fewer slots
    than the cache, there must be room beside these: each head's tokens then become its first ones
    when the prompt is compressed.

    Args:
      transform: head groups that have a method for all heads.
      cache: of the groups, between prompts.
      slots: of each head; at least those of the largest rectangle.
      most: slots of each head, at most, while a prompt is read.

    Returns:
      A cache of `of_all_heads(transform)`, with the columns of the groups and `RECTANGLE_SLOT`.
    """
    first, kvs, whole = cache[0], [part.kv for part in cache], transform.whole
    (batch, _, _), group, heads = first.kv.shape, first.kv.group, transform.kv_heads
    (made,) = layer_caches(init_cache(
        whole, batch=batch, kv_heads=heads, query_heads=heads * group,
        head_dim=first.kv.k.shape[3], max_prompt=first.kv.max_prompt, max_new=first.kv.max_new,
        dtype=first.kv.k.dtype, layer=(layers_of(whole) or (0,))[0], max_length=first.max_length,
        **first.options.static,
    ))  # fmt: skip

    def join(arrays: list[Array], fill: float) -> Array:
        """Joins arrays `[B, H, S, ...]` of the rectangles, with so many slots."""
        wide = (
            jnp.pad(
                x, ((0, 0), (0, 0), (0, slots - x.shape[2]), *((0, 0),) * (x.ndim - 3)),
                constant_values=fill,
            )
            for x in arrays
        )  # fmt: skip
        return jnp.concatenate(list(wide), axis=1)

    columns = {
        name: dataclasses.replace(column, values=join([kv.column(name) for kv in kvs], column.fill))
        for name, column in first.kv.columns.items()
    }
    kv = made.kv.replace(
        k=Dense(join([kv.k.read() for kv in kvs], 0)),
        v=Dense(join([kv.v.read() for kv in kvs], 0)),
        position=join([kv.position for kv in kvs], FREE),
        log_mass=join([kv.log_mass for kv in kvs], NEG_INF),
        pinned=join([kv.pinned for kv in kvs], False),
        columns=columns,
        used=jnp.concatenate([kv.used for kv in kvs], 1),
        dropped=jnp.concatenate([kv.dropped for kv in kvs], 1),
        length=first.kv.length,
        capacity=slots,
        max_new=most - first.kv.max_prompt,
    )
    slot = jnp.where(kv.live, slot_numbers(kv.shape), -1)
    kv = kv.with_column(RECTANGLE_SLOT, slot, fill=-1, merge="keep")
    window = made.window
    if window is not None:
        query = jnp.concatenate([part.window.query for part in cache], 1)
        window = QueryWindow(query, first.window.position)
    states = [_deciding(part, transform) for part in cache]
    state = jax.tree.map(_join_state, made.state, *states)
    numbers = jnp.concatenate([jnp.asarray(heads) for heads in transform.heads_in(cache)])
    return (dataclasses.replace(made, kv=kv, state=state, window=window, heads=numbers),)


def cut(
    transform: HeadGroups, cache: tuple[LayerCache, ...], all_heads: LayerCache
) -> tuple[LayerCache, ...]:
    """Cuts a cache of all heads into the rectangles of head groups, and stores them in their form.

    Args:
      transform: the groups.
      cache: of the groups, as it was before the prompt. Donate it.
      all_heads: the cache of all heads after the prompt. Each head's tokens are its first ones.

    Returns:
      The cache of the groups after the prompt. What was stored stays as it is, bit for bit.
    """
    after, start = [], 0
    for (numbers, _), part in zip(transform.groups, cache, strict=True):
        heads, slots = slice(start, start + len(numbers)), part.kv.capacity
        start += len(numbers)
        kv, new = part.kv, all_heads.kv
        form = None if isinstance(kv.k, Dense) else (kv.k, kv.v)
        k, v = (Dense(payload.read()[:, heads, :slots]) for payload in (new.k, new.v))
        columns = {
            name: dataclasses.replace(column, values=new.column(name)[:, heads, :slots])
            if name in new.columns else column
            for name, column in kv.columns.items()
        }  # fmt: skip
        kv = kv.replace(
            k=k, v=v, columns=columns, length=new.length,
            used=jnp.minimum(new.used[:, heads], slots),
            dropped=new.dropped[:, heads] + jnp.maximum(new.used[:, heads] - slots, 0),
            **{
                name: getattr(new, name)[:, heads, :slots]
                for name in ("position", "log_mass", "pinned")
            },
        )  # fmt: skip
        if RECTANGLE_SLOT in new.columns:
            slot = new.column(RECTANGLE_SLOT)[:, heads, :slots]
            kv = kv.with_column(STORED_SLOT, slot, fill=-1, merge="keep")
        query = query_heads(range(heads.start, heads.stop), kv.group)
        queries, sinks = all_heads.window, all_heads.options.sinks
        if queries is not None:
            queries = queries._replace(query=queries.query[:, query])
        options = dataclasses.replace(part.options, sinks=None if sinks is None else sinks[query])
        changed = jax.tree.map(
            functools.partial(_cut_state, heads=heads),
            all_heads.state, _deciding(part, transform),
        )  # fmt: skip
        old = states_of_parts(part.transform, part.state)
        new_states = states_of_parts(transform.whole, changed)
        states = (*new_states, *old[len(new_states) :])
        reading = Reading(
            dataclasses.replace(
                part, kv=kv, state=state_of_parts(part.transform, states), window=None
            ),
            form, new.length > part.kv.length, part.kv.length, queries, record=None, rope=None,
            options=options,
        )  # fmt: skip
        after.append(stored(reading))
    return tuple(after)


def _deciding(part: LayerCache, transform: HeadGroups) -> State:
    """Returns the state of a group's method, without those of parts that store, index or place."""
    whole = transform.whole
    states = states_of_parts(part.transform, part.state)[: len(parts_of(whole))]
    return state_of_parts(whole, states)


def _join_state(whole: Array, *parts: Array) -> Array:
    """Joins arrays of the groups' states along the axis of heads, if they have one."""
    axis = _axis_of_heads(whole, parts[0])
    return parts[0] if axis is None else jnp.concatenate(parts, axis)


def _cut_state(whole: Array, part: Array, heads: slice) -> Array:
    """Returns what a group has of an array of the state of all heads."""
    axis = _axis_of_heads(whole, part)
    if axis is None:
        return whole
    return jax.lax.slice_in_dim(whole, heads.start, heads.stop, axis=axis)


def _axis_of_heads(whole: Array, part: Array) -> int | None:
    """Returns the axis along which an array grows with the number of heads; None: there is none."""
    sizes = zip(whole.shape, part.shape, strict=True)
    return next((axis for axis, (a, b) in enumerate(sizes) if a != b), None)
