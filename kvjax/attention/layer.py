"""The cache of one attention layer: what it carries from call to call, and how it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import jax
import jax.export
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kvjax.budgets.layers import layers_of
from kvjax.cache.payload import Payload
from kvjax.cache.remainders import with_remainders
from kvjax.cache.slots import KVCache, check_not_stacked, empty_cache
from kvjax.checks import as_scale, check_count, check_logits, check_rope, floating
from kvjax.compose.chain import parts_of
from kvjax.compose.wrappers import HeadGroups
from kvjax.devices import Placement, check_mesh
from kvjax.protocol import (
    PASSED,
    AttentionOptions,
    Extent,
    KVTransform,
    Stage,
    State,
    check_transform,
    is_bound,
    takes_part,
)
from kvjax.rope import Rope
from kvjax.transforms.ring import Ring

T = TypeVar("T")
# Flushes at which a value may be rounded again and again. Each adds several tokens at once, which
# are not lost as a whole, and errors add up like a random walk: after 64 to some 8 roundings.
MOST_WRITES = 64


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """Everything that one attention layer carries from call to call.

    It is a pytree. Donate it.

    Args:
      kv: the slots.
      state: the transform's own arrays.
      window: each row's last W queries, where a transform goes on with them while decoding; None
        otherwise.
      rope: the last prompt's, and that of `init_cache` before, where a method looks at unrotated
        keys at a flush; None otherwise.
      transform: what it was made for (static).
      max_length: tokens of a row that it was made for, prompt and new ones together (static). A
        model that decides by the length of a text decides by this number, so that one text gives
        the same result in one call, in turns, in chunks and token by token.
      options: scale, window and soft cap of its attention (static). Where the cache
        is to be flushed it holds the sinks of the last prompt, -inf where there were none.
      placement: the devices that it is divided among (static); None: `attend` divides nothing.
    """

    kv: KVCache
    state: State
    window: QueryWindow | None
    rope: Rope | None
    transform: KVTransform = field(metadata={"static": True})
    max_length: int = field(metadata={"static": True})
    options: AttentionOptions
    placement: Placement | None = field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
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
      queries: each row's last W queries, where the transform looks at them; None otherwise.
      rope: the last chunk's.
      options: scale, window, soft cap and sinks of its attention.
      begun: whether a chunk has been read (static).
    """

    cache: LayerCache
    stored: tuple[Payload, Payload] | None
    rows: Bool[Array, " B"]
    queries: QueryWindow | None
    rope: Rope | None
    options: AttentionOptions
    begun: bool = field(default=True, metadata={"static": True})

    kv = property(lambda self: self.cache.kv)
    transform = property(lambda self: self.cache.transform)
    placement = property(lambda self: self.cache.placement)
    max_length = property(lambda self: self.cache.max_length)


Part = LayerCache | Reading  # one rectangle of slots
Cache = Part | tuple[Part, ...]  # a tuple: one per head group


def layer_caches(caches: Cache | tuple[Cache, ...]) -> list[LayerCache]:
    """Lists the rectangles of slots in the caches of one layer or of several, in order."""
    return jax.tree.leaves(caches, is_leaf=lambda x: isinstance(x, Part))


def map_parts(function: Callable[[Any], Any], caches: Cache | tuple[Cache, ...]) -> Any:
    """Applies `function` to each rectangle of slots in the caches of one layer or of several."""
    return jax.tree.map(function, caches, is_leaf=lambda x: isinstance(x, Part))


def check_caches(
    caches: object, where: str, *, stacked: bool = False, reading: bool = False
) -> None:
    """Raises unless these are caches of `init_cache`.

    Args:
      caches: of one layer or several.
      where: the function that takes them.
      stacked: whether arrays may be those of several layers.
      reading: whether prompts may be incomplete.
    """
    for cache in layer_caches(caches):  # pyright: ignore[reportArgumentType]
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


def kept_tokens(cache: Cache) -> Int[Array, "B T"]:
    """Positions of the tokens that survive in every KV head of a layer, in order, -1 padded.

    For models that prune hidden states after a layer's prompt. Where a transform `passes` fewer
    tokens to the next layer than its own layer caches (PyramidInfer at the paper's ratios), only
    those. The newest token is always among them.

    Args:
      cache: of one layer, after its prompt.

    Returns:
      `[B, T]`; T is what the transform `passes` at most, or else the cache's slots.

    Raises:
      TypeError, ValueError: no caches, or caches stacked by layer.

    Example:
      >>> import jax, jax.numpy as jnp, kvjax
      >>> attend = jax.jit(kvjax.attend, static_argnums=0, static_argnames="phase")
      >>> tx = kvjax.StreamingLLM(budget=3, sinks=1)
      >>> cache = kvjax.init_cache(tx, batch=1, kv_heads=2, head_dim=4, max_prompt=5, max_new=1)
      >>> rows = jnp.ones((1, 2, 5, 4))
      >>> _, cache = attend(tx, cache, rows, rows, rows, jnp.arange(5)[None], phase="prompt")
      >>> kvjax.kept_tokens(cache).tolist()
      [[0, 3, 4, -1]]
    """
    check_caches(cache, "kept_tokens")
    parts, none = layer_caches(cache), jnp.iinfo(jnp.int32).max
    held, sizes = [], []
    for part in parts:
        kv = part.kv
        kept = kv.live & kv.column(PASSED) if PASSED in kv.columns else kv.live
        held.append(jnp.where(kept, kv.position, none).reshape(kept.shape[0], -1))
        passed = part.transform.extent(Extent(kv.max_prompt, kv.max_new)).passed
        sizes.append(kv.slots if passed is None else min(passed, kv.slots))
    position = jnp.sort(jnp.concatenate(held, axis=1), axis=1)
    # A position stands here once per head that holds it: as often as there are heads, if all do.
    more = sum(part.kv.shape[1] for part in parts) - 1
    first, last = position[:, : position.shape[1] - more], position[:, more:]
    common = jnp.sort(jnp.where(first == last, first, none), axis=1)[:, : min(sizes)]
    return jnp.where(common == none, -1, common)


def default_dtype() -> DTypeLike:
    """Returns the default dtype of keys and values: float32 on CPU, else bfloat16.

    On CPUs bfloat16 is several times slower.
    """
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


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


def init_cache(
    transform: KVTransform,
    *,
    batch: int,
    kv_heads: int,
    head_dim: int,
    max_prompt: int,
    max_new: int,
    query_heads: int | None = None,
    dtype: DTypeLike | None = None,
    layer: int | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    max_length: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    rope: Rope | None = None,
) -> Cache:
    """An empty cache for one attention layer, of the capacity that the transform promises.

    Args:
      transform: the layer's transform (one element of `bind`'s result).
      batch: rows; in `jax.eval_shape`, a symbolic dimension of `jax.export` too.
      kv_heads, head_dim: as in the model.
      max_prompt, max_new: most prompt tokens and most new tokens of a row, all turns together.
      query_heads: as in the model; `kv_heads` by default.
      dtype: of keys and values; by default float32 on CPU, where bfloat16 is several times slower,
        and bfloat16 elsewhere.
      layer: the number of the layer, on which budgets, random numbers and calibrations depend. By
        default 0, or the layer that the transform was bound to, if it stands for that one alone.
      mesh: devices that `attend` divides the cache among, with axes "data" for its rows and
        "tensor" for its heads. Rows that the axis does not divide evenly are on all of its
        devices, and so are KV heads, and those of `HeadGroups`. None: one device, or what XLA
        makes of where the arrays are.
      max_length: the `LayerCache.max_length`, by which a model decides what depends on the length
        of a text, such as the frequencies of LongRoPE; by default `max_prompt + max_new`. It bounds
        nothing.
      scale: of the logits in every call of `attend`, a Python number; `head_dim ** -0.5` by
        default.
      window: sliding window: a query sees the newest `window` positions, and what lies outside is
        hidden. None: all, or the window of a `kvjax.Ring`, which does not hold other tokens.
      soft_cap: bounds logits, `c · tanh(logit / c)`. None: no.
      rope: the one that prompts will be given, or one of its form. Methods that look at unrotated
        keys at a flush keep it in the cache; with it an empty cache has the structure of a used one
        for them too, as `jax.lax.cond` and restored checkpoints need. None: it joins such a cache
        with the first prompt.

    Returns:
      A `LayerCache`, or a tuple of them, one per group, for `HeadGroups`.

    Raises:
      TypeError, ValueError: a count that is no positive int, heads that don't divide, a dtype that
        is not floating, a scale that is an array or traced (`1 / jnp.sqrt(16)`), a transform that
        must be bound to a layer first, or that was bound to others than `layer`; a mesh with other
        axes.

    Example:
      >>> import kvjax
      >>> cache = kvjax.init_cache(kvjax.SnapKV(budget=64), batch=2, kv_heads=4, query_heads=8,
      ...                          head_dim=16, max_prompt=512, max_new=32)
      >>> cache.kv.shape
      (2, 4, 96)
    """
    check_transform(transform, "init_cache")
    query_heads = kv_heads if query_heads is None else query_heads
    counts = {"kv_heads": kv_heads, "query_heads": query_heads}
    if not jax.export.is_symbolic_dim(batch):
        counts |= {"batch": batch}
    for name, value in (counts | {"head_dim": head_dim, "max_prompt": max_prompt}).items():
        check_count(name, value, 1)
    check_count("max_new", max_new, 0)
    scale = head_dim**-0.5 if scale is None else as_scale(scale)
    check_logits(window, soft_cap)
    check_rope(rope, head_dim)
    if window is None:
        window = next((part.window for part in parts_of(transform) if isinstance(part, Ring)), None)
    max_length = max_prompt + max_new if max_length is None else max_length
    check_count("max_length", max_length, 1)
    bound = layers_of(transform)
    if layer is None and len(bound or (0,)) == 1:
        layer = (bound or (0,))[0]
    if bound is not None and layer not in bound:
        raise ValueError(
            f"{transform!r} stands for some layers of a model: give init_cache layer=, one of "
            f"{list(bound)}, got {layer}"
        )
    check_count("layer", layer, 0)
    if query_heads % kv_heads:
        raise ValueError(
            f"query_heads must be a multiple of kv_heads, got {query_heads} and {kv_heads}"
        )
    if dtype is None:
        dtype = default_dtype()
    dtype = floating(dtype)
    if not is_bound(transform):
        raise ValueError(
            f"{transform!r} decides per layer: give init_cache and attend one element of "
            "kvjax.bind(transform, num_layers)"
        )
    mesh = None if mesh is None else check_mesh(mesh)
    if isinstance(transform, HeadGroups):
        transform.check_heads(kv_heads)
        same = {"batch": batch, "head_dim": head_dim, "max_prompt": max_prompt}
        same |= {"max_new": max_new, "dtype": dtype, "layer": layer, "max_length": max_length}
        same |= {"scale": scale, "window": window, "soft_cap": soft_cap, "rope": rope}
        group, whole = query_heads // kv_heads, Placement.of(mesh, kv_heads, divisible=False)
        made = (
            init_cache(tx, kv_heads=len(heads), query_heads=len(heads) * group, **same)
            for heads, tx in transform.groups
        )
        return tuple(dataclasses.replace(cache, placement=whole) for cache in made)
    extent, needs = transform.extent(Extent(max_prompt, max_new)), transform.needs
    if needs.reposition and needs.decode_queries:
        raise ValueError(
            f"{transform!r} compares queries of earlier steps with keys whose ranks have changed "
            "since: reposition=True cannot be combined with Every or WhenFull of a method that "
            "observes queries"
        )
    lists = query_heads if needs.unfold else kv_heads
    kv = empty_cache(
        batch, lists, head_dim, extent.total, max_prompt=max_prompt, max_new=max_new, dtype=dtype,
        group=query_heads // lists, unfolded=lists // kv_heads, interval=extent.interval,
        unrotated_keys=needs.unrotated_keys,
    )  # fmt: skip
    if needs.accumulated_attention:
        kv = kv.with_column("attention", jnp.zeros((*kv.shape, kv.group), jnp.float32))
    kv, state = transform.init(kv, layer)
    if _writes_often(transform, kv):
        kv = with_remainders(kv)
    last_queries = None
    if needs.decode_queries:
        last_queries = QueryWindow.empty(
            batch, query_heads, needs.queries(max_prompt), head_dim, dtype
        )
    # From the beginning, since a prompt may not change the structure of a cache.
    sinks = None if extent.interval is None else jnp.full((query_heads,), -jnp.inf, jnp.float32)
    options = AttentionOptions(scale, window, soft_cap, sinks)
    placement = Placement.of(mesh, kv_heads, divisible=True)
    rope = kept_rope(transform, rope)
    return LayerCache(kv, state, last_queries, rope, transform, max_length, options, placement)


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


def _writes_often(transform: KVTransform, kv: KVCache) -> bool:
    """Tells whether a part may write values in decode steps, or at many flushes."""
    parts = [part for part in parts_of(transform) if part.needs.writes_values]
    if kv.max_new and any(takes_part(part, "step") for part in parts):
        return True
    flushes = 0 if kv.interval is None else kv.max_new // kv.interval
    return flushes > MOST_WRITES and any(takes_part(part, "flush") for part in parts)
