"""Reads prompts into contexts: the first turn and further ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax.attention.flush import flush, flush_interval
from kvjax.attention.layer import Cache
from kvjax.compiled_code import compiled
from kvjax.devices import put, put_by_rows
from kvjax.generation.compiler import Compiler, Programs, Tracer
from kvjax.generation.context import Context
from kvjax.generation.documents import Document, looked_at
from kvjax.generation.groups import grouped
from kvjax.generation.model import FunctionalModel
from kvjax.generation.new_caches import CacheSize
from kvjax.generation.prompt_checks import Rows, bucket, check_longest_turn
from kvjax.generation.prompt_pass import Then, read_prompt
from kvjax.protocol import KVTransform

# One layer at a time, so that layers whose caches are alike share the compiled code.
_flush_layer = compiled(static_argnums=1, donate_argnums=0)(flush)


def compile_flush(compiler: Programs, caches: tuple[Cache, ...], interval: int) -> None:
    """Compiles the flush of each layer, once for all layers whose caches are alike."""
    for cache in caches:
        compiler.compile("the flush", _flush_layer, cache, interval)


def flush_all(caches: tuple[Cache, ...], interval: int) -> tuple[Cache, ...]:
    """Flushes every layer's cache; the caches are donated."""
    return tuple(_flush_layer(cache, interval) for cache in caches)


class Start(NamedTuple):
    """Names what first prompts are read into.

    Args:
      transform: of all layers.
      layers: the transform of each layer, bound to it.
      size: of the caches.
      widths: the length that each prompt would be padded to alone.
    """

    transform: KVTransform
    layers: tuple[KVTransform, ...]
    size: CacheSize
    widths: Sequence[int]


def first_turn(
    model: FunctionalModel,
    prompts: Sequence[Sequence[int]],
    start: Start,
    compiler: Compiler,
    document: Document | None = None,
    last: bool = True,
    then: Then | None = None,
    whole: Int[np.ndarray, " B"] | None = None,
) -> Context:
    """Makes a context of new caches that hold these prompts.

    Args:
      document: as in `generate`; None: they are.
      whole: as in `looked_at`.
      last: whether the caches are compressed; else they are readings, as in `attend`.
      then: as in `read_prompt`.
    """
    transform, layers, size, widths = start
    groups = grouped(prompts, widths, layers, size.mesh)
    length = np.array([len(prompt) for prompt in prompts], np.int32)
    document = True if document is None else document
    groups = looked_at(groups, prompts, length, document, model, layers, whole)
    check_longest_turn(layers, size.max_prompt, size.max_new, length, document)
    logits, caches = read_prompt(model, layers, groups, size, None, compiler, last, then)
    return Context(
        held=caches,
        logits=logits,
        seen=put_by_rows(_tokens_of(prompts, model.vocab_size), size.mesh),
        # Two arrays of the same numbers: whoever donates a context donates every array once.
        length=put(length, size.mesh),
        prompt_tokens=put(length, size.mesh),
        new_tokens=put(np.zeros_like(length), size.mesh),
        waiting=put(np.int32(0), size.mesh),
        transform=transform,
        layers=layers,
        size=size,
        windows=model.windows,
    )


def _tokens_of(prompts: Rows, vocab_size: int) -> Bool[np.ndarray, "B V"]:
    """Marks the tokens of the vocabulary that each prompt has."""
    seen = np.zeros((len(prompts), vocab_size), bool)
    for row, prompt in zip(seen, prompts, strict=True):
        row[np.asarray(prompt or (), np.int64)] = True
    return seen


def further_turn(
    model: FunctionalModel,
    context: Context,
    prompts: Rows,
    buckets: Sequence[int] | None,
    compiler: Compiler,
    document: Document | None = None,
    last: bool = True,
    then: Then | None = None,
    whole: Int[np.ndarray, " B"] | None = None,
) -> Context:
    """Reads one more prompt of each row that has one, into the caches of a context.

    The context is awake, and donated: the returned one takes its memory over. Whatever a method
    raises, it raises before anything is computed, and the context then stays as it is.

    Args:
      prompts: one per row; None: the row takes no part.
      document: as in `generate`; None: they are not, but questions.
      whole: as in `looked_at`.
      last: whether the caches are compressed; else they are readings of all rows, as in `attend`.
      then: as in `read_prompt`.
    """
    rows = [np.asarray(row or (), np.int32) for row in prompts]
    count = np.array([row.size for row in rows], np.int32)
    widths = [bucket(row.size, None, buckets) if row.size else 0 for row in rows]
    length, mesh = np.asarray(context.length), context.size.mesh
    groups = grouped(rows, widths, context.layers, mesh, length)
    active = count > 0
    groups = looked_at(
        groups, rows, length + count, document or False, model, context.layers, whole
    )

    # A prompt's end is a flush of its rows. Rows without a prompt have not been flushed then, and
    # steps are counted for all rows together.
    interval = None if active.all() else flush_interval(context.held)

    def flush_and_then(tracer: Tracer, logits: Array, caches: tuple[Cache, ...]) -> None:
        if interval is not None:
            compile_flush(tracer, caches, interval)
        if then is not None:
            then(tracer, logits, caches)

    logits, caches = read_prompt(
        model, context.layers, groups, context.size, context.held, compiler, last, flush_and_then
    )
    if interval is not None:
        compile_flush(compiler, caches, interval)
        caches = flush_all(caches, interval)
    flushed = interval is not None or active.all()
    return dataclasses.replace(
        context,
        held=caches,
        logits=jnp.where(active[:, None], logits, context.logits),
        seen=context.seen | put_by_rows(_tokens_of(prompts, model.vocab_size), mesh),
        length=put(length + count, mesh),
        prompt_tokens=context.prompt_tokens + count,
        waiting=put(np.int32(0), mesh) if flushed else context.waiting,
    )
