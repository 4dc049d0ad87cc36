"""A document that was read once, of which the cache holds any tokens in any form.

The slots of the full cache stay, so that one program serves every budget and every choice of heads.
Real storage, such as the rectangles of `ByHead`, compiles a program for each of its layouts. Which
tokens stay, and what they become, is the same: `tests/evaluation/test_kept_documents.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import kvjax
from kvjax.attention.layer import Reading, RestSizes, layer_caches
from kvjax.attention.prompt import step_of
from kvjax.attention.resting import rest, rounded
from kvjax.budgets.budgets import slots_for
from kvjax.budgets.heads import slots_of_shares
from kvjax.budgets.profile import shares
from kvjax.cache.nbytes import nbytes
from kvjax.compiled_code import compiled
from kvjax.compose.chain import parts_of
from kvjax.evaluation import ReadOnce
from kvjax.generation.calibration import sample_of
from kvjax.generation.model import FunctionalModel, as_functional
from kvjax.generation.new_caches import CacheSize
from kvjax.models import from_pretrained, load_tokenizer
from kvjax.transforms.document_budget import DocumentBudget, document_slots

Scores = Float[np.ndarray, "N H S"]
Kept = Bool[np.ndarray, "N H S"]


class ReadDocument(ReadOnce):
    """One document, read once for some methods that score the tokens of documents."""

    @functools.cached_property
    def _scored(self) -> dict[DocumentBudget, Scores]:
        """Scores of all layers by method, which all of its budgets share."""
        return {}

    def readings(self, method: DocumentBudget) -> tuple[Any, ...]:
        """Returns the readings of all layers, with what the method's probe noted."""
        return self._observed_for(method).held

    def scores(self, method: DocumentBudget) -> Scores:
        """Returns the scores of all tokens in all layers and KV heads, whatever the budget."""
        method = dataclasses.replace(method, budget=1.0)
        if method not in self._scored:
            tokens, readings = len(self._prompts[0]), self.readings(method)
            scores = [np.asarray(_scores_of_layer(method, x))[:, :tokens] for x in readings]
            self._scored[method] = np.stack(scores)
        return self._scored[method]

    def kept_by(self, transform: kvjax.KVTransform) -> kvjax.Context:
        """Returns the document, awake, as a composition keeps it whose method scores documents."""
        chosen = chosen_by(transform, self.scores(method_of(transform)))
        return self.kept(chosen, form_of(transform))

    def kept(self, chosen: Kept, form: kvjax.KVTransform) -> kvjax.Context:
        """Returns the document, awake, of which the chosen tokens stay.

        Args:
          chosen: by layer, KV head and token.
          form: how they are stored.
        """
        observed = self._observed[0]
        others = self._size.max_prompt - chosen.shape[2]  # slots without a token
        stays = np.pad(chosen, ((0, 0), (0, 0), (0, others)))[:, None]
        held = tuple(map(_without_others, observed.held, stays))  # pyright: ignore[reportArgumentType]  # all are readings
        return self._compressed(form, dataclasses.replace(observed, held=held))


class Compositions:
    """A model, and compositions that keep documents with it, all of which share one reading.

    Args:
      model: folder or GGUF file of the model.
      sample: file of the text from which profiles are made.
      texts: the compositions.
      length, room, new: tokens of a document, of a question, and of an answer, at most.

    Attributes:
      model, tokenizer: what was loaded.
      transforms: of the texts, calibrated.
    """

    def __init__(
        self, model: str, sample: str, texts: Iterable[str], length: int, room: int, new: int
    ) -> None:
        self.model = as_functional(from_pretrained(model, dtype="float32"))
        self.tokenizer, self.length = load_tokenizer(model), length
        self._room, self._new = room, new
        text = self.tokenizer(Path(sample).read_text(), add_special_tokens=False).input_ids
        learnt_from = sample_of(text, self.model.max_positions)
        self.transforms = {
            text: kvjax.calibrated(text, self.model, learnt_from, document=self.tokenizer)
            for text in texts
        }

    def read(self, tokens: Sequence[int]) -> ReadDocument:
        """Reads a document once for all compositions."""
        transforms = self.transforms.values()
        read_for = dict.fromkeys(method_of(x) or x for x in transforms)
        return ReadDocument(
            self.model, [tokens], list(read_for), max_prompt=self.length + self._room,
            max_new=self._new, buckets=[self.length], document=self.tokenizer,
        )  # fmt: skip


@compiled(static_argnums=0)
def _scores_of_layer(method: DocumentBudget, reading: Reading) -> Float[Array, "H S"]:
    """Returns what a method scores the tokens of a layer's reading."""
    step = step_of(reading)
    document = document_slots(reading.kv, step)
    return method.scores(reading.kv, None, step, document)[0]


def _without_others(reading: Reading, stays: Bool[np.ndarray, "B H S"]) -> Reading:
    """Returns a layer's reading, of whose slots these stay."""
    cache = dataclasses.replace(reading.cache, kv=kvjax.kit.evict(reading.kv, jnp.asarray(stays)))
    return dataclasses.replace(reading, cache=cache)


def together(contexts: Sequence[kvjax.Context]) -> kvjax.Context:
    """Returns contexts of one row each as the rows of one; their shapes are equal."""
    rows = contexts[0].repeat(len(contexts))

    def joined(row: jax.Array, *each: jax.Array) -> jax.Array:
        return row if row.shape == each[0].shape else jnp.concatenate(each)

    held = jax.tree.map(joined, rows.held, *(context.held for context in contexts))
    return dataclasses.replace(rows, held=held)


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
    if not isinstance(transform, kvjax.ByHead):
        return np.full(shape[:2], slots_for(method.budget, shape[2], method.minimum))
    profile: Any = transform.profile
    each = shares(profile.table, method.budget, transform.safeguard)
    return slots_of_shares(each, shape[2], method.minimum)


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
            of_parts = [heads[number] for heads in layer.heads]
        counts = [
            np.minimum(live[number, list(heads)], part.kv.slots)
            for heads, part in zip(of_parts, parts, strict=True)
        ]
        sizes = tuple(
            RestSizes(
                min(rounded(int(kept.max())), part.kv.slots), 1, 1,
                min(rounded(int(kept.sum())), part.kv.position.size),
            )
            for kept, part in zip(counts, parts, strict=True)
        )  # fmt: skip
        total += nbytes(rest.eval_shape(cache, sizes))
    return total


def method_of(transform: kvjax.KVTransform) -> Any:
    """Returns the method of a composition that scores documents; None: there is none."""
    if isinstance(transform, kvjax.ByHead):
        return transform.method
    methods = [part for part in parts_of(transform) if isinstance(part, DocumentBudget)]
    return methods[0] if methods else None


def form_of(transform: kvjax.KVTransform) -> kvjax.KVTransform:
    """Returns how a composition stores what its method keeps."""
    base = transform.base if isinstance(transform, kvjax.ByHead) else transform
    return kvjax.chain(*(part for part in parts_of(base) if part != method_of(transform)))
