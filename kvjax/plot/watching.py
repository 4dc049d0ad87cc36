"""Decode steps that are watched: what each attended to, and how much of the best it found."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from kvjax.attention.layer import layer_caches
from kvjax.budgets.budgets import check_count
from kvjax.cache.payload import write_slots
from kvjax.cache.slots import KVCache
from kvjax.compose.chain import Chain, chain, parts_of
from kvjax.compose.wrappers import HeadGroups
from kvjax.decisions import Decision
from kvjax.evaluation.fidelity.fidelity import recall_rate
from kvjax.generation.context import Context
from kvjax.generation.generate import generate, read
from kvjax.generation.model import FunctionalModel, LanguageModel
from kvjax.protocol import Full, KVTransform, State, Step, View, Wrapper, check_transform
from pallas_kernels import decode_attention
from pallas_kernels.attention.call import beside_sinks


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
        return float(np.mean([own for own in self.recall if own is not None]))


def watch(
    model: LanguageModel | FunctionalModel,
    prompt: Sequence[int],
    transform: KVTransform,
    steps: int,
) -> tuple[list[Seen], Context]:
    """Goes on from a prompt, greedily, and writes down what each step attends to.

    The most attended tokens, with which recall compares, are those of the step's own query over
    everything that the cache holds, as in `kvjax.evaluation.recall_rate`. To know them, every step
    reads the whole cache, so that it takes longer than without being watched.

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
    context = read(model, [prompt], transform=_Watched(transform), max_new=steps + 1)
    if all(_watching(cache) is None for cache in context.caches):
        raise ValueError(
            "transform must select what a step attends to, by one method for all heads of a layer, "
            f"got {transform!r}"
        )
    seen = []
    for _ in range(steps):
        result = generate(model, None, context=context, max_new_tokens=1, end_tokens=())
        context = result.context
        states = [_watching(cache) for cache in context.caches]
        length = int(context.length[0])
        seen.append(
            Seen(
                result.tokens[0][0],
                tuple(None if x is None else np.asarray(x.marks[0, :, :length]) for x in states),
                tuple(None if x is None else np.asarray(x.recall[0]) for x in states),
            )
        )
    return seen, context


class _Watching(NamedTuple):
    """The base's state, and of the last step: its query, what it attended to, and the recall."""

    base: State
    query: Float[Array, "B Q 1 D"]
    slots: Bool[Array, "B K S"]
    marks: Bool[Array, "B K T"]
    recall: Float[Array, "B H"]


@dataclasses.dataclass(frozen=True)
class _Watched(Wrapper):
    """A method that leaves what each step attends to in its state."""

    stage = property(lambda self: self.base.stage)

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """Around the last part of this layer's chain, which sees all that others have selected.

        The parts before it are carried out as they are without being watched. Head groups, whose
        caches are apart, are not watched.
        """
        bound = self.base.for_layer(layer, num_layers)
        if isinstance(bound, HeadGroups | Full):
            return bound
        *before, last = parts_of(bound)
        return chain(*before, _Watched(last))

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, _Watching]:
        """The base's, and no step yet."""
        cache, base = self.base.init(cache, layer)
        batch, heads, slots = cache.shape
        lists = heads if cache.lists is None else cache.lists[0]
        return cache, _Watching(
            base,
            jnp.zeros((batch, heads * cache.group, 1, cache.k.shape[3]), cache.k.dtype),
            jnp.zeros((batch, lists, slots), bool),
            jnp.zeros((batch, lists, cache.max_tokens), bool),
            jnp.zeros((batch, heads)),
        )

    def select(self, view: View, state: _Watching, query: Array) -> tuple[View, _Watching]:
        """What the base selects, written down."""
        view, state = super().select(view, state, query)
        seen = view.cache.live
        if view.index is not None:
            seen = _marked(jnp.zeros_like(state.slots), view.index)
        return view, state._replace(query=query.astype(state.query.dtype), slots=seen)

    def on_step(
        self, cache: KVCache, state: _Watching, step: Step
    ) -> tuple[Decision | None, _Watching]:
        """The base's decision, after what was attended to has been compared with the best."""
        batch, heads, slots = cache.shape
        position = jnp.repeat(cache.position, state.slots.shape[1] // heads, axis=1)
        marks = _marked(jnp.zeros_like(state.marks), jnp.where(state.slots, position, -1))
        attention = self._attention(cache, state.query, step)
        joined = state.slots.reshape(batch, heads, -1, slots).any(2)
        slot = jax.lax.broadcasted_iota(jnp.int32, cache.shape, 2)
        recall = recall_rate(
            attention, jnp.where(joined, slot, -1), joined.sum(-1, dtype=jnp.int32)
        )
        decision, state = super().on_step(cache, state, step)
        return decision, state._replace(marks=marks, recall=recall)

    def _attention(self, cache: KVCache, query: Array, step: Step) -> Float[Array, "B Q S"]:
        """What the step's query gives to everything that the cache holds."""
        batch, heads, slots = cache.shape
        # Methods that select go over keys that are rotated as they are stored.
        _, lse, attention = decode_attention(
            query.reshape(batch, heads, cache.group, 1, -1), cache.k.read(), cache.v.read(),
            cache.log_mass, cache.length[:, None] - 1, cache.position, probabilities=True,
            implementation=step.implementation, **step.logits.options,
        )  # fmt: skip
        _, attention = beside_sinks(step.logits.sinks, lse, attention)
        return attention.reshape(batch, -1, slots)


def _marked(marks: Bool[Array, "B K N"], index: Array) -> Bool[Array, "B K N"]:
    """With the entries of `index` marked; -1 is none."""
    index = jnp.where(index >= 0, index, marks.shape[2])
    return write_slots(marks, index, jnp.ones(index.shape, bool))


def _watching(cache: object) -> _Watching | None:
    """What a layer's cache has written down; None where nothing is selected."""
    parts = layer_caches(cache)
    if len(parts) > 1 or parts[0].kv.lists is None:
        return None
    state = parts[0].state[-1] if isinstance(parts[0].transform, Chain) else parts[0].state
    return state if isinstance(state, _Watching) else None
