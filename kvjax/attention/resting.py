"""Caches at rest: without the room for tokens that are still to come."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.attention.layer import Cache, LayerCache, layer_caches, map_parts
from kvjax.attention.parts import cache_specs, mesh_of_cache, on_each_device, placed
from kvjax.attention.rows import copied
from kvjax.cache.rearrange import resized
from kvjax.cache.slots import Sizes
from kvjax.compiled_code import compiled
from kvjax.devices import divided

LayerSizes = tuple[Sizes, ...]  # of each rectangle of slots in a layer's cache


def sizes_of(caches: tuple[Cache, ...]) -> tuple[LayerSizes, ...]:
    """Returns how many places the caches have, by layer and rectangle of slots."""
    return tuple(tuple(part.kv.sizes for part in layer_caches(cache)) for cache in caches)


def sizes_at_rest(caches: tuple[Cache, ...]) -> tuple[LayerSizes, ...]:
    """Returns how many places hold everything, rounded up: those of the caches at rest."""
    # All layers are asked before the first answer is waited for.
    taken = jax.device_get([_taken(cache) for cache in caches])
    return tuple(
        tuple(
            Sizes(*(min(rounded(int(n)), most) for n, most in zip(part, sizes, strict=True)))
            for part, sizes in zip(of_layer, layer_sizes, strict=True)
        )
        for of_layer, layer_sizes in zip(taken, sizes_of(caches), strict=True)
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
def _taken(cache: Cache) -> Int[Array, "P 3"]:
    """Returns the least sizes of each rectangle of slots, on every device of a mesh."""
    taken = jnp.stack([part.kv.taken for part in layer_caches(cache)])
    return divided(taken, mesh_of_cache(cache))


@compiled(static_argnums=1)
def resize(cache: Cache, sizes: LayerSizes) -> Cache:
    """Returns a layer's cache with as many places, in memory of its own.

    What is stored stays as it is, bit for bit, and where it is.
    """
    sizes_of_parts = iter(sizes)

    def resize_part(part: LayerCache) -> LayerCache:
        on_device = functools.partial(_resized, sizes=next(sizes_of_parts))
        if part.placement is None:
            return on_device(part)
        return on_each_device(on_device, part.placement, (part,), (cache_specs(part),), cache_specs)

    # An output of `jit` that is an input would be that very array.
    return jax.tree.map(copied, placed(map_parts(resize_part, cache)))


def _resized(part: LayerCache, sizes: Sizes) -> LayerCache:
    return dataclasses.replace(part, kv=resized(part.kv, sizes))
