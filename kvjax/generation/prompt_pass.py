"""Reads a prompt layer by layer, with one compiled function for all layers that are alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kvjax.attention.attend import begin_document, complete
from kvjax.attention.kept_tokens import kept_tokens
from kvjax.attention.layer import Cache, Reading, layer_caches
from kvjax.attention.parts import mesh_of_cache, placed
from kvjax.attention.prompt import before_look, begin
from kvjax.attention.rows import put_rows, take_rows
from kvjax.compiled_code import compiled, give_back_freed
from kvjax.devices import by_rows, mesh_of
from kvjax.generation.compiler import Compiler, Programs, Tracer
from kvjax.generation.groups import Group, Looking, Pieces, join_groups
from kvjax.generation.model import FunctionalModel, ModelParts, logits_of_one
from kvjax.generation.new_caches import (
    CacheSize,
    abstract_array,
    new_cache,
    states_of,
    states_of_layers,
)
from kvjax.generation.observe import (
    NO_STATES,
    Observe,
    compress_layer,
    decide_layer,
    join_layer,
    observers_of,
    slots_together,
)
from kvjax.generation.pruning import drops_tokens, pass_on, states_at
from kvjax.protocol import AttentionOptions, KVTransform

T = TypeVar("T")
Then = Callable[[Tracer, Float[Array, "B V"], tuple[Cache, ...]], None]

# Tokens of a prompt from which on a layer's arrays are large. On a CPU, what the C library keeps of
# those that were freed is given back after each layer. Otherwise it lies between arrays that stay,
# and reading 7,000 tokens of SmolLM2 with `by_head(kvzip)` takes a quarter more memory.
LONG_PROMPT = 2048


class LayerPass(NamedTuple):
    """Says how a layer reads a prompt: static in compiled code, and equal for layers alike.

    Args:
      block: the layer's block, as in `ModelParts`.
      transform: of the layer.
      size: of a new cache; None: there is one.
      attention: options of the layer's attention.
      last: whether this ends the prompt, so that the cache is compressed; else it is a reading.
    """

    block: Callable
    transform: KVTransform
    size: CacheSize | None
    attention: AttentionOptions
    last: bool


class Into(NamedTuple):
    """Describes the caches into which a group's prompts are read.

    Args:
      size: sizes of caches of the group's rows.
      new: whether these caches are new.
      layers: by layer, the states of new caches, or the caches of all rows.
    """

    size: CacheSize
    new: bool
    layers: tuple[Any, ...]


def read_prompt(
    model: FunctionalModel,
    layers: tuple[KVTransform, ...],
    groups: Sequence[Group],
    size: CacheSize,
    caches: tuple[Cache, ...] | None,
    compiler: Compiler,
    last: bool = True,
    then: Then | None = None,
) -> tuple[Float[Array, "B V"], tuple[Cache, ...]]:
    """Returns the logits of each row's last token, and the caches that hold the prompt.

    A model that shows its parts is run layer by layer, so that memory holds the activations of one
    layer at a time, for the rows of one group. Any other model is called once for each group.

    All layers are traced before the first one runs, since each layer's cache is donated: a method
    that raises an error in a later layer leaves the caches as they are.

    Args:
      groups: the prompts. Rows in no group have no tokens: their caches stay, their logits are 0.
      size: of the caches.
      caches: caches of earlier turns, which are donated; None: new ones are made.
      compiler: is told of each layer that has read the prompt; of those of a model that does not
        show its parts, after the whole prompt.
      last: whether this ends the prompt, so that the caches are compressed; else they are readings,
        as in `attend`.
      then: traces what comes after the prompt, given abstract logits and caches; None: nothing.
    """
    into = []
    for of_rows in (size._replace(batch=len(group.tokens)) for group in groups):
        if caches is None:
            compiler.compile("the caches", states_of_layers, layers, of_rows)
        into.append(Into(of_rows, caches is None, caches or states_of_layers(layers, of_rows)))
    read = functools.partial(_read_whole_model, model)
    if model.parts is not None:
        read = functools.partial(
            _read_by_layer, model, model.parts, model.parts.split(model.params)
        )
    read = functools.partial(read, layers, groups, into, last)

    def trace(tracer: Tracer) -> None:
        logits, new_caches = read(tracer)
        if then is not None:
            batch = layer_caches(new_caches)[0].kv.shape[0]
            shape = batch, *logits[0].shape[1:]
            then(tracer, abstract_array(shape, logits[0].dtype), new_caches)

    compiler.trace(trace)
    logits, new_caches = read(compiler)
    if groups[0].rows is None:
        return logits[0], new_caches
    batch = layer_caches(new_caches)[0].kv.shape[0]
    rows = _rows_of(groups)
    zeros = jnp.zeros((batch, *logits[0].shape[1:]), logits[0].dtype)
    return zeros.at[rows].set(jnp.concatenate(logits)), new_caches


def _read_by_layer(
    model: FunctionalModel,
    parts: ModelParts,
    params: Sequence[Any],
    layers: tuple[KVTransform, ...],
    groups: Sequence[Group],
    into: Sequence[Into],
    last: bool,
    compiler: Programs,
) -> tuple[list[Array], tuple[Cache, ...]]:
    """Reads a prompt layer by layer, for a model that shows its parts.

    A probe follows its document right away in each layer, before the document is compressed.

    Args:
      parts: of the model.
      params: of each layer.

    Returns:
      The logits of each group, and the caches of all rows.
    """
    mesh, (size, is_new, caches) = mesh_of(model.params), into[0]
    attention = tuple(map(model.attention, range(len(layers))))
    observers: list[Observe | None] = [None] * len(layers)
    if last:
        before = None if is_new else caches
        observers = observers_of(parts.blocks, attention, layers, size, before)
    slots = (0, 0) if is_new else slots_together(caches)
    is_long = sum(group.tokens.size for group in groups) >= LONG_PROMPT
    gives_back = is_long and isinstance(compiler, Compiler) and jax.default_backend() == "cpu"

    def embedded(tokens: Group | Pieces) -> Array:
        return compiler.run(
            "the embedding", _embed, parts.embed, mesh, model.params, tokens.tokens,
            tokens.positions,
        )  # fmt: skip

    def looking(group: Group) -> Looking | None:
        if group.looking is None or group.looking.pieces is None:
            return group.looking
        pieces = group.looking.pieces
        return group.looking._replace(pieces=pieces._replace(tokens=embedded(pieces)))

    # For the next layer: states of a prompt, their positions, and what looks at it.
    passing: list[Any] = [(embedded(group), group.positions, looking(group)) for group in groups]
    new_caches = []
    for layer, layer_params in enumerate(params):
        transform, observer, group_caches = layers[layer], observers[layer], []
        of_layer, cache = f"layer {layer + 1} of {len(layers)}", caches[layer]
        for number, (group, (size, _, by_layer)) in enumerate(zip(groups, into, strict=True)):
            # Each group of an earlier turn's cache writes its rows into the same cache.
            states_or_cache, rows = (by_layer[layer], None) if is_new else (cache, group.rows)
            how = LayerPass(
                parts.blocks[layer], transform, size if is_new else None, attention[layer], last
            )
            reads, joined, all_heads = (states_or_cache, rows), None, None
            if observer is not None:
                how, reads = how._replace(transform=observer, last=False), (NO_STATES, None)
                if is_new:  # it holds these tokens, and nothing is written after them
                    most = size.max_prompt if observer.needs.query_share else group.tokens.shape[1]
                    how = how._replace(size=size._replace(max_prompt=most, max_new=0))
                    all_heads = states_or_cache.all_heads
                    states_or_cache = states_or_cache._replace(all_heads=None)
                else:
                    joined, all_heads = compiler.run(
                        f"the heads of {of_layer}", join_layer, observer, transform, slots,
                        None if group.looking is None else group.looking.length, cache, rows,
                    )  # fmt: skip
            # States are donated: what leaves the layer takes their place.
            *passing[number], cache = compiler.run(
                f"the prompt pass of {of_layer}", _read_layer, how, layer_params, *reads,
                *passing[number], joined,
            )  # fmt: skip
            if drops_tokens(how.transform, cache):
                # A method such as PyramidInfer passes on only the tokens that it keeps here.
                passing[number][:2] = compiler.run(
                    f"the tokens that pass {of_layer}", _pass_on, *passing[number][:2], cache, rows,
                )  # fmt: skip
            if observer is not None:
                cache = decide_layer(transform, size, attention[layer], all_heads, cache, compiler)
                cache = compiler.run(
                    f"the compression of {of_layer}", compress_layer, transform, size,
                    attention[layer], states_or_cache, rows, cache,
                )  # fmt: skip
            # Waiting bounds the memory: a layer that is queued has its arrays already.
            cache = jax.block_until_ready(cache)
            group_caches.append(cache)
        new_caches.append(_together(groups, group_caches, compiler) if is_new else cache)
        if gives_back:
            give_back_freed()
        compiler.has_read(layer)
    logits = [
        compiler.run(
            "the logits", _last_logits, parts.head, mesh, model.vocab_size, model.params, x,
            positions, group.positions,
        )
        for group, (x, positions, _) in zip(groups, passing, strict=True)
    ]  # fmt: skip
    return logits, tuple(new_caches)


def _read_whole_model(
    model: FunctionalModel,
    layers: tuple[KVTransform, ...],
    groups: Sequence[Group],
    into: Sequence[Into],
    last: bool,
    compiler: Programs,
) -> tuple[list[Array], tuple[Cache, ...]]:
    """Does what `_read_by_layer` does, for a model that does not show its parts."""
    logits, group_caches, (_, is_new, caches) = [], [], into[0]
    for group, (size, _, states) in zip(groups, into, strict=True):
        if is_new:
            group, caches = group._replace(rows=None), states
        group_logits, caches = jax.block_until_ready(
            compiler.run(
                "the prompt pass", _read_whole, layers, size if is_new else None, last, model,
                group, caches,
            )
        )  # fmt: skip
        logits.append(group_logits)
        group_caches.append(caches)
    if is_new:
        by_layer = map(list, zip(*group_caches, strict=True))
        caches = tuple(_together(groups, of_layer, compiler) for of_layer in by_layer)
    for layer in range(len(layers)):
        compiler.has_read(layer)
    return logits, caches


def _rows_of(groups: Sequence[Group]) -> Int[np.ndarray, " B"]:
    """Returns the rows of all groups, group by group."""
    return np.concatenate([np.asarray(group.rows) for group in groups])


def _together(groups: Sequence[Group], caches: list[Cache], compiler: Programs) -> Cache:
    """Joins the caches that the groups have of one layer into one cache."""
    if groups[0].rows is None:
        return caches[0]
    order = np.argsort(_rows_of(groups))
    joined = compiler.run("one cache of all rows", join_groups, order, tuple(caches))
    return jax.block_until_ready(joined)


def cache_shapes(
    model: FunctionalModel, layers: tuple[KVTransform, ...], size: CacheSize
) -> tuple[Cache, ...]:
    """Returns the shapes of the caches that `read_prompt` makes; computes and compiles nothing.

    Layers that are alike share one value.
    """
    # A prompt of one token: the shapes of caches follow from `size` alone.
    tokens = positions = abstract_array((size.batch, 1), jnp.int32)
    if model.parts is None:
        states = jax.eval_shape(functools.partial(states_of_layers, layers, size))
        read_whole = functools.partial(_read_whole, layers, size, True)
        return jax.eval_shape(read_whole, model, Group(None, tokens, positions), states)[1]
    parts = model.parts
    embed = functools.partial(_embed, parts.embed, None)
    x = jax.eval_shape(embed, model.params, tokens, positions)
    shapes: dict[LayerPass, Cache] = {}
    ways = [
        LayerPass(block, transform, size, model.attention(layer), last=True)
        for layer, (block, transform) in enumerate(zip(parts.blocks, layers, strict=True))
    ]
    for layer, (how, layer_params) in enumerate(zip(ways, parts.split(model.params), strict=True)):
        if how not in shapes:
            states = jax.eval_shape(functools.partial(states_of, how.transform, size, layer))
            read_layer = functools.partial(_read_layer, how)
            shapes[how] = jax.eval_shape(read_layer, layer_params, states, None, x, positions)[-1]
    return tuple(shapes[how] for how in ways)


@compiled(static_argnums=(0, 1))
def _embed(
    embed: Callable, mesh: Mesh | None, params: Any, tokens: Array, positions: Array
) -> Array:
    """Returns the states that enter the first layer, for tokens `[B, T]` or in pieces."""
    x = embed(params, *(ids.reshape(ids.shape[0], -1) for ids in (tokens, positions)))
    return by_rows(x.reshape(*tokens.shape, -1), mesh)


@compiled(static_argnums=0, donate_argnums=(2, 4))
def _read_layer(
    how: LayerPass,
    layer_params: Any,
    into: Any,
    rows: Int[Array, " B"] | None,
    x: Float[Array, "B T C"],
    positions: Int[Array, "B T"],
    looking: Looking | None = None,
    joined: Reading | None = None,
) -> tuple[Array, Array, Looking | None, Cache]:
    """Reads a prompt, and what looks at it if it is a document, through one layer.

    Args:
      into: the states of a new cache, or the layer's cache.
      rows: the rows of the cache that the tokens are of; None: all of them.
      looking: how a probe looks at the document; None: the prompt is not one.
      joined: the reading that begins for all heads of a layer with a cache, in the place of `into`.
        It is not donated, since it grows.

    Returns:
      The states that leave the layer, their positions, what looks, and the cache.
    """
    (block, transform, size, attention, last), cache = how, joined or into
    pieces, length = looking or (None, None)
    if size is not None:
        cache = new_cache(transform, size, attention, into)
        cache = begin(cache, empty=True, document=length)
    if rows is not None:
        cache = take_rows(into, rows)
    if looking is not None and size is None:
        cache = begin_document(cache, length)
    mesh, ends = mesh_of_cache(cache), last and pieces is None
    x, cache = block(layer_params, x, positions, cache, layer=transform, phase="prompt", last=ends)
    if pieces is not None:

        def look(reading: Cache, piece: Pieces) -> tuple[Cache, Array]:
            y, reading = block(
                layer_params, *piece, reading, layer=transform, phase="probe", last=False
            )
            return reading, y

        cache, y = _by_piece(look, before_look(cache), pieces)
        looking = Looking(pieces._replace(tokens=by_rows(y, mesh)), length)  # pyright: ignore[reportArgumentType]  # documents have one
        cache = complete(cache) if last else cache
    if rows is not None:
        cache = put_rows(into, rows, cache)
    return by_rows(x, mesh), by_rows(positions, mesh), looking, placed(cache)


@compiled()
def _pass_on(
    x: Float[Array, "B T C"],
    positions: Int[Array, "B T"],
    cache: Cache,
    rows: Int[Array, " B"] | None,
) -> tuple[Float[Array, "B N C"], Int[Array, "B N"]]:
    """Drops states of tokens that a layer does not keep; `rows`: as in `_read_layer`."""
    kept = kept_tokens(cache if rows is None else take_rows(cache, rows))
    x, positions = (by_rows(y, mesh_of_cache(cache)) for y in pass_on(x, positions, kept))
    return x, positions


def _by_piece(
    look: Callable[[T, Any], tuple[T, Array]], readings: T, pieces: Any
) -> tuple[T, Array]:
    """Lets one piece after the other look at readings, compiled once.

    Args:
      look: returns readings and a result of them and a piece.
      pieces: arrays `[B, P, R, ...]`.

    Returns:
      The readings, and the results `[B, P, ...]`.
    """
    readings, out = jax.lax.scan(look, readings, jax.tree.map(lambda x: x.swapaxes(0, 1), pieces))
    return readings, out.swapaxes(0, 1)


@compiled(static_argnums=(0, 1, 2))
def _last_logits(
    head: Callable,
    mesh: Mesh | None,
    vocab_size: int,
    params: Any,
    x: Array,
    positions: Array,
    prompt_positions: Array,
) -> Float[Array, "B V"]:
    """Returns the logits of each row's newest token.

    Args:
      x, positions: states that leave the last layer; the newest token is always among them.
      prompt_positions: positions of all tokens of the prompt.
    """
    newest = prompt_positions.max(-1, keepdims=True)
    logits = head(params, states_at(x, positions, newest))
    return by_rows(logits_of_one(logits, vocab_size, tokens=1), mesh)


@compiled(static_argnums=(0, 1, 2), donate_argnums=5)
def _read_whole(
    layers: tuple[KVTransform, ...],
    size: CacheSize | None,
    last: bool,
    model: FunctionalModel,
    group: Group,
    into: tuple,
) -> tuple[Float[Array, "B V"], tuple[Cache, ...]]:
    """Reads a prompt through all layers in one call; `into` as in `_read_layer`, of all layers.

    All layers hold the whole prompt until all that looks at it has been read.

    Returns:
      The logits of each row's last token, and the caches.
    """
    (rows, tokens, positions, looking), caches = group, into
    pieces, length = looking or (None, None)
    if size is not None:
        caches = tuple(
            new_cache(transform, size, model.attention(layer), states)
            for layer, (transform, states) in enumerate(zip(layers, into, strict=True))
        )
        caches = begin(caches, empty=True, document=length)
    if rows is not None:
        caches = take_rows(into, rows)
    if looking is not None and size is None:
        caches = tuple(begin_document(cache, length) for cache in caches)
    newest = positions.argmax(-1)[:, None]
    logits, caches = model.apply(
        model.params, tokens, positions, caches, layers=layers, phase="prompt",
        last=last and pieces is None, logits_at=newest,
    )  # fmt: skip
    logits = logits_of_one(logits, model.vocab_size, tokens.shape[1], newest)
    if pieces is not None:

        def look(readings: tuple[Cache, ...], piece: Pieces) -> tuple[tuple[Cache, ...], Array]:
            ignored, readings = model.apply(
                model.params, *piece, readings, layers=layers, phase="probe", last=False,
                logits_at=jnp.zeros((len(piece.tokens), 1), jnp.int32),
            )  # fmt: skip
            return readings, ignored[:, :0]

        caches, _ = _by_piece(look, before_look(caches), pieces)
        caches = tuple(map(complete, caches)) if last else caches
    if rows is not None:
        caches = put_rows(into, rows, caches)
    return by_rows(logits, mesh_of_cache(caches[0])), tuple(map(placed, caches))
