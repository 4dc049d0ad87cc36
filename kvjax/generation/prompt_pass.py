"""Reads a prompt layer by layer, with one compiled function for all layers that are alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kvjax.attention.all_heads import of_all_heads
from kvjax.attention.attend import begin_document, complete
from kvjax.attention.kept_tokens import kept_tokens
from kvjax.attention.layer import Cache, layer_caches
from kvjax.attention.parts import mesh_of_cache, placed
from kvjax.attention.prompt import before_look, begin
from kvjax.attention.rows import put_rows, take_rows
from kvjax.compiled_code import compiled, give_back_freed
from kvjax.devices import by_rows, mesh_of
from kvjax.generation.compiler import Compiler, Programs, Tracer
from kvjax.generation.documents import Pieces
from kvjax.generation.groups import Group, join_groups
from kvjax.generation.model import FunctionalModel
from kvjax.generation.new_caches import CacheSize, new_cache, states_of, states_of_layers
from kvjax.generation.observe import (
    NO_STATES,
    compress_layer,
    cut_heads,
    join_heads,
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


def read_prompt(
    model: FunctionalModel,
    layers: tuple[KVTransform, ...],
    groups: Sequence[Group],
    caches: tuple[Cache, ...] | CacheSize,
    compiler: Compiler,
    on_layer: Callable[[int], None] | None = None,
    last: bool = True,
    looking: Sequence[Pieces | None] | None = None,
    then: Then | None = None,
) -> tuple[Float[Array, "B V"], tuple[Cache, ...]]:
    """Returns the logits of each row's last token, and the caches that hold the prompt.

    A model that shows its parts is run layer by layer, so that memory holds the activations of one
    layer at a time, for the rows of one group. Any other model is called once for each group.

    All layers are traced before the first one runs, since each layer's cache is donated: a method
    that raises an error in a later layer leaves the caches as they are.

    Args:
      groups: the prompts. Rows in no group have no tokens: their caches stay, their logits are 0.
      caches: caches of earlier turns, which are donated; or the sizes of new ones.
      on_layer: is called with the number of each layer that has read the prompt, in order; for a
        model that does not show its parts, after the whole prompt.
      last: whether this ends the prompt, so that the caches are compressed; else they are readings,
        as in `attend`.
      looking: the tokens that look at each group's documents; None: the prompts are not documents,
        or no method has a probe.
      then: traces what comes after the prompt, given abstract logits and caches; None: nothing.
    """
    sizes: list[CacheSize | None] = [None] * len(groups)
    start: Any = [caches] * len(groups)
    if isinstance(caches, CacheSize):
        sizes = [caches._replace(batch=len(group.tokens)) for group in groups]
        for size in sizes:
            compiler.compile("the caches", ("states", size), states_of_layers, layers, size)
        start = [states_of_layers(layers, size) for size in sizes]
    document, pieces = looking is not None, looking or [None] * len(groups)
    read = functools.partial(_read_whole_model, model)
    if model.parts is not None:
        read = functools.partial(_read_by_layer, model, model.parts.split(model.params))
    read = functools.partial(read, layers, groups, sizes, start, last, document, pieces)

    def trace(tracer: Tracer) -> None:
        logits, new_caches = read(tracer)
        if then is not None:
            batch = layer_caches(new_caches)[0].kv.shape[0]
            shape = batch, *logits[0].shape[1:]
            then(tracer, jax.ShapeDtypeStruct(shape, logits[0].dtype), new_caches)

    compiler.trace(trace)
    is_long = sum(group.tokens.size for group in groups) >= LONG_PROMPT
    gives_back = is_long and model.parts is not None and jax.default_backend() == "cpu"

    def has_read(layer: int) -> None:
        if gives_back:
            give_back_freed()
        if on_layer is not None:
            on_layer(layer)

    logits, new_caches = read(compiler, has_read)
    if groups[0].rows is None:
        return logits[0], new_caches
    batch = layer_caches(new_caches)[0].kv.shape[0]
    rows = _rows_of(groups)
    zeros = jnp.zeros((batch, *logits[0].shape[1:]), logits[0].dtype)
    return zeros.at[rows].set(jnp.concatenate(logits)), new_caches


def _read_by_layer(
    model: FunctionalModel,
    params: Sequence[Any],
    layers: tuple[KVTransform, ...],
    groups: Sequence[Group],
    sizes: Sequence[CacheSize | None],
    start: Sequence[tuple],
    last: bool,
    document: bool,
    looking: Sequence[Pieces | None],
    compiler: Programs,
    on_layer: Callable[[int], None] | None = None,
) -> tuple[list[Array], tuple[Cache, ...]]:
    """Reads a prompt layer by layer, for a model that shows its parts.

    What looks at a document comes right after it in each layer, before it is compressed.

    Args:
      params: of each layer.
      document: whether the prompts are documents, for methods with a probe.
      sizes: the sizes of each group's new caches; None: the groups go on from caches of all rows.
      start: for each group, by layer, the states of its new caches, or the caches of all rows.

    Returns:
      The logits of each group, and the caches of all rows.
    """
    parts, mesh = model.parts, mesh_of(model.params)
    attention = tuple(map(model.attention, range(len(layers))))
    observers = observers_of(parts.blocks, attention, layers, sizes[0] if last else None)
    together: Sequence[tuple[int, int] | None] = [None] * len(layers)
    if sizes[0] is None and last:
        together = slots_together(layers, start[0], document)
    # For the next layer: states of a prompt, their positions, and states of what looks at it.
    passing, new_caches = [], []
    for group, pieces in zip(groups, looking, strict=True):
        states = [
            tokens if tokens is None else compiler.run(
                "the embedding", ("embed", tokens.tokens.shape), _embed,
                parts.embed, mesh, model.params, tokens.tokens, tokens.positions,
            )
            for tokens in (group, pieces)
        ]  # fmt: skip
        passing.append((states[0], group.positions, states[1]))
    for layer, layer_params in enumerate(params):
        block, transform, observer = parts.blocks[layer], layers[layer], observers[layer]
        group_caches, cache, slots = [], start[0][layer], together[layer]
        of_layer, groups_cache = f"layer {layer + 1} of {len(layers)}", cache
        if slots is not None:
            cache = join_heads(
                f"the heads of {of_layer}", transform, attention[layer], cache, slots, compiler
            )
            transform = of_all_heads(transform)
        for number, (group, size) in enumerate(zip(groups, sizes, strict=True)):
            x, positions, x_looking = passing[number]
            pieces = None if x_looking is None else (x_looking, looking[number].positions)
            # Each group of an earlier turn's cache writes its rows into the same cache.
            states_or_cache = cache if size is None else start[number][layer]
            rows = group.rows if size is None else None
            reads, reads_into = (transform, size, attention[layer], last, document), states_or_cache
            if observer is not None and size is not None:  # nothing is written after the prompt
                reads = observer, size._replace(max_new=0), attention[layer], False, document
                reads_into = NO_STATES
            *passing[number], cache = compiler.run(
                f"the prompt pass of {of_layer}",
                (block, reads, slots, x.shape, pieces is None), _read_layer,
                block, *reads, layer_params, x, positions, reads_into, rows, pieces,
            )  # fmt: skip
            if observer is not None:
                settings = f"the compression of {of_layer}", transform, size, attention[layer]
                cache = compress_layer(*settings, states_or_cache, cache, compiler)
            # Waiting bounds the memory: a layer that is queued has its arrays already.
            cache = jax.block_until_ready(cache)
            group_caches.append(cache)
        if slots is not None:
            program = f"the head groups of {of_layer}"
            settings = program, layers[layer], attention[layer]
            (all_heads,) = layer_caches(cache)
            cache = jax.block_until_ready(cut_heads(*settings, groups_cache, all_heads, compiler))
        new_caches.append(cache if sizes[0] is None else _together(groups, group_caches, compiler))
        if on_layer is not None:
            on_layer(layer)
    logits = [
        compiler.run(
            "the logits", ("head", x.shape), _last_logits,
            parts.head, mesh, model.params, x, positions, group.positions,
        )
        for group, (x, positions, _) in zip(groups, passing, strict=True)
    ]  # fmt: skip
    return logits, tuple(new_caches)


def _read_whole_model(
    model: FunctionalModel,
    layers: tuple[KVTransform, ...],
    groups: Sequence[Group],
    sizes: Sequence[CacheSize | None],
    start: Sequence[tuple],
    last: bool,
    document: bool,
    looking: Sequence[Pieces | None],
    compiler: Programs,
    on_layer: Callable[[int], None] | None = None,
) -> tuple[list[Array], tuple[Cache, ...]]:
    """Does what `_read_by_layer` does, for a model that does not show its parts."""
    logits, group_caches, caches = [], [], start[0]
    for number, (group, size) in enumerate(zip(groups, sizes, strict=True)):
        states_or_caches = caches if size is None else start[number]
        rows = group.rows if size is None else None
        group_logits, caches = jax.block_until_ready(
            compiler.run(
                "the prompt pass", ("prompt", group.tokens.shape), _read_whole,
                layers, size, last, document, model, group.tokens, group.positions,
                states_or_caches, rows, looking[number],
            )
        )  # fmt: skip
        logits.append(group_logits)
        group_caches.append(caches)
    if sizes[0] is not None:
        by_layer = map(list, zip(*group_caches, strict=True))
        caches = tuple(_together(groups, of_layer, compiler) for of_layer in by_layer)
    if on_layer is not None:
        for layer in range(len(layers)):
            on_layer(layer)
    return logits, caches


def _rows_of(groups: Sequence[Group]) -> Int[np.ndarray, " B"]:
    """Returns the rows of all groups, group by group."""
    return np.concatenate([np.asarray(group.rows) for group in groups])


def _together(groups: Sequence[Group], caches: list[Cache], compiler: Programs) -> Cache:
    """Joins the caches that the groups have of one layer into one cache."""
    if groups[0].rows is None:
        return caches[0]
    order = np.argsort(_rows_of(groups))
    shapes = tuple(x.shape for x in jax.tree.leaves(caches))
    return jax.block_until_ready(
        compiler.run(
            "one cache of all rows", (jax.tree.structure(caches), order.shape, shapes), join_groups,
            order, tuple(caches),
        )
    )  # fmt: skip


def cache_shapes(
    model: FunctionalModel, layers: tuple[KVTransform, ...], size: CacheSize
) -> tuple[Cache, ...]:
    """Returns the shapes of the caches that `read_prompt` makes; computes and compiles nothing.

    Layers that are alike share one value.
    """
    # A prompt of one token: the shapes of caches follow from `size` alone.
    tokens = positions = jax.ShapeDtypeStruct((size.batch, 1), jnp.int32)
    if model.parts is None:
        states = jax.eval_shape(functools.partial(states_of_layers, layers, size))
        read_whole = functools.partial(_read_whole, layers, size, True, False)
        return jax.eval_shape(read_whole, model, tokens, positions, states)[1]
    parts = model.parts
    embed = functools.partial(_embed, parts.embed, None)
    x = jax.eval_shape(embed, model.params, tokens, positions)
    attention = map(model.attention, range(len(layers)))
    keys = tuple(zip(parts.blocks, layers, attention, strict=True))  # equal for layers alike
    shapes: dict[Hashable, Cache] = {}
    for layer, (key, layer_params) in enumerate(zip(keys, parts.split(model.params), strict=True)):
        if key not in shapes:
            block, transform, options = key
            states = jax.eval_shape(functools.partial(states_of, transform, size, layer))
            read_layer = functools.partial(
                _read_layer, block, transform, size, options, True, False
            )
            shapes[key] = jax.eval_shape(read_layer, layer_params, x, positions, states)[-1]
    return tuple(shapes[key] for key in keys)


@compiled(static_argnums=(0, 1))
def _embed(
    embed: Callable, mesh: Mesh | None, params: Any, tokens: Array, positions: Array
) -> Array:
    """Returns the states that enter the first layer, for tokens `[B, T]` or in pieces."""
    x = embed(params, *(ids.reshape(ids.shape[0], -1) for ids in (tokens, positions)))
    return by_rows(x.reshape(*tokens.shape, -1), mesh)


@compiled(static_argnums=(0, 1, 2, 3, 4, 5), donate_argnums=9)
def _read_layer(
    block: Callable,
    transform: KVTransform,
    size: CacheSize | None,
    attention: AttentionOptions,
    last: bool,
    document: bool,
    layer_params: Any,
    x: Float[Array, "B T C"],
    positions: Int[Array, "B T"],
    states_or_cache: Cache | tuple,
    rows: Int[Array, " B"] | None = None,
    pieces: tuple[Float[Array, "B P R C"], Int[Array, "B P R"]] | None = None,
) -> tuple[Array, Array, Array | None, Cache]:
    """Reads a prompt, and what looks at it if it is a document, through one layer.

    Args:
      size: the sizes of a new cache; None: there is one.
      states_or_cache: with a `size`, the states of the new cache; else the layer's cache.
      rows: the rows of the cache that the tokens are of; None: all of them.
      pieces: states and positions of the tokens that look at the document; None: none do.

    Returns:
      The states that leave the layer, their positions, states of what looks, and the cache.
    """
    cache = states_or_cache
    if size is not None:
        cache = new_cache(transform, size, attention, states_or_cache)
        cache = begin(cache, empty=True, document=document)
    if rows is not None:
        cache = take_rows(states_or_cache, rows)
    if document and size is None:
        cache = begin_document(cache)
    mesh, x_looking = mesh_of_cache(cache), None
    ends = last and pieces is None
    x, cache = block(layer_params, x, positions, cache, layer=transform, phase="prompt", last=ends)
    if pieces is not None:

        def look(reading: Cache, piece: tuple[Array, Array]) -> tuple[Cache, Array]:
            y, reading = block(
                layer_params, *piece, reading, layer=transform, phase="probe", last=False
            )
            return reading, y

        cache, x_looking = _by_piece(look, before_look(cache), pieces)
        x_looking = by_rows(x_looking, mesh)
        cache = complete(cache) if last else cache
    if drops_tokens(transform, cache):
        # A method such as PyramidInfer passes on only the tokens that it keeps in this layer.
        x, positions = pass_on(x, positions, kept_tokens(cache))
    if rows is not None:
        cache = put_rows(states_or_cache, rows, cache)
    return by_rows(x, mesh), by_rows(positions, mesh), x_looking, placed(cache)


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


@compiled(static_argnums=(0, 1))
def _last_logits(
    head: Callable,
    mesh: Mesh | None,
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
    return by_rows(head(params, states_at(x, positions, newest))[:, -1], mesh)


@compiled(static_argnums=(0, 1, 2, 3), donate_argnums=7)
def _read_whole(
    layers: tuple[KVTransform, ...],
    size: CacheSize | None,
    last: bool,
    document: bool,
    model: FunctionalModel,
    tokens: Array,
    positions: Array,
    states_or_caches: tuple,
    rows: Int[Array, " B"] | None = None,
    pieces: Pieces | None = None,
) -> tuple[Float[Array, "B V"], tuple[Cache, ...]]:
    """Reads a prompt through all layers in one call; `size` and `rows` as in `_read_layer`.

    All layers hold the whole prompt until all that looks at it has been read.

    Returns:
      The logits of each row's last token, and the caches.
    """
    caches = states_or_caches
    if size is not None:
        caches = tuple(
            new_cache(transform, size, model.attention(layer), states)
            for layer, (transform, states) in enumerate(zip(layers, states_or_caches, strict=True))
        )
        caches = begin(caches, empty=True, document=document)
    if rows is not None:
        caches = take_rows(states_or_caches, rows)
    if document and size is None:
        caches = tuple(map(begin_document, caches))
    logits, caches = model.apply(
        model.params, tokens, positions, caches,
        layers=layers, phase="prompt", last=last and pieces is None,
        logits_at=positions.argmax(-1)[:, None],
    )  # fmt: skip
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
        caches = put_rows(states_or_caches, rows, caches)
    return by_rows(logits[:, -1], mesh_of_cache(caches[0])), tuple(map(placed, caches))
