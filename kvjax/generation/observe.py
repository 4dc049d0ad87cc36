"""Reads a prompt once for methods, or for head groups, each of which compresses it later."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from kvjax.attention.all_heads import cut, joined
from kvjax.attention.layer import Cache, LayerCache, Reading, layer_caches, map_parts
from kvjax.attention.parts import placement_of
from kvjax.attention.prompt import compress, of_heads, read_for
from kvjax.compiled_code import compiled
from kvjax.compose.wrappers import HeadGroups, by_head_groups, needs_of
from kvjax.generation.compiler import Programs
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


def decides_for_all(transform: KVTransform, document: bool) -> bool:
    """Returns whether the method for all heads of head groups compresses a prompt.

    It does not where groups store keys unrotated, or query head by query head. Nor does it where a
    document's slots get other values: a fit would take as many of each head as the largest has.

    Args:
      document: whether the prompt is a document.
    """
    if not isinstance(transform, HeadGroups) or transform.whole is None:
        return False
    needs = needs_of(transform)
    fits = document and needs.writes_values
    return not (fits or needs.unrotated_keys or needs.unfold)


def slots_together(
    layers: Sequence[KVTransform], caches: Sequence[Cache], document: bool
) -> list[tuple[int, int] | None]:
    """Returns the slots of a layer's heads where they read a further prompt together.

    Rectangles differ from layout to layout, so that reading group by group would compile a whole
    block for each layout. Together, all heads of these layers have as many slots as the largest
    rectangle of any of them, so that one block is compiled.

    Args:
      layers, caches: of the model.
      document: whether the prompt is a document.

    Returns:
      For each layer the slots that all its heads have in the meantime, and at most while the prompt
      is read, which is as much more as the smallest rectangle of any layer may get; None: it reads
      as it is.
    """
    rectangles = [
        [part.kv for part in layer_caches(cache)]
        if decides_for_all(transform, document) and placement_of(cache) is None else []
        for transform, cache in zip(layers, caches, strict=True)
    ]  # fmt: skip
    every = [kv for of_layer in rectangles for kv in of_layer]
    largest = max((kv.slots for kv in every), default=0)
    room = max((kv.max_tokens - kv.slots for kv in every), default=0)
    return [(largest, largest + room) if of_layer else None for of_layer in rectangles]


def join_heads(
    program: str,
    transform: HeadGroups,
    attention: AttentionOptions,
    cache: Cache,
    slots: tuple[int, int],
    compiler: Programs,
) -> tuple[LayerCache]:
    """Joins the head groups of a layer into one cache, for as long as it reads a further prompt.

    Args:
      program: its name, as in `Compiler`.
      attention: options of the layer's attention.
      slots: of each head, as `slots_together` returns them.
    """
    return compiler.run(program, (transform, attention, slots), _join, transform, cache, *slots)


def cut_heads(
    program: str,
    transform: HeadGroups,
    attention: AttentionOptions,
    cache: Cache,
    all_heads: LayerCache,
    compiler: Programs,
) -> Cache:
    """Cuts what `join_heads` has joined into head groups again, when the prompt has been read.

    Args:
      cache: of the head groups, as it was before. It is donated.
      all_heads: the cache of all heads, afterwards.
    """
    key = transform, attention, all_heads.kv.shape
    return compiler.run(program, key, _cut, transform, cache, all_heads)


def compress_layer(
    program: str,
    transform: KVTransform,
    size: CacheSize,
    attention: AttentionOptions,
    states: tuple,
    reading: Reading,
    compiler: Programs,
) -> Cache:
    """Makes one layer's cache of what `Observe` has read; layers alike share compiled code.

    Args:
      program: its name, as in `Compiler`.
      size: of the cache.
      states: of the transform, for an empty cache. They are donated.
    """
    key, decided = (transform, size, attention, reading.kv.shape), reading
    if isinstance(transform, HeadGroups) and transform.whole is not None:
        *states, of_whole = states
        if decides_for_all(transform, document=True):
            decided = compiler.run(
                "the decision of a layer", (transform.whole, *key[1:]), _decide,
                transform.whole, size, attention, of_whole, reading,
            )  # fmt: skip
    return compiler.run(program, key, _compress, transform, size, attention, tuple(states), decided)


_join = compiled(static_argnums=(0, 2, 3))(joined)
_cut = compiled(static_argnums=0, donate_argnums=1)(cut)


@compiled(static_argnums=(0, 1, 2))
def _decide(
    whole: KVTransform,
    size: CacheSize,
    attention: AttentionOptions,
    state_and_heads: tuple,
    reading: Reading,
) -> LayerCache:
    """Returns a cache of all heads in the groups' order, compressed by their method."""
    cache = new_cache(whole, size, attention, ((state_and_heads[0], None),))
    reading = read_for(whole, cache, of_heads(reading, state_and_heads[1]))
    return compress(reading, to_front=True)


@compiled(static_argnums=(0, 1, 2), donate_argnums=3)
def _compress(
    transform: KVTransform,
    size: CacheSize,
    attention: AttentionOptions,
    states: tuple,
    decided: Reading | LayerCache,
) -> Cache:
    """Returns a layer's cache, made of a reading, or of the cache that `_decide` returns."""
    cache = new_cache(transform, size, attention, states)
    if isinstance(decided, LayerCache):
        return cut(transform, cache, decided)
    return map_parts(compress, read_for(transform, cache, decided))
