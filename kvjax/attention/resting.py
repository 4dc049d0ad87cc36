"""Caches at rest: what they keep, without the room for tokens that are still to come.

On one device, what all rows and heads keep lies one behind another: heads that keep fewer slots
than others take fewer bytes. On a mesh, and in host memory, rectangles of slots stay.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.attention.layer import (
    Cache,
    LayerCache,
    Packed,
    RestSizes,
    layer_caches,
    map_parts,
)
from kvjax.attention.parts import cache_specs, mesh_of_cache, on_each_device, placed
from kvjax.attention.rows import copied
from kvjax.cache.rearrange import resized
from kvjax.cache.slots import FREE, NEG_INF, KVCache, Sizes
from kvjax.compiled_code import compiled
from kvjax.devices import divided

LayerSizes = tuple[Sizes, ...]  # of each rectangle of slots in a layer's cache
LayerRest = tuple[RestSizes, ...]


def sizes_of(caches: tuple[Cache, ...]) -> tuple[LayerSizes, ...]:
    """Returns how many places awake caches have, by layer and rectangle of slots."""
    return tuple(tuple(part.kv.sizes for part in layer_caches(cache)) for cache in caches)


def sizes_at_rest(caches: tuple[Cache, ...]) -> tuple[LayerRest, ...]:
    """Returns the places in which awake caches rest: they hold everything, rounded up."""
    # All layers are asked before the first answer is waited for.
    taken = jax.device_get([_taken(cache) for cache in caches])

    def of_part(part: LayerCache, counts: list[int]) -> RestSizes:
        *least, packed, masses, pins = counts
        slots, keys, values = map(min, map(rounded, least), part.kv.sizes)
        if part.placement is not None:
            return RestSizes(slots, keys, values)
        packed = min(rounded(packed), math.prod(part.kv.shape))
        return RestSizes(slots, keys, values, packed, bool(masses), bool(pins))

    return tuple(
        tuple(map(of_part, layer_caches(cache), counts.tolist()))
        for cache, counts in zip(caches, taken, strict=True)
    )


def rest_sizes_of(caches: tuple[Cache, ...]) -> tuple[LayerRest, ...]:
    """Returns the places of caches that rest on one device, by layer and rectangle of slots."""
    return tuple(
        tuple(part.sizes for part in jax.tree.leaves(cache, is_leaf=is_rectangle))
        for cache in caches
    )


def rounded(count: int) -> int:
    """Rounds a number of places up by a sixteenth at most, so that few sizes are compiled for.

    It is at least 1, since not every file format holds an array without numbers.

    Example:
      >>> from kvjax.attention.resting import rounded
      >>> [rounded(count) for count in (0, 31, 130, 1700)]
      [1, 31, 136, 1728]
    """
    step = 2 ** max(count.bit_length() - 5, 0)
    return max(-(-count // step), 1) * step


@compiled()
def _taken(cache: Cache) -> Int[Array, "P 6"]:
    """Returns the least `RestSizes` of each rectangle of slots, on every device of a mesh."""

    def of_part(part: LayerCache) -> Int[Array, " 6"]:
        kv = part.kv
        masses = (kv.log_mass != _single(kv.position)).any()
        others = kv.used.sum(), masses, kv.pinned.any()
        return jnp.stack([*kv.taken, *(jnp.int32(x) for x in others)])

    return divided(jnp.stack([of_part(part) for part in layer_caches(cache)]), mesh_of_cache(cache))


@compiled(static_argnums=1)
def rest(cache: Cache, sizes: LayerRest) -> Cache:
    """Returns a layer's cache at rest, in memory of its own.

    Stored rows stay as they are, bit for bit, and where they are.
    """
    sizes_of_parts = iter(sizes)

    def of_part(part: LayerCache) -> LayerCache | Packed:
        size = next(sizes_of_parts)
        tight = _resized(part, Sizes(*size[:3]))
        return _packed(tight, size) if size.packed else tight

    return _copied(map_parts(of_part, cache))


@compiled(static_argnums=1)
def wake(cache: Cache, sizes: LayerSizes) -> Cache:
    """Returns the cache of a layer that rests, with as many places, in memory of its own."""
    sizes_of_parts = iter(sizes)

    def of_part(part: LayerCache | Packed) -> LayerCache:
        size = next(sizes_of_parts)
        return _resized(_unpacked(part, size.slots) if isinstance(part, Packed) else part, size)

    return _copied(jax.tree.map(of_part, cache, is_leaf=is_rectangle))


def is_rectangle(x: object) -> bool:
    """Tells whether this is a rectangle of slots, awake or at rest."""
    return isinstance(x, LayerCache | Packed)


def _copied(cache: Cache) -> Cache:
    # An output of `jit` that is an input would be that very array.
    return jax.tree.map(copied, placed(cache))


def _resized(part: LayerCache, sizes: Sizes) -> LayerCache:
    """Cuts off free places, or adds some, on every device."""

    def on_device(part: LayerCache) -> LayerCache:
        return dataclasses.replace(part, kv=resized(part.kv, sizes))

    if part.placement is None:
        return on_device(part)
    return on_each_device(on_device, part.placement, (part,), (cache_specs(part),), cache_specs)


def _packed(part: LayerCache, sizes: RestSizes) -> Packed:
    """Lays what all rows and heads keep one behind another."""
    kv = part.kv

    def pack(x: Array, per: int, places: int, packed: int = sizes.packed) -> Array:
        counts = _counts(kv.used, per)
        total = (packed + counts.size * (per - 1)) // per  # at least the sum of the counts
        counts = counts.ravel()
        which = jnp.repeat(
            jnp.arange(counts.size, dtype=jnp.int32), counts, total_repeat_length=total
        )
        place = jnp.arange(total, dtype=jnp.int32) - _starts(counts)[which]
        taken = (place < counts[which]).reshape(total, *(1,) * (x.ndim - 3))
        place = jnp.minimum(place, places - 1)
        rows = x.reshape(counts.size, places, *x.shape[3:])[which, place]
        # Places that round the total up hold nothing.
        return jnp.where(taken, rows, jnp.zeros((), x.dtype))[None, None]

    def or_one(x: Array, needed: bool) -> Array:
        return pack(x, 1, kv.slots, sizes.packed if needed else 1)

    short = jnp.uint16 if kv.max_tokens < 2**16 else jnp.int32  # FREE is the largest number
    packed = kv.replace(
        k=kv.k.at_rest.map_slots(pack, kv.slots),
        v=kv.v.at_rest.map_slots(pack, kv.slots),
        position=pack(kv.position.astype(short), 1, kv.slots),
        log_mass=or_one(kv.log_mass, sizes.masses),
        columns=kv.map_columns(lambda column: pack(column.values, 1, kv.slots)),
        pinned=or_one(kv.pinned, sizes.pins),
    )
    return Packed(dataclasses.replace(part, kv=packed), sizes)


def _unpacked(part: Packed, slots: int) -> LayerCache:
    """Lays what rests one behind another into a rectangle of so many slots."""
    kv = part.cache.kv

    def unpack(x: Array, per: int, places: int, fill: float | bool = 0) -> Array:
        counts = _counts(kv.used, per)
        place = jax.lax.broadcasted_iota(jnp.int32, (*counts.shape, places), 2)
        starts = _starts(counts.ravel()).reshape(counts.shape)
        index = jnp.minimum(starts[..., None] + place, x.shape[2] - 1)
        there = place < counts[..., None]
        there = there.reshape(*there.shape, *(1,) * (x.ndim - 3))
        return jnp.where(there, x[0, 0][index], jnp.asarray(fill, x.dtype))

    position = unpack(positions_at_rest(kv)[None, None], 1, slots, FREE)
    log_mass, pinned = _single(position), jnp.zeros(position.shape, bool)
    if part.sizes.masses:
        log_mass = unpack(kv.log_mass, 1, slots, NEG_INF)
    if part.sizes.pins:
        pinned = unpack(kv.pinned, 1, slots)
    unpacked = kv.replace(
        k=kv.k.awake.map_slots(unpack, slots),
        v=kv.v.awake.map_slots(unpack, slots),
        position=position,
        log_mass=log_mass,
        columns=kv.map_columns(lambda column: unpack(column.values, 1, slots, column.fill)),
        pinned=pinned,
    )
    return dataclasses.replace(part.cache, kv=unpacked)


def positions_at_rest(kv: KVCache) -> Int[Array, " N"]:
    """Returns the positions of tokens at rest, `FREE` in free places."""
    position = kv.position[0, 0]
    if position.dtype == jnp.uint16:
        free = position == jnp.iinfo(jnp.uint16).max
        position = jnp.where(free, FREE, position.astype(jnp.int32))
    taken = jnp.arange(position.size, dtype=jnp.int32) < kv.used.sum(dtype=jnp.int32)
    return jnp.where(taken, position, FREE)


def _counts(used: Int[Array, "B H"], per: int) -> Int[Array, "B H"]:
    """Returns the places of each row and head that hold `per` slots each."""
    return -(-used // per)


def _starts(counts: Int[Array, " N"]) -> Int[Array, " N"]:
    """Returns where each of so many places begin that lie one behind another."""
    return jnp.cumsum(counts, dtype=jnp.int32) - counts


def _single(position: Int[Array, "B H S"]) -> Float[Array, "B H S"]:
    """Returns the masses of slots that stand for one token each."""
    return jnp.where(position == FREE, jnp.float32(NEG_INF), jnp.float32(0))
