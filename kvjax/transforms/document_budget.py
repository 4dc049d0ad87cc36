"""Base class of methods that compress documents, and keep all other prompts beside them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8

from kvjax.budgets.budgets import Budget, check_budget, most_slots, rows_budget
from kvjax.budgets.heads import HeadShares
from kvjax.budgets.layers import Table
from kvjax.cache.record import Record
from kvjax.cache.selection import evictable, keep_best, newest
from kvjax.cache.slots import KVCache
from kvjax.checks import check_count
from kvjax.compose.walks import map_methods
from kvjax.decisions import Keep, Retain
from kvjax.protocol import (
    Card,
    Extent,
    KVTransform,
    MethodHeads,
    Needs,
    Probe,
    Step,
    check_transform,
)
from kvjax.serialization import pytree_node
from kvjax.transforms.held_budget import PromptBudget

# Column of how important a token is for its document (`_importance`): 255 for sinks and windows, 0
# for tokens of no document. It takes a byte for each slot, as a mark alone would.
DOCUMENT = "document"
STAYS = 255
STEPS = 16  # of importance, for each factor of two between scores


@dataclass(frozen=True)
class Received(Probe):
    """Notes the largest attention probability that each slot receives from what looks.

    The record has `"received"`, over all queries and the query heads of the slot's KV head, `[B, H,
    S]` float32. A subclass has `pieces`, which makes the tokens that look.

    Example:
      >>> import kvjax, numpy as np
      >>> class Again(kvjax.kit.Received):  # the document itself, in one piece
      ...     def pieces(self, documents, width, asking):
      ...         pieces = np.full((len(documents), 1, width), -1)
      ...         for row, document in zip(pieces, documents):
      ...             row[0, : len(document)] = document
      ...         return pieces
      >>> Again().pieces([[1, 2, 3], [4, 5]], width=4, asking=None).tolist()
      [[[1, 2, 3, -1]], [[4, 5, -1, -1]]]
      >>> needs = kvjax.kit.Needs(probe=Again())  # of a method that reads step.record
    """

    def empty(self, cache: KVCache) -> Record:
        """Makes the record of a document that nothing has looked at."""
        return Record(slots={"received": jnp.zeros(cache.shape, jnp.float32)})

    def look(self, record: Record, received: Float[Array, "B H G S"]) -> Record:
        """Notes the probabilities of a piece."""
        received = jnp.maximum(received.max(2), record.slots["received"])
        return dataclasses.replace(record, slots={"received": received})


@pytree_node
class Documents(NamedTuple):
    """State of a `DocumentBudget`; a method that has more has a NamedTuple with these fields too.

    Args:
      table: budgets of the layer, as in `PromptBudget`.
      tokens: tokens of all documents of a row so far, evicted ones included.

    Example:
      >>> from typing import NamedTuple
      >>> import jax, kvjax
      >>> @kvjax.kit.pytree_node
      ... class WithWeights(NamedTuple):  # the state of a method whose layers have weights
      ...     table: tuple
      ...     tokens: jax.Array
      ...     weights: jax.Array
      >>> state = kvjax.init_cache(kvjax.KVzip(budget=16), batch=2, kv_heads=1, head_dim=4,
      ...                          max_prompt=64, max_new=0).state
      >>> WithWeights(*state, weights=jax.numpy.ones(4)).tokens.tolist()
      [0, 0]
    """

    table: Table
    tokens: Int[Array, " B"]


@dataclass(frozen=True)
class DocumentBudget(PromptBudget):
    """Base class of methods that compress documents, and keep all other prompts beside them.

    A subclass scores a document's tokens in `scores`, and has a probe. A
    head keeps the best n of the T tokens of a document:

        n = min(T, max(B(D) − K, b(T))),

    where D is the number of tokens of all documents so far, this one included, and K the number
    that the head holds of earlier documents. With a share f, `B(D) = min(D, max(⌊f·D⌋, sinks
    + window + 1))` and `b(T) = max(⌊f·T⌋, window + 1)`; with a number, `B(D) = budget` and
    `b(T) = max(⌊(budget − sinks)·T / D⌋, window + 1)`. Tokens of earlier documents
    stay, unless K + n is more than `B(max_prompt)`, the slots that there are for documents: then
    those with the lowest scores go, each score taken relative to the highest one of its document,
    in steps of 1/16 of a factor of two. Sinks and windows are the last to go. A document
    that is read in pieces (`kvjax.read(piece=)`) is as many documents.

    Other prompts, such as questions, stay whole beside the documents, and so do answers. They have
    `room` slots between turns; if there are more of them, the oldest go. `kvjax.generate` refuses a
    turn that is not a document and has more than `room` tokens.

    Args:
      budget: slots kept of documents per KV head, sinks and window included. A float is a share of
        the tokens of all documents so far. An int is for all documents of a context together, and
        each has a part of it by its tokens: those that come later take theirs from earlier ones.
      sinks: tokens at positions 0 … sinks − 1 that always stay; 4.
      window: newest tokens of each document that always stay; 0.
      room: slots for questions and answers of earlier turns; 256.

    Raises:
      TypeError, ValueError: `budget` is not a number, below `sinks + window + 1` or a share outside
        (0, 1]; a count is negative.

    Example:
      >>> from dataclasses import dataclass
      >>> import jax, jax.numpy as jnp, kvjax
      >>> @dataclass(frozen=True)
      ... class LargeValues(kvjax.kit.DocumentBudget):
      ...     def scores(self, cache, state, step, document):
      ...         return jnp.linalg.norm(cache.v.read().astype(jnp.float32), axis=-1)
      >>> cache = kvjax.init_cache(LargeValues(budget=3, sinks=1), batch=1, kv_heads=1, head_dim=4,
      ...                          max_prompt=6, max_new=0)
      >>> rows = jnp.broadcast_to(jnp.arange(6.0)[:, None], (1, 1, 6, 4))
      >>> attend = jax.jit(kvjax.attend, static_argnames="phase")
      >>> _, cache = attend(kvjax.begin_document(cache), rows, rows, rows, jnp.arange(6)[None],
      ...                   phase="prompt")
      >>> cache.kv.position[cache.kv.live].tolist()
      [0, 4, 5]
    """

    budget: Budget
    sinks: int = 4
    window: int = 0
    room: int = 256

    card = Card(acts="prompt", unscored=("room",))
    minimum = property(lambda self: self.sinks + self.window + 1)  # the smallest workable budget

    def __post_init__(self):
        for name in ("sinks", "window", "room"):
            check_count(name, getattr(self, name), 0)
        check_budget(self.budget, self.minimum, "sinks + window + 1")

    @property
    def needs(self) -> Needs:
        """A probe, which tells documents from other prompts."""
        return Needs(probe=Probe())

    def scores(
        self, cache: KVCache, state: Any, step: Step, document: Bool[Array, "B H S"]
    ) -> Float[Array, "B H S"]:
        """Returns a score above 0 for each token of a document; the tokens with the highest stay.

        Args:
          cache, state, step: as in `on_prompt`.
          document: the slots of its tokens; scores of other slots are not looked at.
        """
        raise NotImplementedError

    def extent(self, extent: Extent) -> Extent:
        """Bounds documents to the budget; questions have `room`, and new tokens come on top."""
        documents = most_slots(self.budget, extent.longest_prompt, self.minimum)
        return extent.keep(documents, turn=self.room)

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, Any]:
        """Adds the column that marks tokens of documents, and makes the table of budgets."""
        unmarked = jnp.zeros(cache.shape, jnp.uint8)
        cache = cache.with_column(DOCUMENT, unmarked, fill=0, merge="keep")
        cache, table = super().init(cache, layer)
        return cache, Documents(table, jnp.zeros_like(cache.length))

    def on_prompt(self, cache: KVCache, state: Any, step: Step) -> tuple[Keep | Retain, Any]:
        """Keeps the best tokens of a document, or all of another prompt."""
        live, mark = evictable(cache), cache.column(DOCUMENT)
        before = live & (mark > 0)
        if step.record is None:
            return Retain(before | self._newest_others(cache, live & (mark == 0))), state
        new = document_slots(cache, step)
        tokens = cache.length - step.length_before  # T
        total = state.tokens + tokens  # D
        slots = self._slots(total, cache, state.table) - before.sum(-1, dtype=jnp.int32)
        slots = jnp.maximum(slots, self._least(tokens, total, cache, state.table))
        slots = jnp.minimum(slots, new.sum(-1, dtype=jnp.int32))
        most = self._slots(jnp.full_like(tokens, cache.max_prompt), cache, state.table)
        importance = mark.astype(jnp.float32)
        before = keep_best(importance, before, cache.position, jnp.maximum(most - slots, 0))
        others = self._newest_others(cache, live & ~new & (mark == 0))
        stays = (cache.position < self.sinks) | newest(cache, self.window)
        score = self.scores(cache, state, step, new)
        if score.shape != cache.shape:
            raise ValueError(
                f"{type(self).__name__}.scores must return a score for each slot, "
                f"{list(cache.shape)}, got the shape {list(score.shape)}"
            )
        keep = Keep(
            slots + (before | others).sum(-1, dtype=jnp.int32), jnp.where(new, score, -jnp.inf),
            always=before | others | (new & stays), newest=jnp.minimum(tokens, self.window),
            columns={DOCUMENT: jnp.where(new, _importance(score, new, stays), mark)},
        )  # fmt: skip
        state = state._replace(tokens=step.of_rows(total, state.tokens))
        return keep, state

    def _slots(
        self, tokens: Int[Array, " B"], cache: KVCache, table: Table
    ) -> Int[Array, "B H"] | Int[Array, "B 1"]:
        """Returns B of the docstring: the slots of documents with so many tokens together."""
        slots = rows_budget(self.budget, tokens, cache.max_prompt, self.minimum, table)
        return slots.reshape(tokens.shape[0], -1)

    def _least(
        self, tokens: Int[Array, " B"], total: Int[Array, " B"], cache: KVCache, table: Table
    ) -> Int[Array, "B H"] | Int[Array, "B 1"]:
        """Returns b of the docstring: the fewest slots of one document of so many tokens.

        Args:
          total: tokens of all documents.
        """
        budget, least = self.budget, self.window + 1
        if isinstance(budget, int | np.integer):
            part = _part_of(int(budget) - self.sinks, tokens, total)
            return jnp.maximum(part, least)[:, None]
        if isinstance(budget, HeadShares):
            budget = dataclasses.replace(budget, minimum=least)
        slots = rows_budget(budget, tokens, cache.max_prompt, least, table)
        return slots.reshape(tokens.shape[0], -1)

    def _newest_others(self, cache: KVCache, others: Bool[Array, "B H S"]) -> Bool[Array, "B H S"]:
        """Returns the newest `room` of the tokens that are of no document."""
        room, age = jnp.full(cache.shape[:1], self.room), cache.position.astype(jnp.float32)
        return keep_best(age, others, cache.position, room)


def _part_of(slots: int, tokens: Int[Array, " B"], total: Int[Array, " B"]) -> Int[Array, " B"]:
    """Returns `⌊slots · tokens / total⌋`, whose product may have more than 32 bits."""
    total = jnp.maximum(total, 1)
    about = jnp.float32(slots) * tokens.astype(jnp.float32) / total.astype(jnp.float32)
    part = about.astype(jnp.int32)
    # The rest of the division is small, so that integers that wrap around have it exactly.
    rest = jnp.int32(slots) * tokens - part * total
    return part + (rest >= total).astype(jnp.int32) - (rest < 0).astype(jnp.int32)


def document_slots(cache: KVCache, step: Step) -> Bool[Array, "B H S"]:
    """Returns the slots of the tokens of a document that has just been read."""
    return evictable(cache) & (cache.position >= step.length_before[:, None, None])


def relative_size(
    values: Float[Array, "B H S D"], document: Bool[Array, "B H S"]
) -> Float[Array, "B H S"]:
    """Returns `‖v_s‖ / median_s ‖v_s‖`, over the tokens of a document in each head."""
    size = jnp.linalg.norm(values.astype(jnp.float32), axis=-1)
    ascending = jnp.sort(jnp.where(document, size, jnp.inf), axis=-1)
    count = document.sum(-1, keepdims=True, dtype=jnp.int32)
    middle = [jnp.take_along_axis(ascending, jnp.maximum(count - n, 0) // 2, -1) for n in (1, 0)]
    median = (middle[0] + middle[1]) / 2
    return jnp.where(document & (median > 0), size / jnp.maximum(median, 1e-30), 0.0)


def _importance(
    score: Float[Array, "B H S"], document: Bool[Array, "B H S"], stays: Bool[Array, "B H S"]
) -> UInt8[Array, "B H S"]:
    """Returns what the column `DOCUMENT` holds of a document's tokens.

    It is 254 for the highest score, one less for each step below it, and 1 at least.
    """
    score = jnp.maximum(score, 1e-30)
    highest = jnp.where(document, score, 1e-30).max(-1, keepdims=True)
    steps = jnp.floor(STEPS * jnp.log2(highest / score))
    importance = jnp.clip(STAYS - 1 - steps, 1, STAYS - 1)
    return jnp.where(stays, STAYS, importance).astype(jnp.uint8)


def with_room_at_most(transform: KVTransform, tokens: int) -> KVTransform:
    """Returns the composition in which the `room` of every method is at most so many tokens.

    Args:
      transform: any.
      tokens: most tokens of all prompts that come after the document.

    Raises:
      TypeError, ValueError: `transform` is not a transform, or `tokens` is below 1.

    Example:
      >>> import kvjax
      >>> from kvjax.transforms.document_budget import with_room_at_most
      >>> tx = kvjax.chain(kvjax.KVzip(0.2), kvjax.Quantize())
      >>> kvjax.unparse(with_room_at_most(tx, tokens=64))
      'chain(kvzip(budget=0.2, room=64), quantize)'
    """
    check_transform(transform, "with_room_at_most")
    check_count("tokens", tokens, 1)
    return map_methods(_AtMostRoom(tokens), transform)


@dataclass(frozen=True)
class _AtMostRoom:
    """Gives a method no more room than this; a function for `map_methods`."""

    tokens: int

    def __call__(self, method: KVTransform, heads: MethodHeads) -> KVTransform:
        if not isinstance(method, DocumentBudget):
            return method
        return dataclasses.replace(method, room=min(method.room, self.tokens))
