"""Watched decode steps: the positions that each attended to, and its recall."""

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
    """Positions that a decode step of one row attended to, and its recall; `watch` makes it.

    T is the number of positions so far, and K that of the lists in which a layer's slots are
    selected: one per KV head, or one per query head.

    Args:
      token: token that was fed.
      marks: for each layer, whether each list of slots attended to each position, `[K, T]`, the
        token's own included; None in layers that select nothing.
      recall: for each layer, the recall of each KV head, `[H]`. A head that attended to n tokens
        has as its recall the share of the n most attended tokens that were among them. None in
        layers that select nothing.

    Example:
      >>> import numpy as np
      >>> from kvjax.plot import Seen
      >>> seen = Seen(token=7, marks=(None, np.array([[True, False, True], [False, True, True]])),
      ...             recall=(None, np.array([0.5, 1.0])))
      >>> [np.flatnonzero(head).tolist() for head in seen.marks[1]], seen.mean_recall
      ([[0, 2], [1, 2]], 0.75)
    """

    token: int
    marks: tuple[Bool[np.ndarray, "K T"] | None, ...]
    recall: tuple[Float[np.ndarray, " H"] | None, ...]

    @property
    def mean_recall(self) -> float:
        """Mean recall over all heads, in the layers that select."""
        return float(np.mean([recall for recall in self.recall if recall is not None]))


def watch(
    model: LanguageModel | FunctionalModel,
    prompt: Sequence[int],
    transform: KVTransform,
    steps: int,
) -> tuple[list[Seen], Context]:
    """Continues a prompt greedily, and records the positions that each step attends to.

    Recall is that of `kvjax.evaluation.recall_rate`. It compares with the attention of the step's
    own query over everything that the cache holds. For that, the steps are run a second time and
    read the full cache.

    Args:
      model: as for `kvjax.generate`.
      prompt: token ids of one row.
      transform: a method that selects (`ClusterKV`, `Quest`, `InfiniGen`), or a composition of it.
        Layers of `HeadGroups` work as usual and are not watched.
      steps: number of new tokens.

    Returns:
      The steps, and the context after them.

    Raises:
      TypeError, ValueError: the transform selects in no layer, `steps` is below 1; or as
        `kvjax.read`.

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
    if not any(map(_selects, context.held)):
        raise ValueError(
            "transform must select what a step attends to, by one method for all heads of a layer, "
            f"got {transform!r}"
        )
    result = generate(model, None, context=context, max_new_tokens=steps, end_tokens=())
    tokens = jnp.asarray(result.tokens[0], jnp.int32)
    # `generate` keeps the caches of the context, which the tokens are now fed to again.
    looks = _replay(context.layers, as_functional(model), context.caches, tokens, context.length)
    looks = [None if look is None else tuple(map(np.asarray, look)) for look in looks]
    watched = []
    for number, token in enumerate(result.tokens[0]):
        length = len(prompt) + number + 1  # a step sees its own token too
        marks = (None if look is None else look[0][number, :, :length] for look in looks)
        recall = (None if look is None else look[1][number] for look in looks)
        watched.append(Seen(token, tuple(marks), tuple(recall)))
    return watched, result.context  # pyright: ignore[reportReturnType]  # `generate` was given one


def _selects(cache: Cache) -> bool:
    """Returns whether a layer selects slots for each step, by one method for all heads."""
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
    """Repeats decode steps; returns marks and recall of each layer, None if it selects nothing."""
    recording = tuple(map(recorded, layers))

    def step(position, caches, token):
        caches = tuple(map(record, caches))
        _, caches = decode_step(model, recording, caches, token[None], position)
        caches, records = zip(*map(unrecord, caches), strict=True)
        looks = tuple(
            _look(cache.kv, layer_records[0], position) if _selects(cache) else None
            for cache, layer_records in zip(caches, records, strict=True)
        )
        return position + 1, caches, looks

    return scan_steps(step, length, caches, tokens)[2]


def _look(
    kv: KVCache, record: Record, position: Int[Array, " 1"]
) -> tuple[Bool[Array, "K T"], Float[Array, " H"]]:
    """Returns marks and recall of a step of one row."""
    _, attention = attend_to_all(kv, record, position)
    # Recall is per KV head, and so joins the lists of a head's query heads.
    joined = holds(record.seen.reshape(*kv.shape[:2], -1), kv.max_tokens)
    in_slots = kv.live & jnp.take_along_axis(joined, jnp.maximum(kv.position, 0), axis=2)
    slots = jnp.where(in_slots, jax.lax.broadcasted_iota(jnp.int32, kv.shape, 2), -1)
    recall = recall_rate(attention, slots, in_slots.sum(-1, dtype=jnp.int32))
    return holds(record.seen, kv.max_tokens)[0], recall[0]
