"""Decode steps that are watched: what each attended to, and how much of the best it found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.attention.layer import Cache, layer_caches
from kvjax.cache.slots import KVCache
from kvjax.checks import check_count
from kvjax.compiled_code import compiled
from kvjax.evaluation.fidelity.fidelity import recall_rate
from kvjax.evaluation.fidelity.recording import (
    Record,
    attend_to_all,
    holds,
    record,
    recorded,
    unrecord,
)
from kvjax.generation.context import Context
from kvjax.generation.generate import generate, read
from kvjax.generation.model import FunctionalModel, LanguageModel, as_functional
from kvjax.generation.steps import decode_step, scan_steps
from kvjax.protocol import KVTransform, check_transform


class Seen(NamedTuple):
    """What a decode step of one row attended to.

    Args:
      token: the one that was fed.
      marks: by layer, whether each list of slots attended to each position, `[K, T]`, that of the
        token included; None in a layer in which nothing is selected.
      recall: by layer, of each KV head, the share of the n tokens with the most attention that were
        among the n that it attended to, `[H]`; None likewise.
    """

    token: int
    marks: tuple[Bool[np.ndarray, "K T"] | None, ...]
    recall: tuple[Float[np.ndarray, " H"] | None, ...]

    @property
    def mean_recall(self) -> float:
        """Over all heads of all layers in which something is selected."""
        return float(np.mean([recall for recall in self.recall if recall is not None]))


def watch(
    model: LanguageModel | FunctionalModel,
    prompt: Sequence[int],
    transform: KVTransform,
    steps: int,
) -> tuple[list[Seen], Context]:
    """Goes on from a prompt, greedily, and writes down what each step attends to.

    The most attended tokens, with which recall compares, are those of the step's own query over
    everything that the cache holds, as in `kvjax.evaluation.recall_rate`. To know them, the steps
    are run a second time, and read the whole cache.

    Args:
      model: as for `kvjax.generate`.
      prompt: token ids of one row.
      transform: a method that selects (`ClusterKV`, `Quest`, `InfiniGen`), or a composition of it.
        Layers of `HeadGroups` do what they do, and are not watched.
      steps: how many tokens.

    Returns:
      The steps, and the context after them.

    Raises:
      TypeError, ValueError: a transform that selects in no layer, no steps, and what `kvjax.read`
        raises.

    Example:
      >>> import kvjax
      >>> from kvjax import plot
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128))
      >>> tx = kvjax.Quest(budget=48, dense_layers=(0,))
      >>> steps, context = plot.watch(model, list(range(60)), tx, steps=2)
      >>> [step.marks[1].shape for step in steps], steps[0].marks[0]
      ([(2, 61), (2, 62)], None)
    """
    check_transform(transform, "watch")
    check_count("steps", steps, 1)
    context = read(model, [prompt], transform=transform, max_new=steps + 1)
    if not any(map(_selects, context.caches)):
        raise ValueError(
            "transform must select what a step attends to, by one method for all heads of a layer, "
            f"got {transform!r}"
        )
    result = generate(model, None, context=context, max_new_tokens=steps, end_tokens=())
    tokens = jnp.asarray(result.tokens[0], jnp.int32)
    looks = _replay(context.layers, as_functional(model), context.caches, tokens, context.length)
    looks = [None if look is None else tuple(map(np.asarray, look)) for look in looks]
    seen = []
    for number, token in enumerate(result.tokens[0]):
        length = len(prompt) + number + 1
        marks = (None if look is None else look[0][number, :, :length] for look in looks)
        recall = (None if look is None else look[1][number] for look in looks)
        seen.append(Seen(token, tuple(marks), tuple(recall)))
    return seen, result.context


def _selects(cache: Cache) -> bool:
    """Whether a layer selects what a step attends to, by one method for all heads."""
    parts = layer_caches(cache)
    return len(parts) == 1 and parts[0].kv.lists is not None


@compiled(static_argnums=0)
def _replay(
    layers: tuple[KVTransform, ...],
    model: FunctionalModel,
    caches: tuple[Cache, ...],
    tokens: Int[Array, " N"],
    length: Int[Array, " 1"],
) -> tuple[tuple[Bool[Array, "N K T"], Float[Array, "N H"]] | None, ...]:
    """Marks and recall of each step in each layer; None where nothing is selected."""
    recording = tuple(map(recorded, layers))

    def step(position, caches, token):
        caches = tuple(map(record, caches))
        _, caches = decode_step(model, recording, caches, token[None], position)
        caches, records = zip(*map(unrecord, caches), strict=True)
        looks = tuple(
            _look(cache.kv, of_layer[0], position) if _selects(cache) else None
            for cache, of_layer in zip(caches, records, strict=True)
        )
        return position + 1, caches, looks

    return scan_steps(step, length, caches, tokens)[2]


def _look(
    kv: KVCache, record: Record, position: Int[Array, " 1"]
) -> tuple[Bool[Array, "K T"], Float[Array, " H"]]:
    """Marks and recall of a step of one row."""
    _, attention = attend_to_all(kv, record, position)
    joined = holds(record.seen.reshape(*kv.shape[:2], -1), kv.max_tokens)
    in_slots = kv.live & jnp.take_along_axis(joined, jnp.maximum(kv.position, 0), axis=2)
    slots = jnp.where(in_slots, jax.lax.broadcasted_iota(jnp.int32, kv.shape, 2), -1)
    recall = recall_rate(attention, slots, in_slots.sum(-1, dtype=jnp.int32))
    return holds(record.seen, kv.max_tokens)[0], recall[0]
