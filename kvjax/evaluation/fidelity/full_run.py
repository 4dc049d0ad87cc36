"""A run with the full cache, recorded layer by layer: inputs, outputs and probabilities."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.attention.layer import Cache, Reading
from kvjax.attention.prompt import compress
from kvjax.cache.rope import Rope
from kvjax.compiled_code import compiled
from kvjax.compose.bind import bind
from kvjax.compose.wrappers import Everywhere, by_head_groups
from kvjax.generation.compiler import Compiler
from kvjax.generation.context import Context
from kvjax.generation.documents import Document
from kvjax.generation.model import FunctionalModel
from kvjax.generation.observe import Observe
from kvjax.generation.read_once import ReadOnce
from kvjax.generation.steps import decode_step
from kvjax.generation.turns import further_turn
from kvjax.protocol import AttentionOptions, KVTransform, Needs

from .recording import Record, attend_to_all, record, recorded, unrecord


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Turn:
    """A layer's inputs for the questions after a prompt; rows are padded on the right.

    Args:
      query, key, value: those of the questions' tokens; rotated if `rope` is None.
      position: positions of the tokens, -1 = padding.
      rope: rotary embedding of query and key.
      options: options of the attention.
    """

    query: Float[Array, "B Q T D"]
    key: Float[Array, "B H T D"]
    value: Float[Array, "B H T D"]
    position: Int[Array, "B T"]
    rope: Rope | None
    options: AttentionOptions


class Truth(NamedTuple):
    """A decode step of one layer in the run with the full cache.

    Args:
      record: inputs of the step.
      output: output of attention.
      attention: probability of each token position, per query head.
    """

    record: Record
    output: Float[Array, "B Q 1 D"]
    attention: Float[Array, "B Q L"]


class FullRun:
    """A recorded run of a model: it reads prompts once and decodes greedily with the full cache.

    One prompt pass fills the caches of several methods, see `kvjax.evaluation.ReadOnce`.

    Args:
      model: the model.
      prompts: token ids of each row.
      transforms: the methods.
      new_tokens: number of recorded decode steps.
      questions: token ids of each row that follow the prompt as a further turn; None for no turn.
      document: as in `kvjax.read`.

    Attributes:
      start: position of each row's first new token.
      turns: inputs of each layer for the questions; None without questions.
      truth: decode steps of each layer; the leading axis counts new tokens.
    """

    def __init__(
        self,
        model: FunctionalModel,
        prompts: Sequence[Sequence[int]],
        transforms: Sequence[KVTransform],
        *,
        new_tokens: int,
        questions: Sequence[Sequence[int]] | None = None,
        document: Document | None = None,
    ) -> None:
        longest = max(map(len, prompts))
        question_length = 0 if questions is None else max(map(len, questions))
        bind_options = model.num_layers, model.windows, longest + question_length + new_tokens
        layers = (layer for tx in transforms for layer in bind(tx, *bind_options))
        # If one method keeps keys unrotated, all methods are fed with unrotated queries and keys.
        unrotated = any(
            part.needs.unrotated_keys for layer in layers for part in by_head_groups(layer)
        )
        # `Everywhere` avoids ring buffers in layers with a window, so that a token's slot is its
        # position. The query window keeps the questions' queries for `turns`.
        full = Everywhere(Observe(Needs(query_window=question_length, unrotated_keys=unrotated)))
        self._once = ReadOnce(
            model, prompts, [full, *transforms], max_prompt=longest + question_length,
            max_new=new_tokens, buckets=[longest], document=document,
        )  # fmt: skip
        context = self._once.context(full).awake()
        self.turns: tuple[Turn, ...] | None = None
        if questions is not None:
            context = further_turn(
                model, context, questions, [question_length], Compiler(), last=False
            )
            self.turns = tuple(map(_turn, context.held))
            context = dataclasses.replace(context, held=_compressed(context.held))
        self.start = context.length
        self.truth = _new_tokens(
            context.layers, new_tokens, model, context.logits, context.length, context.held
        )

    def context(self, transform: KVTransform) -> Context:
        """Returns the prompts, without questions, in caches that a method has compressed."""
        return self._once.context(transform)


@compiled(donate_argnums=0)
def _compressed(readings: tuple[Reading, ...]) -> tuple[Cache, ...]:
    """Returns the caches of all layers."""
    return tuple(map(compress, readings))


@compiled()
def _turn(reading: Reading) -> Turn:
    """Returns the inputs that a layer had for its last prompt."""
    kv, queries = reading.kv, reading.queries
    # The query window has its free places first; rows of a turn have their padding last.
    order = jnp.argsort(queries.position < 0, axis=1, stable=True)
    position = jnp.take_along_axis(queries.position, order, axis=1)
    query = jnp.take_along_axis(queries.query, order[:, None, :, None], axis=2)
    rope = reading.rope if kv.unrotated_keys else None
    if rope is not None:
        # The window holds rotated queries: a rotation by the negative angle undoes that.
        inverse = dataclasses.replace(rope, inv_freq=-rope.inv_freq, factor=1 / rope.factor)
        query = inverse.rotate(query, position)
    places = jnp.maximum(position, 0)[:, None]
    slots = jnp.broadcast_to(places, (len(position), kv.shape[1], position.shape[1]))
    return Turn(query, kv.k.read(slots), kv.v.read(slots), position, rope, reading.options)


@compiled(static_argnums=(0, 1))
def _new_tokens(
    layers: tuple[KVTransform, ...],
    new_tokens: int,
    model: FunctionalModel,
    logits,
    position,
    caches,
) -> tuple[Truth, ...]:
    """Decodes greedily with the full cache; returns each layer's steps along a leading axis."""
    recording = tuple(map(recorded, layers))

    def step(carry, _):
        logits, position, caches = carry
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        caches = tuple(map(record, caches))
        logits, caches = decode_step(model, recording, caches, token, position)
        caches, records = zip(*map(unrecord, caches), strict=True)
        # Rows are padded on the right and nothing is evicted: a token's slot is its position.
        truth = tuple(
            Truth(step_record, *attend_to_all(cache.kv, step_record, position))
            for cache, (step_record,) in zip(caches, records, strict=True)
        )
        return (logits, position + 1, caches), truth

    return jax.lax.scan(step, (logits, position, caches), length=new_tokens)[1]
