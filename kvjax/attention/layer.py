"""The cache of one attention layer: what it carries from call to call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import jax
import jax.export
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.payload import Payload
from kvjax.cache.record import Record
from kvjax.cache.rope import Rope
from kvjax.cache.slots import KVCache, check_not_stacked
from kvjax.compose.chain import parts_of
from kvjax.devices import Placement
from kvjax.protocol import AttentionOptions, KVTransform, Phase, Stage, State, takes_part
from kvjax.serialization import pytree_node
from pallas_kernels.base.annotations import NoneElsewhere

T = TypeVar("T")


@pytree_node
class QueryWindow(NamedTuple):
    """The last W queries of each row, oldest first.

    Args:
      query: rotated, `[B, Q, W, D]`.
      position: their positions, -1 where there were fewer, `[B, W]`.
    """

    query: Float[Array, "B Q W D"]
    position: Int[Array, "B W"]

    @classmethod
    def empty(cls, batch: int, query_heads: int, size: int, head_dim: int, dtype) -> QueryWindow:
        """Makes a window without queries."""
        query = jnp.zeros((batch, query_heads, size, head_dim), dtype)
        return cls(query, jnp.full((batch, size), -1, jnp.int32))

    def add(self, q: Float[Array, "B Q T D"], positions: Int[Array, "B T"]) -> QueryWindow:
        """Returns the last W valid queries after T more."""
        size = self.position.shape[1]
        position = jnp.concatenate((self.position, positions), axis=1)
        last = jnp.argsort(position >= 0, axis=1, stable=True)[:, -size:]
        index = last[:, None, :, None]
        # Two small gathers: joining the windows first would copy all queries of a long prompt.
        old = jnp.take_along_axis(self.query, jnp.minimum(index, size - 1), axis=2)
        new = jnp.take_along_axis(q, jnp.maximum(index - size, 0), axis=2)
        query = jnp.where(index < size, old, new.astype(old.dtype))
        return QueryWindow(query, jnp.take_along_axis(position, last, axis=1))


@pytree_node
@dataclass(frozen=True)
class Clock:
    """Counts the decode steps of a cache that flushes itself (`kvjax.self_flushing`).

    Args:
      waiting: tokens that each row has been offered since its last flush, `[B]`. They count for
        rows that took no part, as steps do in a loop that flushes.
      interval: M, the steps after which the cache is flushed (static).
    """

    waiting: Int[Array, " B"]
    interval: int = field(metadata={"static": True})


@pytree_node
@dataclass(frozen=True)
class LayerCache:
    """Everything that one attention layer carries from call to call.

    `kvjax.init_cache` makes it, and `kvjax.attend` returns a new one. It is a pytree. Donate it to
    the jitted function that attends, so that no step copies it.

    Args:
      kv: the slots.
      state: the transform's own arrays.
      window: each row's last W queries, where a transform goes on with them while decoding; None
        otherwise.
      rope: the rope of the last prompt, or of `init_cache` before the first one, if a method looks
        at unrotated keys at a flush; None otherwise.
      heads: the layer's KV heads that are here, where `HeadGroups` has an order for each layer;
        None otherwise.
      transform: the transform that it was made for (static).
      max_length: tokens of a row that it was made for, prompt and new ones together (static). A
        model that decides by the length of a text decides by this number, so that one text gives
        the same result in one call, in turns, in chunks and token by token.
      options: scale, window and soft cap of its attention (static). Where the cache
        is to be flushed it holds the sinks of the last prompt, -inf where there were none.
      placement: the devices that it is divided among (static); None: `attend` divides nothing.
      group_heads: the numbers of the KV heads that are here, in the cache of `HeadGroups` (static);
        None: all of them are.
      clock: the steps since the last flush, in a cache that flushes itself; None: a loop calls
        `flush`, or nothing has to be flushed.

    Example:
      >>> import kvjax
      >>> cache = kvjax.init_cache(kvjax.H2O(budget=8), batch=2, kv_heads=2, query_heads=4,
      ...                          head_dim=16, max_prompt=32, max_new=4)
      >>> cache.kv.shape, cache.state.tolist()  # room for a new token; the budget of each row
      ((2, 2, 9), [8, 8])
      >>> cache.transform
      H2O(budget=8, group_reduce='mean')
    """

    kv: KVCache
    state: State
    window: QueryWindow | None
    rope: Rope | None
    heads: Int[Array, " H"] | None
    transform: KVTransform = field(metadata={"static": True})
    max_length: int = field(metadata={"static": True})
    options: AttentionOptions
    placement: Placement | None = field(default=None, metadata={"static": True})
    group_heads: tuple[int, ...] | NoneElsewhere = field(default=None, metadata={"static": True})
    clock: Clock | None = None


@pytree_node
@dataclass(frozen=True)
class Reading:
    """A prompt that is being read into a layer's cache: what `attend(..., last=False)` returns.

    All tokens are there, in dense slots, and nothing has been compressed. `attend` takes it in the
    place of the cache for the next chunk, and compresses it when it has read the last one. Donate
    it, as a cache.

    Args:
      cache: the layer's cache. Its slots are dense and hold every token so far; what its transform
        carries is as it was before the prompt.
      stored: keys and values as they were stored before the prompt; None where they were dense.
      rows: the rows that had tokens in the prompt so far.
      length_before: tokens of each row before the prompt.
      document_length: as in `Step`.
      queries: each row's last W queries, where the transform looks at them; None otherwise.
      record: what the transform's probe has noted; None: it has none, or this is not a document.
      rope: the last chunk's.
      options: scale, window, soft cap and sinks of its attention.
      phase: of the last call; None: nothing has been read (static).
    """

    cache: LayerCache
    stored: tuple[Payload, Payload] | None
    rows: Bool[Array, " B"]
    length_before: Int[Array, " B"]
    document_length: Int[Array, " B"] | None
    queries: QueryWindow | NoneElsewhere
    record: Record | None
    rope: Rope | NoneElsewhere
    options: AttentionOptions
    phase: Phase | None = field(default=None, metadata={"static": True})

    kv = property(lambda self: self.cache.kv)
    heads = property(lambda self: self.cache.heads)
    group_heads = property(lambda self: self.cache.group_heads)
    transform = property(lambda self: self.cache.transform)
    placement = property(lambda self: self.cache.placement)
    max_length = property(lambda self: self.cache.max_length)


class RestSizes(NamedTuple):
    """How many places a rectangle of slots has at rest.

    Args:
      slots, keys, values: as `Sizes`, for the row and head that keep most.
      packed: slots of all rows and heads together; 0 on a mesh, where rectangles stay.
      masses: whether masses are kept, since a slot stands for more or less than one token.
      pins: whether pins are kept, since a slot has one.
    """

    slots: int
    keys: int
    values: int
    packed: int = 0
    masses: bool = False
    pins: bool = False


@pytree_node
@dataclass(frozen=True)
class Packed:
    """A rectangle of slots at rest.

    Args:
      cache: what the rectangle holds. Arrays `[B, H, S, ...]` have become `[1, 1, N, ...]`: the
        first `used` slots of every row and head, one behind another. Positions are of 16 bits where
        that suffices. A single place remains of masses and pins that are not kept.
      sizes: its places (static).
    """

    cache: LayerCache
    sizes: RestSizes = field(metadata={"static": True})


Part = LayerCache | Reading  # one rectangle of slots
Cache = Part | tuple[Part, ...]  # a tuple: one per head group


def layer_caches(caches: object) -> list[LayerCache]:
    """Lists the rectangles of slots in one or several layers' caches, in order."""
    return jax.tree.leaves(caches, is_leaf=lambda x: isinstance(x, Part))


def map_parts(function: Callable[[Any], Any], caches: object) -> Any:
    """Applies `function` to each rectangle of slots in one or several layers' caches."""
    return jax.tree.map(function, caches, is_leaf=lambda x: isinstance(x, Part))


def check_caches(
    caches: object,
    where: str,
    *,
    stacked: bool = False,
    reading: bool = False,
    resting: bool = False,
) -> None:
    """Raises unless these are caches of `init_cache`.

    Args:
      caches: of one layer or several.
      where: the function that takes them.
      stacked: whether arrays may be those of several layers.
      reading: whether prompts may be incomplete.
      resting: whether they may be at rest.
    """
    for cache in jax.tree.leaves(caches, is_leaf=lambda x: isinstance(x, Part | Packed)):
        if isinstance(cache, Packed):
            if not resting:
                raise ValueError(
                    f"{where}: a context at rest holds packed caches: take its .caches"
                )
            cache = cache.cache
        if isinstance(cache, Reading):
            if not reading:
                raise ValueError(f"{where}: the prompt is not complete: give its last chunk first")
            cache = cache.cache
        if not isinstance(cache, LayerCache):
            raise TypeError(
                f"{where}: caches must be those of init_cache, in tuples, got "
                f"{type(cache).__name__}"
            )
        if not stacked:
            check_not_stacked(cache.kv, where)


def check_layer_cache(cache: Any, who: str) -> None:
    """Raises unless it is a cache of one layer, as `init_cache` makes it."""
    parts = cache if isinstance(cache, tuple) else (cache,)
    if not parts or not all(isinstance(part, Part) for part in parts):
        actual = type(cache).__name__
        if isinstance(cache, tuple):
            kinds = sorted({type(part).__name__ for part in parts})
            actual = f"a tuple of {', '.join(kinds) or 'nothing'}"
        raise TypeError(f"{who} takes a cache from init_cache, got {actual}")
    for part in parts:
        check_not_stacked(part.kv, who)


def looks_at_keys(transform: KVTransform) -> bool:
    """Tells whether a part may evict or merge at a flush; only such methods look at all keys."""
    return any(p.stage == Stage.EVICT and takes_part(p, "flush") for p in parts_of(transform))


def kept_rope(transform: KVTransform, rope: Rope | None) -> Rope | None:
    """A copy of a rope, as the cache is donated, or None where no flush looks at unrotated keys."""
    if not (transform.needs.unrotated_keys and looks_at_keys(transform)):
        return None
    return for_keeping(rope)


def for_keeping(arrays: T) -> T:
    """Copies a model's arrays for a cache, which is donated and must not hold the originals."""
    return jax.tree.map(lambda x: jnp.asarray(x) + 0, arrays)
