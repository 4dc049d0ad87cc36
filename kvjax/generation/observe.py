"""Reads a prompt for other methods, each of which compresses it later."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from kvjax.attention.layer import Cache, Reading, map_parts
from kvjax.attention.prompt import compress, cut, evicted, of_heads, read_for, stored
from kvjax.compiled_code import compiled
from kvjax.compose.wrappers import HeadGroups, by_head_groups
from kvjax.generation.compiler import Compiler
from kvjax.generation.new_caches import CacheSize, new_cache
from kvjax.protocol import AttentionOptions, Extent, KVTransform, Needs


@dataclass(frozen=True)
class Observe(KVTransform):
    """The full cache, whose readings hold what other methods need of a prompt.

    Args:
      wanted: the needs of those methods.
    """

    wanted: Needs

    needs = property(lambda self: self.wanted)

    @classmethod
    def of(cls, layer: KVTransform) -> Observe:
        """Returns what reads a prompt for the transform of a layer, to be compressed later."""
        needs = functools.reduce(Needs.union, (part.needs for part in by_head_groups(layer)))
        return cls(
            Needs(  # without what decode steps need
                accumulated_attention=needs.accumulated_attention,
                query_window=needs.query_window,
                query_share=needs.query_share,
                repetition=needs.repetition,
                repetition_queries=needs.repetition_queries,
                unrotated_keys=needs.unrotated_keys,
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
NO_STATES = (((), None),)  # the state and heads of `Observe`, as `states_of` returns them


def observers_of(
    blocks: Sequence[Callable],
    attention: Sequence[AttentionOptions],
    layers: Sequence[KVTransform],
    size: CacheSize | None,
) -> list[Observe | None]:
    """Returns, for each layer, what reads the prompt in place of its transform; None: nothing does.

    Layers may be alike but for their transforms, as with PyramidKV, whose layers differ in their
    capacity. Then one program reads the prompt in all of them, and a smaller one for each transform
    compresses what has been read. A program that does both has the layer's whole computation in it,
    which would be compiled once more for each transform. It is used where layers that are alike
    have one transform or two (ClusterKV's first layers keep all): it is a little faster, and two of
    it compile about as fast as one that reads and two that compress. Head groups always share a
    reading, since each would compute attention of its own.

    Args:
      blocks, attention: of the layers, as in `FunctionalModel`.
      layers: their transforms.
      size: of the new caches, if the prompt is complete; else None, and each layer reads alone.
    """
    different = set(layers)
    if size is None or any(reads_alone(tx, size) for tx in different):
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


def compress_layer(
    program: str,
    transform: KVTransform,
    size: CacheSize,
    attention: AttentionOptions,
    states: tuple,
    reading: Reading,
    compiler: Compiler,
) -> Cache:
    """Makes one layer's cache of what `Observe` has read; layers alike share compiled code.

    Args:
      program: its name, as in `Compiler`.
      size: of the cache.
      states: of the transform, for an empty cache. They are donated.
    """
    if isinstance(transform, HeadGroups) and transform.whole is not None:
        *states, of_whole = states
        reading = compiler.run(
            "the decision of a layer", (transform.whole, size, attention, reading.kv.shape),
            _decide, transform.whole, size, attention, of_whole, reading,
        )  # fmt: skip
    return compiler.run(
        program, (transform, size, attention, reading.kv.shape), _compress,
        transform, size, attention, tuple(states), reading,
    )  # fmt: skip


@compiled(static_argnums=(0, 1, 2))
def _decide(
    whole: KVTransform,
    size: CacheSize,
    attention: AttentionOptions,
    state_and_heads: tuple,
    reading: Reading,
) -> Reading:
    """Returns a reading of all heads in the groups' order, after their method's decision."""
    cache = new_cache(whole, size, attention, ((state_and_heads[0], None),))
    reading = read_for(whole, cache, of_heads(reading, state_and_heads[1]))
    return evicted(reading, to_front=True)


@compiled(static_argnums=(0, 1, 2), donate_argnums=3)
def _compress(
    transform: KVTransform,
    size: CacheSize,
    attention: AttentionOptions,
    states: tuple,
    reading: Reading,
) -> Cache:
    cache = new_cache(transform, size, attention, states)
    if isinstance(transform, HeadGroups) and transform.whole is not None:
        return map_parts(stored, cut(transform, cache, reading))
    return map_parts(compress, read_for(transform, cache, reading))
