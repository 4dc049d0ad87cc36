"""A document that was read once, of which the cache holds any tokens in any form.

The slots of the full cache stay, so that one program serves every budget and every choice of heads.
Real storage, such as the rectangles of `ByHead`, compiles a program for each of its layouts. Which
tokens stay, and what they become, is the same: `tests/evaluation/test_kept_documents.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import kvjax
from kvjax.attention.layer import Reading, layer_caches
from kvjax.attention.prompt import step_of
from kvjax.attention.resting import resize, rounded
from kvjax.budgets.profile import shares
from kvjax.cache.nbytes import nbytes
from kvjax.cache.slots import KVCache, Sizes
from kvjax.compiled_code import compiled
from kvjax.compose.chain import parts_of
from kvjax.decisions import Retain
from kvjax.evaluation import ReadOnce
from kvjax.generation.model import FunctionalModel
from kvjax.generation.new_caches import CacheSize, LayerStates, states_of_layers
from kvjax.generation.observe import compress_layer
from kvjax.kit import pytree_node
from kvjax.transforms.document_budget import DocumentBudget, document_slots

Scores = Float[np.ndarray, "N H S"]
Kept = Bool[np.ndarray, "N H S"]


@pytree_node
class Choice(NamedTuple):
    """State of `KeepChosen`.

    Args:
      stays: whether the token at a position stays, `[H, P]`; later positions are those of others.
    """

    stays: Bool[Array, "H P"]


@dataclass(frozen=True)
class KeepChosen(kvjax.KVTransform):
    """Keeps the tokens of which its state says that they stay, in the slots of the full cache."""

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, Choice]:
        """Lets every token stay."""
        return cache, Choice(jnp.ones((cache.shape[1], cache.max_prompt), bool))

    def on_prompt(
        self, cache: KVCache, state: Choice, step: kvjax.kit.Step
    ) -> tuple[Retain, Choice]:
        """Keeps the chosen tokens, and all at later positions."""
        at = jnp.clip(cache.position, 0, state.stays.shape[1] - 1)
        return Retain(jnp.take_along_axis(state.stays[None], at, axis=-1)), state


class ReadDocument(ReadOnce):
    """One document, read once for some methods that score the tokens of documents."""

    def scores(self, method: DocumentBudget) -> Scores:
        """Returns the scores of all tokens in all layers and KV heads, whatever the budget."""
        method = dataclasses.replace(method, budget=1.0)
        if method not in self._scored:
            self._scored[method] = self._scores(method)
        return self._scored[method]

    @functools.cached_property
    def _scored(self) -> dict[DocumentBudget, Scores]:
        """Scores by method: budgets share them."""
        return {}

    def _scores(self, method: DocumentBudget) -> Scores:
        needs = self._needs(method).probe
        reading = next(
            context.held for context in self._observed if context.transform.needs.probe == needs
        )
        tokens = len(self._prompts[0])
        return np.stack([np.asarray(_scores(method, layer))[:, :tokens] for layer in reading])

    def kept(self, chosen: Kept, form: kvjax.KVTransform | None = None) -> kvjax.Context:
        """Returns the document of which the chosen tokens stay.

        Args:
          chosen: by layer, KV head and token.
          form: how they are stored; None: as they are.
        """
        transform = KeepChosen() if form is None else kvjax.chain(KeepChosen(), form)
        layers = self._bind(transform)
        caches = []
        read, stays = self._observed[0], np.ones((*chosen.shape[:2], self._size.max_prompt), bool)
        stays[:, :, : chosen.shape[2]] = chosen
        states = states_of_layers(layers, self._size)
        for layer, reading in enumerate(read.held):
            ((state, heads),) = states[layer].parts
            choice = Choice(jnp.asarray(stays[layer]))
            state = choice if form is None else (choice, *state[1:])
            into = LayerStates(((state, heads),))
            attention = self._model.attention(layer)
            copied = jax.tree.map(jnp.copy, reading)  # compressing takes over its memory
            caches.append(compress_layer(layers[layer], self._size, attention, into, None, copied))
        about = dataclasses.replace(
            read, held=(), transform=transform, layers=layers, size=self._size
        )
        return dataclasses.replace(about.copy(), held=tuple(caches))


@compiled(static_argnums=0)
def _scores(method: DocumentBudget, reading: Reading) -> Float[Array, "H S"]:
    """Returns what a method scores the tokens of a layer's reading."""
    step = step_of(reading)
    document = document_slots(reading.kv, step)
    return method.scores(reading.kv, None, step, document)[0]


def chosen_by(transform: kvjax.KVTransform, scores: Scores) -> Kept:
    """Returns which tokens of a first document a composition keeps, from its method's scores.

    Args:
      transform: a `DocumentBudget` with a share, a chain with one, or `ByHead` of either, with its
        profile.
      scores: those of the method.
    """
    method, tokens = method_of(transform), scores.shape[-1]
    slots = slots_of(transform, scores.shape)
    ranked = np.where(np.arange(tokens) < method.sinks, np.inf, scores)
    ranked[:, :, tokens - method.window :] = np.inf
    rank = np.argsort(np.argsort(-ranked, axis=-1, kind="stable"), axis=-1)
    return rank < slots[..., None]


def slots_of(transform: kvjax.KVTransform, shape: tuple[int, int, int]) -> Int[np.ndarray, "N H"]:
    """Returns how many tokens a composition keeps in each head, of `[layers, heads, tokens]`."""
    method = method_of(transform)
    each = np.full(shape[:2], method.budget)
    if isinstance(transform, kvjax.ByHead):
        profile: Any = transform.profile
        each = shares(profile.table, method.budget, transform.safeguard)
    return np.maximum(np.floor(each * shape[2] + 1e-9).astype(int), method.minimum)


def bytes_at_rest(
    model: FunctionalModel, transform: kvjax.KVTransform, tokens: int, dtype: str = "bfloat16"
) -> int:
    """Returns the bytes of a context that holds a document in a composition's own storage.

    They are those of `Context.nbytes` after `kvjax.read`, from shapes.
    """
    layers = kvjax.bind(transform, model.num_layers, model.windows, tokens + 1)
    size = CacheSize.of(model, 1, tokens, 1, dtype, tokens + 1)
    live = np.full((model.num_layers, model.kv_heads), tokens)
    if method_of(transform) is not None:
        live = slots_of(transform, (*live.shape, tokens))
    total = 0
    for number, layer in enumerate(layers):
        cache = jax.eval_shape(functools.partial(size.cache, layer, number))
        parts, of_parts = layer_caches(cache), [range(model.kv_heads)]
        if isinstance(layer, kvjax.HeadGroups):
            places = layer.order[number]
            of_parts = [[places[head] for head in heads] for heads, _ in layer.groups]
        taken = (live[number, list(heads)].max() for heads in of_parts)
        sizes = (
            Sizes(min(rounded(min(int(most), part.kv.slots)), part.kv.slots), 1, 1)
            for most, part in zip(taken, parts, strict=True)
        )
        total += nbytes(jax.eval_shape(functools.partial(resize, sizes=tuple(sizes)), cache))
    return total


def method_of(transform: kvjax.KVTransform) -> DocumentBudget | None:
    """Returns the method of a composition that scores documents; None: there is none."""
    if isinstance(transform, kvjax.ByHead):
        return transform.method
    methods = [part for part in parts_of(transform) if isinstance(part, DocumentBudget)]
    return methods[0] if methods else None


def form_of(transform: kvjax.KVTransform) -> kvjax.KVTransform | None:
    """Returns how a composition stores what its method keeps; None: as it is."""
    base = transform.base if isinstance(transform, kvjax.ByHead) else transform
    forms = [part for part in parts_of(base) if not isinstance(part, DocumentBudget)]
    return kvjax.chain(*forms) if forms else None
