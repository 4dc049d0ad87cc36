"""`flush`: what is done with new tokens every M decode steps."""

from __future__ import annotations

import dataclasses
import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.attention.call import key_positions
from kvjax.attention.layer import (
    Clock,
    LayerCache,
    check_caches,
    layer_caches,
    looks_at_keys,
    map_parts,
)
from kvjax.attention.parts import cache_specs, on_each_device
from kvjax.checks import check_count
from kvjax.compose.chain import decide_parts
from kvjax.devices import explicit_mesh, in_automatic_mode
from kvjax.protocol import Step, on_request
from pallas_kernels.base.varying import varying

Caches = TypeVar("Caches")  # a LayerCache, or a pytree of them


def flush(caches: Caches, steps: int | None = None, implementation: str | None = None) -> Caches:
    """Lets methods compress or index the tokens of the last M decode steps.

    Methods that work now and then (`Every`, `Chelsea`, `ClusterKV`, `Codebook`, ...) leave new
    tokens as they come, so that a decode step appends, selects, attends and evicts one slot at
    most. A loop calls `flush` every `flush_interval(caches)` steps. It makes room for the tokens of
    as many steps more: rows that have it are left as they are, and so is a row that got no token.
    A prompt's end does the same for the rows of the prompt. Call `flush` once after a further
    prompt for the others, which may have taken steps since the last time.

    Args:
      caches: of one layer, or of all layers of a model, in tuples. Donate them.
      steps: decode steps until the next flush (static); those of `flush_interval` by default.
      implementation: of the operations in `pallas_kernels`, as in `attend` (static).

    Returns:
      The caches. Those of methods that do nothing now and then come back as they are, and so do
      those that flush themselves.

    Raises:
      TypeError: no caches.
      ValueError: caches stacked by layer, or a prompt is not complete.

    Example:
      >>> import jax, jax.numpy as jnp, kvjax
      >>> attend = jax.jit(kvjax.attend, static_argnames="phase")
      >>> flush = jax.jit(kvjax.flush)
      >>> tx = kvjax.Every(kvjax.SnapKV(budget=40), steps=8)
      >>> cache = kvjax.init_cache(tx, batch=1, kv_heads=2, head_dim=16, max_prompt=64, max_new=16)
      >>> rows = jnp.ones((1, 2, 64, 16))
      >>> _, cache = attend(cache, rows, rows, rows, jnp.arange(64)[None], phase="prompt")
      >>> for position in range(64, 80):
      ...     new, at = rows[:, :, :1], jnp.array([[position]])
      ...     _, cache = attend(cache, new, new, new, at, phase="decode")
      ...     if (position - 63) % kvjax.flush_interval(cache) == 0:
      ...         cache = flush(cache)
      >>> int(cache.kv.live[0, 0].sum()), int(cache.kv.dropped.sum())
      (40, 0)
    """
    check_caches(caches, "flush")
    interval = flush_interval(caches)
    steps = interval if steps is None else steps
    if steps is None:
        return caches
    check_count("steps", steps, 1)
    flush_layer = functools.partial(_flush_layer, steps=steps, implementation=implementation)
    if (mesh := explicit_mesh(caches)) is None:
        return map_parts(flush_layer, caches)
    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, caches)
    return in_automatic_mode(
        functools.partial(map_parts, flush_layer), mesh, (caches,), lambda _: specs
    )


def flush_interval(caches: object) -> int | None:
    """Returns the number of decode steps after which the caches must be flushed; None: never.

    It is the least of all layers' intervals. Caches that flush themselves have none. It is a Python
    number, as `flush` and the loop around it need it.

    Args:
      caches: of one layer or several, also stacked by layer.

    Example:
      >>> import kvjax
      >>> tx = kvjax.Every(kvjax.SnapKV(budget=64), steps=16)
      >>> kvjax.flush_interval(kvjax.init_cache(tx, batch=1, kv_heads=1, head_dim=4,
      ...                                       max_prompt=128, max_new=64))
      16
    """
    check_caches(caches, "flush_interval", stacked=True, resting=True)
    waits = (cache for cache in layer_caches(caches) if cache.clock is None)
    intervals = (cache.kv.interval for cache in waits)
    return min((steps for steps in intervals if steps is not None), default=None)


def self_flushing(caches: Caches) -> Caches:
    """Caches that flush themselves, for a decode loop that has no place for `kvjax.flush`.

    Each one counts its decode steps, and `attend` flushes it before the step for which it would
    have no room: at the same steps, and with the same result, as a loop that calls `flush` after
    every `flush_interval(caches)` steps. That number is the least of all layers given here, so give
    the caches of all layers together. A further prompt flushes at its end the rows that had no part
    in it.

    A step then holds one `jax.lax.cond`, which `jax.vmap` computes on both sides. A loop of your
    own is a little faster with `flush` outside of its steps.

    Args:
      caches: of one layer, or a pytree of them, such as a list by layer, as `init_cache` makes them
        or right behind a prompt or a flush.

    Returns:
      The caches, of which those that have nothing to flush are as they were. Donate them to
      `attend` as any others.

    Raises:
      TypeError: `caches` holds something else.
      ValueError: a prompt is not complete, or caches are stacked by layer.

    Example:
      >>> import jax, jax.numpy as jnp, kvjax
      >>> attend = jax.jit(kvjax.attend, static_argnames="phase")
      >>> tx = kvjax.Every(kvjax.SnapKV(budget=40), steps=8)
      >>> cache = kvjax.init_cache(tx, batch=1, kv_heads=2, head_dim=16, max_prompt=64, max_new=16)
      >>> rows, cache = jnp.ones((1, 2, 64, 16)), kvjax.self_flushing(cache)
      >>> _, cache = attend(cache, rows, rows, rows, jnp.arange(64)[None], phase="prompt")
      >>> for position in range(64, 80):
      ...     new, at = rows[:, :, :1], jnp.array([[position]])
      ...     _, cache = attend(cache, new, new, new, at, phase="decode")
      >>> int(cache.kv.dropped.sum())
      0
    """
    check_caches(caches, "self_flushing")
    interval = flush_interval(caches)

    def with_clock(cache: LayerCache) -> LayerCache:
        if cache.kv.interval is None or cache.clock is not None:
            return cache
        waiting = jnp.zeros_like(cache.kv.length)
        return dataclasses.replace(cache, clock=Clock(waiting, interval))  # pyright: ignore[reportArgumentType]  # as this cache has one

    return map_parts(with_clock, caches)


def flushed_before_step(
    cache: LayerCache,
    tokens: int | Int[Array, ""],
    implementation: str | None,
    *arrays: Array,
) -> LayerCache:
    """A cache with room for the tokens of a step, if it flushes itself; others as they are.

    Args:
      tokens: of each row in the step; 0 where all of them are there already.
      implementation: as in `flush`.
      arrays: of the step, over whose mesh axes the cache varies inside `jax.shard_map`.
    """
    clock = cache.clock
    if clock is None:
        return cache
    due = (clock.waiting + tokens > clock.interval).any()
    cache = _flush_if(due, cache, clock.interval, implementation, *arrays)
    waiting = jnp.where(due, 0, clock.waiting) + tokens
    return dataclasses.replace(cache, clock=dataclasses.replace(clock, waiting=waiting))


def flushed_behind_prompt(
    cache: LayerCache, rows: Bool[Array, " B"], implementation: str | None, *arrays: Array
) -> LayerCache:
    """A cache that flushes itself, behind a prompt of some rows; other caches as they are."""
    clock = cache.clock
    if clock is None:
        return cache
    cache = _flush_if(~rows.all(), cache, clock.interval, implementation, *arrays)
    clock = dataclasses.replace(clock, waiting=jnp.zeros_like(clock.waiting))
    return dataclasses.replace(cache, clock=clock)


def _flush_if(
    due: Bool[Array, ""],
    cache: LayerCache,
    steps: int,
    implementation: str | None,
    *arrays: Array,
) -> LayerCache:
    def flush_now(cache: LayerCache) -> LayerCache:
        return varying(_flush(cache, steps, implementation), *arrays)

    return jax.lax.cond(due, flush_now, lambda cache: cache, varying(cache, *arrays))


def _flush_layer(cache: LayerCache, steps: int, implementation: str | None) -> LayerCache:
    placement = cache.placement
    flush_part = functools.partial(_flush, steps=steps, implementation=implementation)
    if cache.kv.interval is None or cache.clock is not None:
        return cache
    if placement is None:
        return flush_part(cache)
    return on_each_device(flush_part, placement, (cache,), (cache_specs(cache),), cache_specs)


def _flush(cache: LayerCache, steps: int, implementation: str | None) -> LayerCache:
    kv, (query, query_position) = cache.kv, cache.window or (None, None)
    keys = kv.k.read() if looks_at_keys(cache.transform) else None
    if keys is not None and cache.rope is not None:
        keys = cache.rope.rotate(keys, key_positions(cache.transform.needs, kv))
    step = Step(
        rows=jnp.ones(kv.shape[0], bool),
        keys=keys,
        rope=cache.rope,
        moment="flush",
        options=cache.options,
        room=steps,
        implementation=implementation,
        requested=on_request(query=query, query_position=query_position),
    )
    kv, state = decide_parts(cache.transform, kv, cache.state, step)
    kv = kv.replace(k=kv.k.flush(steps), v=kv.v.flush(steps))
    return dataclasses.replace(cache, kv=kv, state=state)
