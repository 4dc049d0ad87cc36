"""Reads a prompt of a layer once, for head groups, layers or methods that differ."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from jaxtyping import Array, Int

from kvjax.attention.joined_heads import (
    AllHeads,
    all_heads_of,
    can_join,
    cut,
    decide_for_all,
    join,
    method_for_all,
)
from kvjax.attention.layer import Cache, Reading, layer_caches
from kvjax.attention.rows import put_rows, take_rows
from kvjax.compiled_code import compiled
from kvjax.compose.wrappers import HeadGroups, by_head_groups, needs_of
from kvjax.generation.compiler import Programs
from kvjax.generation.new_caches import CacheSize, LayerStates, new_cache
from kvjax.protocol import AttentionOptions, Extent, KVTransform, Needs


@dataclass(frozen=True)
class Observe(KVTransform):
    """The full cache, whose readings hold what other methods need of a prompt.

    Args:
      wanted: the needs of those methods.
    """

    wanted: Needs

    @property
    def needs(self) -> Needs:
        """The needs of those methods."""
        return self.wanted

    @classmethod
    def of(cls, layer: KVTransform) -> Observe:
        """Returns what reads a prompt for the transform of a layer, to be compressed later."""
        needs = needs_of(layer)
        return cls(
            Needs(  # without what decode steps need
                accumulated_attention=needs.accumulated_attention,
                query_window=needs.query_window,
                query_share=needs.query_share,
                unrotated_keys=needs.unrotated_keys,
                probe=needs.probe,
            )
        )


def reads_alone(layer: KVTransform, size: CacheSize) -> bool:
    """Returns whether no other transform can read a prompt for that of a layer.

    A method that passes on only some tokens changes what the next layer reads. On a mesh, only
    `attend` compresses a prompt.
    """
    extent = Extent(size.max_prompt, size.max_new)
    drops = any(part.extent(extent).passed is not None for part in by_head_groups(layer))
    return drops or size.mesh is not None


FEWEST = 3  # transforms of layers that are alike, from which on they share a program that reads
NO_STATES = LayerStates((((), None),))  # of `Observe`


def observers_of(
    blocks: Sequence[Callable],
    attention: Sequence[AttentionOptions],
    layers: Sequence[KVTransform],
    size: CacheSize,
    caches: Sequence[Cache] | None,
) -> list[Observe | None]:
    """Returns, for each layer, what reads the prompt in place of its transform; None: nothing does.

    Head groups share a reading, since each would compute attention of its own, and a program for
    each layout of `ByHead` would have the whole block in it.

    Layers may be alike but for their transforms, as with PyramidKV, whose layers differ in their
    capacity. Then one program reads a first prompt in all of them, and a smaller one for each
    transform compresses what has been read. A program that does both has the layer's whole
    computation in it, which would be compiled once more for each transform. It is used where layers
    that are alike have one transform or two (ClusterKV's first layers keep all): it is a little
    faster, and two of it compile about as fast as one that reads and two that compress. Further
    prompts are read into caches of different sizes, so that they would not share a program.

    Args:
      blocks, attention: of the layers, as in `FunctionalModel`.
      layers: their transforms.
      size: of the caches.
      caches: of the layers; None: the prompt is the first one.
    """
    if caches is not None:
        pairs = zip(layers, caches, strict=True)
        return [Observe.of(tx) if can_join(cache) else None for tx, cache in pairs]
    different = set(layers)
    if any(reads_alone(tx, size) for tx in different):
        return [None] * len(layers)
    observers = {tx: Observe.of(tx) for tx in different}
    alike = [
        (block, options, observers[tx])
        for block, options, tx in zip(blocks, attention, layers, strict=True)
    ]
    transforms: dict[Hashable, set[KVTransform]] = {}
    for key, transform in zip(alike, layers, strict=True):
        transforms.setdefault(key, set()).add(transform)
    return [
        key[-1] if isinstance(tx, HeadGroups) or len(transforms[key]) >= FEWEST else None
        for key, tx in zip(alike, layers, strict=True)
    ]


def slots_together(caches: Sequence[Cache]) -> tuple[int, int]:
    """Returns the slots of every head in layers whose head groups read a further prompt together.

    They are those of the largest rectangle of all layers, so that one program of the block serves
    all layouts.

    Returns:
      The slots of every head before the prompt, and the most while it is read, which is as much
      more as the smallest rectangle may get.
    """
    joined = [part.kv for cache in caches if can_join(cache) for part in layer_caches(cache)]
    largest = max((kv.slots for kv in joined), default=0)
    return largest, largest + max((kv.max_tokens - kv.slots for kv in joined), default=0)


@compiled(static_argnums=(0, 1, 2))
def join_layer(
    observer: Observe,
    transform: KVTransform,
    slots: tuple[int, int],
    document: Int[Array, " G"] | None,
    cache: Cache,
    rows: Int[Array, " G"] | None,
) -> tuple[Reading, AllHeads | None]:
    """Begins one reading of a further prompt for all heads of a layer, and joins their states.

    Args:
      observer: what reads the prompt.
      transform: of the layer.
      slots: as `slots_together` returns them.
      document: as in `begin`.
      cache: of the layer.
      rows: the rows that are read; None: all of them.
    """
    cache = cache if rows is None else take_rows(cache, rows)
    reading = join(observer, transform, layer_caches(cache), *slots, document)
    return reading, all_heads_of(transform, cache)


def decide_layer(
    transform: KVTransform,
    size: CacheSize,
    attention: AttentionOptions,
    all_heads: AllHeads | None,
    reading: Reading,
    compiler: Programs,
) -> Reading:
    """Lets the method for all heads of a layer, if there is one, decide what stays of a reading.

    Args:
      transform, attention: of the layer.
      size: of the cache, with the rows that were read.
      all_heads: of the layer.
    """
    whole = method_for_all(transform)
    if whole is None:
        return reading
    return compiler.run(
        "the decision of a layer", _decide, whole, size, attention, all_heads, reading
    )


@compiled(static_argnums=(0, 1, 2))
def _decide(
    whole: KVTransform,
    size: CacheSize,
    attention: AttentionOptions,
    all_heads: AllHeads,
    reading: Reading,
) -> Reading:
    """Lets the method for all heads evict and merge in a reading."""
    state, heads = all_heads
    cache = new_cache(whole, size, attention, LayerStates(((state, None),)))
    return decide_for_all(cache, heads, reading)  # pyright: ignore[reportArgumentType]  # a method for all heads has one rectangle


@compiled(static_argnums=(0, 1, 2), donate_argnums=3)
def compress_layer(
    transform: KVTransform,
    size: CacheSize,
    attention: AttentionOptions,
    into: LayerStates | Cache,
    rows: Int[Array, " G"] | None,
    reading: Reading,
) -> Cache:
    """Makes one layer's cache of what `decide_layer` has left of a reading of `Observe`.

    Args:
      transform, attention: of the layer.
      size: of the cache, with the rows that were read.
      into: the states of a new cache, without `all_heads`, or the cache.
      rows: the rows of the cache that were read; None: all of them.
    """
    is_new = isinstance(into, LayerStates)
    cache = new_cache(transform, size, attention, into) if is_new else into
    if rows is None:
        return cut(transform, cache, reading)
    return put_rows(cache, rows, cut(transform, take_rows(cache, rows), reading))
