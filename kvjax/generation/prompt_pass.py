"""A prompt is read layer by layer, by one compiled function for all layers that are alike."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.attention.init_cache import init_cache
from kvjax.attention.kept_tokens import kept_tokens
from kvjax.attention.layer import Cache, layer_caches, map_parts
from kvjax.attention.parts import mesh_of_cache, placed
from kvjax.attention.prompt import begin
from kvjax.attention.rows import put_rows, take_rows
from kvjax.budgets.layers import layers_of
from kvjax.checks import floating
from kvjax.compiled_code import compiled
from kvjax.devices import by_rows, mesh_of
from kvjax.generation.compiler import Compiler
from kvjax.generation.groups import Group, joined
from kvjax.generation.model import FunctionalModel
from kvjax.generation.pruning import drops_tokens, pass_on, states_at
from kvjax.protocol import AttentionOptions, KVTransform

T = TypeVar("T")


class CacheSize(NamedTuple):
    """What caches are made for: the static arguments of `init_cache` that all layers share."""

    batch: int
    kv_heads: int
    query_heads: int
    head_dim: int
    max_prompt: int
    max_new: int
    dtype: str | None
    mesh: Mesh | None = None
    max_length: int | None = None

    @classmethod
    def of(
        cls,
        model: FunctionalModel,
        batch: int,
        max_prompt: int,
        max_new: int,
        dtype: DTypeLike | None,
        tokens: int,
    ) -> CacheSize:
        """Of a model's layers, on the mesh of its parameters.

        `tokens` of a row were asked for. `max_prompt` and `max_new` may be padded: how a model
        treats a text must not follow from that.
        """
        dtype = None if dtype is None else floating(dtype).name
        heads = model.kv_heads, model.query_heads, model.head_dim
        max_length = None if model.length_class is None else model.length_class(tokens)
        return cls(batch, *heads, max_prompt, max_new, dtype, mesh_of(model.params), max_length)

    max_tokens = property(lambda self: self.max_prompt + self.max_new)  # of a row

    def cache(
        self, transform: KVTransform, layer: int, attention: AttentionOptions | None = None
    ) -> Cache:
        """An empty cache of one layer; None: of any attention, where only its size is asked for."""
        options = {} if attention is None else attention.static
        return init_cache(transform, layer=layer, **self._asdict(), **options)


def read_prompt(
    model: FunctionalModel,
    layers: tuple[KVTransform, ...],
    groups: Sequence[Group],
    caches: tuple[Cache, ...] | CacheSize,
    compiler: Compiler,
    on_layer: Callable[[int], None] | None = None,
    last: bool = True,
) -> tuple[Float[Array, "B V"], tuple[Cache, ...]]:
    """Logits of each row's last token, and the caches that hold the prompt.

    Of a model that shows its parts, one layer after the other is run, so that no more than one
    layer holds its part of the whole prompt, of the rows of one group. Any other model is called
    once for each group.

    Args:
      groups: the prompts. Rows in no group have no tokens: their caches stay, their logits are 0.
      caches: of earlier turns, donated; or what new ones are made for.
      on_layer: is called with the number of each layer that has read the prompt, in order; for a
        model that does not show its parts, after the whole prompt.
      last: whether the caches are compressed then; else they are readings, as of `attend`.
    """
    sizes: list[CacheSize | None] = [None] * len(groups)
    given: Any = [caches] * len(groups)
    if isinstance(caches, CacheSize):
        sizes = [caches._replace(batch=len(group.tokens)) for group in groups]
        for size in sizes:
            compiler.compile("the caches", ("states", size), states_of_layers, layers, size)
        given = [states_of_layers(layers, size) for size in sizes]
    read = _read_whole_model if model.parts is None else _read_by_layer
    logits, written = read(model, layers, groups, sizes, given, compiler, on_layer, last)
    if groups[0].rows is None:
        return logits[0], written
    batch = layer_caches(written)[0].kv.shape[0]
    rows = _rows_of(groups)
    empty = jnp.zeros((batch, *logits[0].shape[1:]), logits[0].dtype)
    return empty.at[rows].set(jnp.concatenate(logits)), written


def _read_by_layer(
    model: FunctionalModel,
    layers: tuple[KVTransform, ...],
    groups: Sequence[Group],
    sizes: Sequence[CacheSize | None],
    given: Sequence[tuple],
    compiler: Compiler,
    on_layer: Callable[[int], None] | None,
    last: bool,
) -> tuple[list[Array], tuple[Cache, ...]]:
    """The logits of each group, and the caches of all rows.

    Args:
      sizes: what the new caches of each group are made for; None: there are caches.
      given: of each group, by layer, the states of its new caches, or the caches of all rows.
    """
    parts, mesh = model.parts, mesh_of(model.params)
    passing, written = [], []
    for group in groups:
        start = parts.embed, mesh, model.params, group.tokens, group.positions
        compiler.compile("the embedding", ("embed", group.tokens.shape), _embed, *start)
        passing.append((_embed(*start), group.positions))
    for layer, own in enumerate(parts.split(model.params)):
        block, transform, attention = parts.blocks[layer], layers[layer], model.attention(layer)
        what = f"the prompt pass of layer {layer + 1} of {len(layers)}"
        caches, whole = [], given[0][layer]
        for number, (group, size) in enumerate(zip(groups, sizes, strict=True)):
            x, positions = passing[number]
            cache = (whole, group.rows) if size is None else (given[number][layer], None)
            one = block, transform, size, attention, last, own, x, positions, *cache
            kind = block, transform, attention, x.shape
            compiler.compile(what, kind, _read_layer, *one)
            # Waiting bounds the memory: a layer that is queued has its arrays already.
            *passing[number], whole = jax.block_until_ready(_read_layer(*one))
            caches.append(whole)
        written.append(whole if sizes[0] is None else _together(groups, caches, compiler))
        if on_layer is not None:
            on_layer(layer)
    logits = []
    for group, (x, positions) in zip(groups, passing, strict=True):
        end = parts.head, mesh, model.params, x, positions, group.positions
        compiler.compile("the logits", ("head", x.shape), _last_logits, *end)
        logits.append(_last_logits(*end))
    return logits, tuple(written)


def _read_whole_model(
    model: FunctionalModel,
    layers: tuple[KVTransform, ...],
    groups: Sequence[Group],
    sizes: Sequence[CacheSize | None],
    given: Sequence[tuple],
    compiler: Compiler,
    on_layer: Callable[[int], None] | None,
    last: bool,
) -> tuple[list[Array], tuple[Cache, ...]]:
    """The same of a model that does not show its parts."""
    logits, caches, whole = [], [], given[0]
    for number, (group, size) in enumerate(zip(groups, sizes, strict=True)):
        cache = (whole, group.rows) if size is None else (given[number], None)
        one = layers, size, last, model, group.tokens, group.positions, *cache
        compiler.compile("the prompt pass", ("prompt", group.tokens.shape), _read_whole, *one)
        read, whole = jax.block_until_ready(_read_whole(*one))
        logits.append(read)
        caches.append(whole)
    if sizes[0] is not None:
        by_layer = map(list, zip(*caches, strict=True))
        whole = tuple(_together(groups, own, compiler) for own in by_layer)
    for layer in range(len(layers) if on_layer is not None else 0):
        on_layer(layer)
    return logits, whole


def _rows_of(groups: Sequence[Group]) -> Int[np.ndarray, " B"]:
    """The rows of all groups, group by group."""
    return np.concatenate([np.asarray(group.rows) for group in groups])


def _together(groups: Sequence[Group], caches: list[Cache], compiler: Compiler) -> Cache:
    """One layer's caches of all groups as one cache."""
    if groups[0].rows is None:
        return caches[0]
    given = np.argsort(_rows_of(groups)), tuple(caches)
    kind = jax.tree.structure(given), tuple(x.shape for x in jax.tree.leaves(given))
    compiler.compile("one cache of all rows", kind, joined, *given)
    return jax.block_until_ready(joined(*given))


def cache_shapes(
    model: FunctionalModel, layers: tuple[KVTransform, ...], size: CacheSize
) -> tuple[Cache, ...]:
    """What `read_prompt` returns for new caches, as shapes: nothing is computed or compiled.

    Layers that are alike share one value.
    """
    tokens = jax.ShapeDtypeStruct((size.batch, 1), jnp.int32)
    if model.parts is None:
        given = jax.eval_shape(functools.partial(states_of_layers, layers, size))
        whole = functools.partial(_read_whole, layers, size, True)
        return jax.eval_shape(whole, model, tokens, tokens, given)[1]
    parts = model.parts
    embed = functools.partial(_embed, parts.embed, None)
    x = jax.eval_shape(embed, model.params, tokens, tokens)
    attention = map(model.attention, range(len(layers)))
    kinds = tuple(zip(parts.blocks, layers, attention, strict=True))
    known: dict[Hashable, Cache] = {}
    for layer, (kind, own) in enumerate(zip(kinds, parts.split(model.params), strict=True)):
        if kind not in known:
            states = jax.eval_shape(functools.partial(_states_of, layers[layer], size, layer))
            block, transform, options = kind
            one = functools.partial(_read_layer, block, transform, size, options, True)
            known[kind] = jax.eval_shape(one, own, x, tokens, states)[2]
    return tuple(known[kind] for kind in kinds)


@compiled(static_argnums=(0, 1))
def states_of_layers(layers: tuple[KVTransform, ...], size: CacheSize) -> tuple:
    """What the transforms of empty caches carry beside the slots: all that differs by layer."""
    return tuple(_states_of(transform, size, layer) for layer, transform in enumerate(layers))


def _states_of(transform: KVTransform, size: CacheSize, layer: int) -> tuple:
    """The same of one layer."""
    cache = placed(size.cache(transform, layer))
    return tuple(part.state for part in layer_caches(cache))


def new_cache(
    transform: KVTransform, size: CacheSize, attention: AttentionOptions, states: tuple
) -> Cache:
    """An empty cache with these states; layers that are alike get equal ones otherwise."""
    bound = layers_of(transform)
    cache = size.cache(transform, 0 if bound is None else bound[0], attention)
    left = iter(states)
    return map_parts(lambda part: dataclasses.replace(part, state=next(left)), cache)


@compiled(static_argnums=(0, 1))
def _embed(
    embed: Callable, mesh: Mesh | None, params: Any, tokens: Array, positions: Array
) -> Array:
    return by_rows(embed(params, tokens, positions), mesh)


@compiled(static_argnums=(0, 1, 2, 3, 4), donate_argnums=8)
def _read_layer(
    block: Callable,
    transform: KVTransform,
    size: CacheSize | None,
    attention: AttentionOptions,
    last: bool,
    own: Any,
    x: Float[Array, "B T C"],
    positions: Int[Array, "B T"],
    cache: Cache | tuple,
    rows: Int[Array, " B"] | None = None,
) -> tuple[Array, Array, Cache]:
    """What leaves a layer, at which positions, and its cache.

    With a `size`, `cache` is the states of a new one; with `rows`, the tokens are those of some
    rows of the cache.
    """
    whole = cache
    if size is not None:
        cache = begin(new_cache(transform, size, attention, cache), empty=True)
    if rows is not None:
        cache = take_rows(whole, rows)
    x, cache = block(own, x, positions, cache, layer=transform, phase="prompt", last=last)
    if drops_tokens(transform, cache):
        x, positions = pass_on(x, positions, kept_tokens(cache))
    if rows is not None:
        cache = put_rows(whole, rows, cache)
    mesh = mesh_of_cache(cache)
    return by_rows(x, mesh), by_rows(positions, mesh), placed(cache)


@compiled(static_argnums=(0, 1))
def _last_logits(
    head: Callable, mesh: Mesh | None, params: Any, x: Array, reaching: Array, positions: Array
) -> Float[Array, "B V"]:
    """Logits of each row's newest token, which is among those that reach the end."""
    logits = head(params, states_at(x, reaching, positions.max(-1, keepdims=True)))[:, -1]
    return by_rows(logits, mesh)


@compiled(static_argnums=(0, 1, 2), donate_argnums=6)
def _read_whole(
    layers: tuple[KVTransform, ...],
    size: CacheSize | None,
    last: bool,
    model: FunctionalModel,
    tokens: Array,
    positions: Array,
    caches: tuple,
    rows: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B V"], tuple[Cache, ...]]:
    """All layers in one call, of a model that does not show its parts; `rows` as in a layer."""
    whole = caches
    if size is not None:
        caches = tuple(
            begin(new_cache(transform, size, model.attention(layer), states), empty=True)
            for layer, (transform, states) in enumerate(zip(layers, caches, strict=True))
        )
    if rows is not None:
        caches = take_rows(whole, rows)
    logits, caches = model.apply(
        model.params, tokens, positions, caches,
        layers=layers, phase="prompt", last=last, logits_at=positions.argmax(-1)[:, None],
    )  # fmt: skip
    if rows is not None:
        caches = put_rows(whole, rows, caches)
    return by_rows(logits[:, -1], mesh_of_cache(caches[0])), tuple(map(placed, caches))
