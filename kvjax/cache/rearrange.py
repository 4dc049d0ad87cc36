"""Operations that move slots: merging, compacting, ordering, and a prompt's dense slots."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.payload import Dense, Payload, Slots, sum_into, take_slots, write_slots
from kvjax.cache.payload import resized as resized_array
from kvjax.cache.remainders import exact_values, replace_values, write_values
from kvjax.cache.rope import Rope
from kvjax.cache.slots import (
    FREE,
    NEG_INF,
    STORED_SLOT,
    Column,
    KVCache,
    Sizes,
    check_cache,
    free_others,
    slot_numbers,
    sorted_slots,
)
from pallas_kernels import segment_merge


def merge(
    cache: KVCache,
    into: Int[Array, "B H S"],
    weights: Float[Array, "B H S"] | None = None,
    *,
    implementation: str | None = None,
) -> KVCache:
    """Merges slots: every live slot s goes into slot `into[s]`, which is s itself if it stays.

    Keys and values become weighted means over the members, `k = Σ w_i k_i / Σ w_i`, and masses
    add. The merged slot keeps the position of its target; columns follow their own rules. A slot
    that is its own only member is left exactly as it is. Free slots are ignored.

    Args:
      into: target slot per slot. A target must be live and its own target.
      weights: non-negative, one per slot; the masses by default, so that merging is associative. A
        target whose members all have weight 0 keeps its own key and value.
      implementation: of the means and sums, as in `pallas_kernels.segment_merge`; None: the best
        that can run.

    Example:
      >>> import jax, jax.numpy as jnp, kvjax
      >>> cache = kvjax.init_cache(kvjax.Full(), batch=1, kv_heads=1, head_dim=1, max_prompt=3,
      ...                          max_new=0).kv
      >>> rows = jnp.array([[[[1.0], [3.0], [8.0]]]])
      >>> cache, _ = jax.jit(kvjax.kit.append)(cache, rows, rows, jnp.arange(3)[None])
      >>> merged = jax.jit(kvjax.kit.merge)(cache, into=jnp.array([[[1, 1, 2]]]))
      >>> merged.position.tolist(), merged.k.read()[0, 0, 1:, 0].tolist()
      ([[[-1, 1, 2]]], [2.0, 8.0])
    """
    check_cache(cache, "merge")
    size, live = cache.slots, cache.live
    into = jnp.where(live, into, size).astype(jnp.int32)  # slot S does not exist: ignored
    mass = jnp.exp(cache.log_mass)
    weights = mass if weights is None else jnp.where(live, weights, 0.0).astype(jnp.float32)
    merged_several = sum_into(into, live.astype(jnp.int32)) > 1
    stays = live & (into == slot_numbers(cache.shape))

    def means(rows: Array) -> Array:
        return segment_merge(rows, into, weights, implementation=implementation)

    def sums(rows: Array) -> Array:
        return sum_into(into, rows, implementation=implementation)

    def combine(column: Column) -> Array:
        values = column.values
        if column.merge == "keep":
            return values
        several = merged_several.reshape(*cache.shape, *(1,) * (values.ndim - 3))
        return jnp.where(several, sums(values), values)

    # exp and log round, so that a slot that is its own only member must keep its `log_mass`.
    log_mass = jnp.where(merged_several, jnp.log(sums(mass)), cache.log_mass)
    pinned = sum_into(into, cache.pinned.astype(jnp.int32)) > 0
    columns = cache.map_columns(combine)
    k = cache.k.write(None, means(cache.k.read()))
    merged = cache.replace(k=k, log_mass=log_mass, columns=columns, pinned=pinned)
    merged = write_values(merged, means(exact_values(cache)))
    return free_others(merged, stays)


def compact(cache: KVCache, slots: int, rows: Bool[Array, " B"] | None = None) -> KVCache:
    """Moves the live slots to the front, in the order of positions, and cuts or widens to `slots`.

    Only this function and `permute` move slots; every payload and column moves with them. If more
    slots are live than fit, the last ones are lost and counted in `dropped`.

    Args:
      slots: number of slots that the cache has afterwards.
      rows: the rows whose slots move; slots of other rows stay where they are. None: all.

    Example:
      >>> import jax, jax.numpy as jnp, kvjax
      >>> cache = kvjax.init_cache(kvjax.Full(), batch=1, kv_heads=1, head_dim=4, max_prompt=3,
      ...                          max_new=0).kv
      >>> rows = jnp.ones((1, 1, 3, 4))
      >>> cache, _ = jax.jit(kvjax.kit.append)(cache, rows, rows, jnp.arange(3)[None])
      >>> evicted = jax.jit(kvjax.kit.evict)(cache, keep=cache.position != 1)
      >>> jax.jit(kvjax.kit.compact, static_argnums=1)(evicted, 2).position.tolist()
      [[[0, 2]]]
    """
    check_cache(cache, "compact")
    index = sorted_slots(cache.live, cache.position)
    place = slot_numbers((*cache.shape[:2], slots))
    has_source = place < cache.live.sum(-1, keepdims=True, dtype=jnp.int32)
    same_slot = jnp.minimum(place, cache.slots - 1)
    source = take_slots(index, same_slot)
    if rows is not None:
        moves = rows[:, None, None]
        source = jnp.where(moves, source, same_slot)
        has_source = jnp.where(moves, has_source, place < cache.slots)
    return _move(cache, source, has_source)


def permute(
    cache: KVCache,
    source: Int[Array, "B H N"],
    slots: Int[Array, "B H N"] | None = None,
) -> KVCache:
    """Moves the content of slot `source[n]` to slot `slots[n]`.

    Args:
      source: a set of slots, each once.
      slots: the same set in another order, S = none; None: `0 ... S - 1`, all of them.
    """
    if slots is None:
        return _move(cache, source, jnp.ones(source.shape, bool))
    source = jnp.minimum(source, cache.slots - 1)
    moved = cache.map_slots(lambda x: write_slots(x, slots, take_slots(x, source)))
    k, v = (payload.flush(0, (source, slots)) for payload in (cache.k, cache.v))
    return free_others(moved.replace(k=k, v=v), moved.live)


def decoded(
    cache: KVCache, *, empty: bool = False
) -> tuple[KVCache, tuple[Payload, Payload] | None]:
    """Decodes keys and values for reading a prompt: makes them dense.

    Args:
      empty: whether no slot is live; keys and values are then zeros and not decoded.

    Returns:
      The cache, with the column `STORED_SLOT` unless it is empty; and keys and values as they were
      stored, None if they were dense.
    """
    stored = None if isinstance(cache.k, Dense) else (cache.k, cache.v)
    if not empty:
        slot = jnp.where(cache.live, slot_numbers(cache.shape), -1)
        cache = cache.with_column(STORED_SLOT, slot, fill=-1, merge="keep")
    if stored is None:
        return cache, None
    k, v = (Dense(jnp.zeros(x.shape, x.dtype) if empty else x.read()) for x in stored)
    return cache.replace(k=k, v=v), stored


def encoded(
    cache: KVCache,
    stored: tuple[Payload, Payload] | None,
    rows: Bool[Array, " B"],
    rope: Rope | None,
) -> KVCache:
    """Encodes keys and values at a prompt's end, in the form that they were stored in before.

    Args:
      stored: stored keys and values, as `decoded` returned them.
      rows: the rows that had tokens in the prompt.
      rope: rotates keys when they are read; None: nothing does.
    """
    columns, source = dict(cache.columns), None
    if STORED_SLOT in columns:
        source = jnp.where(cache.live, columns.pop(STORED_SLOT).values, -1)
        cache = cache.replace(columns=columns)
    if stored is None:
        return cache
    slots = Slots(cache.position, cache.live, rows, source, rope)
    k_form, v_form = stored
    values = exact_values(cache).astype(cache.v.dtype)
    k, v = k_form.encode(v_form, cache.k.read(), values, slots)
    return replace_values(cache.replace(k=k), v)


def widen(cache: KVCache, slots: int) -> KVCache:
    """Adds free slots at the end, up to `slots`; existing slots stay where they are."""
    if slots <= cache.slots:
        return cache
    place = slot_numbers((*cache.shape[:2], slots))
    return _move(cache, place, place < cache.slots)


def resized(cache: KVCache, sizes: Sizes) -> KVCache:
    """Cuts off free places at the end, or adds some; nothing moves, and stored bits stay.

    Args:
      sizes: numbers of places afterwards, no less than `cache.taken`.
    """

    def change(x: Array, fill: float | bool) -> Array:
        return resized_array(x, sizes.slots, fill)

    return cache.replace(
        k=cache.k.resized(sizes.slots, sizes.keys),
        v=cache.v.resized(sizes.slots, sizes.values),
        position=change(cache.position, FREE),
        log_mass=change(cache.log_mass, NEG_INF),
        columns=cache.map_columns(lambda column: change(column.values, column.fill)),
        pinned=change(cache.pinned, False),
    )


def _move(cache: KVCache, source: Int[Array, "B H N"], has_source: Bool[Array, "B H N"]) -> KVCache:
    """Makes a cache whose slot n is this one's slot `source[..., n]`, free unless it has one."""
    # A free slot repeats the first token. It then does not widen the range of numbers of a group of
    # slots that are encoded together.
    source = jnp.where(has_source, source, source[..., :1])
    k, v = (Dense(take_slots(payload.read(), source)) for payload in (cache.k, cache.v))
    moved = cache.map_slots(lambda x: take_slots(x, source))
    live = moved.live & has_source
    lost = cache.live.sum(-1, dtype=jnp.int32) - live.sum(-1, dtype=jnp.int32)
    return free_others(moved.replace(k=k, v=v, dropped=cache.dropped + lost), live)
