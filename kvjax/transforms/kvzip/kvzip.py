"""KVzip: keeps the tokens of a document that its own repetition looks up (arXiv 2505.23416)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8

from kvjax.budgets.budgets import Budget, check_budget, most_slots, rows_budget
from kvjax.budgets.heads import HeadShares
from kvjax.budgets.layers import Table
from kvjax.cache.payload import take_slots, write_slots
from kvjax.cache.selection import evictable, keep_best, newest
from kvjax.cache.slots import KVCache
from kvjax.checks import check_count, check_flag
from kvjax.decisions import Keep, Retain
from kvjax.protocol import Card, Extent, Needs, Step
from kvjax.serialization import pytree_node
from kvjax.transforms.held_budget import PromptBudget
from kvjax.transforms.kvzip.fit import fit
from kvjax.transforms.pooling import check_kernel, pool
from pallas_kernels import prompt_attention
from pallas_kernels.base.logits import visible_slots

# Column of how important a token is for its document (`_importance`): 255 for sinks and windows, 0
# for tokens of no document. It takes a byte for each slot, as a mark alone would.
DOCUMENT = "document"
STAYS = 255
STEPS = 16  # of importance, for each factor of two between scores
# Of each head, so many times the budget are fitted. Memory and time of a fit grow with the square
# of its slots, so that the few heads that keep nearly all of their tokens would decide both.
MOST_FITTED = 4


@pytree_node
class KVzipState(NamedTuple):
    """What `KVzip` knows beside the slots.

    Args:
      table: budgets of the layer, as in `PromptBudget`.
      tokens: tokens of all documents of a row so far, evicted ones included.
    """

    table: Table
    tokens: Int[Array, " B"]


@dataclass(frozen=True)
class KVzip(PromptBudget):
    """Keeps the document tokens that a repetition of the document attends to.

    The document is followed by an instruction to repeat it, and by itself once more. A token's
    score is the largest attention probability that it receives from any query of the repetition,
    over the query heads of its KV head, `max_{g,t} p[g, t, s]`. With `values`, it is multiplied by
    the size of the token's value relative to its head's, `‖v_s‖ / median_s ‖v_s‖`: sinks and full
    stops draw attention and carry nothing. Then each token gets the mean score of itself and its
    neighbours, `kernel` tokens in all: the digits of a number, say, stay or go together. The best
    `budget` tokens of each head stay. So what is kept serves any question that comes later.

    Nothing of the repetition is stored. What `kvjax.read` reads, and the first prompt of
    `kvjax.generate`, is repeated. A further document of a context is compressed by itself. Of a
    document of T tokens, a head keeps

        n = min(T, max(B(D) − K, b(T)))

    tokens, where D is the number of tokens of all documents so far, this one included, and K the
    number that the head holds of earlier documents. With a share f, `B(D) = min(D, max(⌊f·D⌋, sinks
    + window + 1))` and `b(T) = max(⌊f·T⌋, window + 1)`; with a number, `B(D) = budget` and `b(T) =
    window + 1`. What was kept before stays, unless K + n is more than `B(max_prompt)`, the slots
    that there are for documents: then the tokens of earlier documents with the lowest scores go,
    each score taken relative to the highest one of its document, in steps of 1/16 of a factor of
    two. Sinks and windows are the last to go.

    Prompts that are not repeated, such as questions, stay whole beside the documents, and so do
    answers. They have `room` slots between turns; if there are more of them, the oldest go.
    `kvjax.generate` refuses a turn that is not repeated and has more than `room` tokens.

    Args:
      budget: slots kept of documents per KV head, sinks and window included. A float is a share of
        the tokens of all documents so far. An int is for all documents of a context together:
        those that come later get what earlier ones have left, and `window + 1` at least.
      values: whether scores count the size of values; False in the paper.
      kernel: number of neighbouring tokens, odd, over which scores are averaged, with zeros beyond
        both ends of a document; 3. It is 1 in the paper, where each token has its own score.
      sinks: tokens at positions 0 … sinks − 1 that always stay; 4.
      window: newest tokens of each document that always stay; 0, as in the paper.
      room: slots for questions and answers of earlier turns; 256.
      fit: whether the tokens that stay get masses and values for which attention over them is as
        close as possible to attention over the whole document; False, as in the paper. See
        `kvjax.transforms.kvzip.fit`. Queries of the repetition tell what attention is: those of
        every n-th token, of which there are up to 2,048, for all query heads of a KV head. Of heads
        that share a budget (`ByHead`), no more than four times the budget are fitted, the best
        tokens of each.

    Raises:
      TypeError, ValueError: `budget` is no number, below `sinks + window + 1` or a share outside
        (0, 1]; a count is negative; an even kernel.

    Example:
      >>> import kvjax
      >>> kvjax.KVzip(budget=0.05).extent(kvjax.kit.Extent(prompt=4096, new=100)).total
      560

    References:
      Kim et al., KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, arXiv
      2505.23416; Fast KV Compaction via Attention Matching, arXiv 2602.16284, for `fit`.

    Deviations from the paper:
      Scores count the size of values (`values`) and the neighbours of a token (`kernel`), which
      keeps the needles of small models at much smaller budgets. Every head keeps the same number
      of tokens; `kvjax.ByHead` shares a budget among heads, as the paper does for each document
      anew. A repetition attends to the document as it is in all layers, and to its own piece.
      Where a long document is repeated in pieces, the probabilities of a query are over all that
      it attends to, and a token's score is the largest from any piece; in the authors' code, each
      piece scores the part that it repeats, by probabilities over the system prompt, that part and
      the piece. There the system prompt stays whole; here it counts as a part of the document.
      With `fit`, these queries have not seen either what earlier layers have lost, and each
      document is fitted by itself: masses and values of what was kept before stay.
    """

    budget: Budget
    values: bool = True
    kernel: int = 3
    sinks: int = 4
    window: int = 0
    room: int = 256
    fit: bool = False

    card = Card(
        acts="prompt", paper="KVzip, arXiv 2505.23416", when="facts",
        small={"sinks": 2, "window": 2, "room": 4}, unscored=("room", "fit"),
    )  # fmt: skip
    minimum = property(lambda self: self.sinks + self.window + 1)  # the smallest workable budget

    def __post_init__(self):
        for name in ("values", "fit"):
            check_flag(name, getattr(self, name))
        check_kernel(self.kernel)
        for name in ("sinks", "window", "room"):
            check_count(name, getattr(self, name), 0)
        check_budget(self.budget, self.minimum, "sinks + window + 1")

    @property
    def needs(self) -> Needs:
        """The document's repetition, and its queries for the fit."""
        return Needs(repetition=True, repetition_queries=self.fit, writes_values=self.fit)

    def extent(self, extent: Extent) -> Extent:
        """Bounds documents to the budget; questions have `room`, and new tokens come on top."""
        documents = most_slots(self.budget, extent.longest_prompt, self.minimum)
        return extent.keep(documents, later=self.room)

    @property
    def longest_turn(self) -> int:
        """Tokens of a turn that is not repeated find `room` slots."""
        return self.room

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, KVzipState]:
        """Adds the column that marks tokens of documents, and makes the table of budgets."""
        unmarked = jnp.zeros(cache.shape, jnp.uint8)
        cache = cache.with_column(DOCUMENT, unmarked, fill=0, merge="keep")
        cache, table = super().init(cache, layer)
        return cache, KVzipState(table, jnp.zeros_like(cache.length))

    def on_prompt(
        self, cache: KVCache, state: KVzipState, step: Step
    ) -> tuple[Keep | Retain, KVzipState]:
        """Keeps the best tokens of a document, or all of a prompt that was not repeated."""
        live, mark = evictable(cache), cache.column(DOCUMENT)
        before = live & (mark > 0)
        if step.repetition is None:
            return Retain(before | self._newest_others(cache, live & (mark == 0))), state
        new = live & (cache.position >= step.length_before[:, None, None])
        tokens = cache.length - step.length_before  # T
        total = state.tokens + tokens  # D
        slots = self._slots(total, cache, state.table) - before.sum(-1)
        slots = jnp.maximum(slots, self._least(tokens, cache, state.table))
        slots = jnp.minimum(slots, new.sum(-1))
        most = self._slots(jnp.full_like(tokens, cache.max_prompt), cache, state.table)
        importance = mark.astype(jnp.float32)
        before = keep_best(importance, before, cache.position, jnp.maximum(most - slots, 0))
        others = self._newest_others(cache, live & ~new & (mark == 0))
        stays = (cache.position < self.sinks) | newest(cache, self.window)
        score = self._score(cache, step, new)
        keep = Keep(
            slots + (before | others).sum(-1), jnp.where(new, score, -jnp.inf),
            always=before | others | (new & stays), newest=jnp.minimum(tokens, self.window),
            columns={DOCUMENT: jnp.where(new, _importance(score, new, stays), mark)},
        )  # fmt: skip
        state = state._replace(tokens=step.of_rows(total, state.tokens))
        return (self._fitted(keep, cache, step, new) if self.fit else keep), state

    def _slots(
        self, tokens: Int[Array, " B"], cache: KVCache, table: Table
    ) -> Int[Array, "B H"] | Int[Array, "B 1"]:
        """Returns B of the docstring: the slots of documents with so many tokens together."""
        slots = rows_budget(self.budget, tokens, cache.max_prompt, self.minimum, table)
        return slots.reshape(tokens.shape[0], -1)

    def _least(
        self, tokens: Int[Array, " B"], cache: KVCache, table: Table
    ) -> Int[Array, "B H"] | Int[Array, "B 1"]:
        """Returns b of the docstring: the fewest slots of one document of so many tokens."""
        budget, least = self.budget, self.window + 1
        if isinstance(budget, int | np.integer):
            return jnp.full((tokens.shape[0], 1), least)
        if isinstance(budget, HeadShares):
            budget = dataclasses.replace(budget, minimum=least)
        slots = rows_budget(budget, tokens, cache.max_prompt, least, table)
        return slots.reshape(tokens.shape[0], -1)

    def _score(
        self, cache: KVCache, step: Step, document: Bool[Array, "B H S"]
    ) -> Float[Array, "B H S"]:
        """Scores a document's tokens by what the repetition attends to, and by their values."""
        score = step.repetition
        if self.values:
            score = score * _relative_size(cache.v.read(), document)
        return pool(score[:, :, None], cache, document, self.kernel, "avg")[:, :, 0]

    def _fitted(
        self, keep: Keep, cache: KVCache, step: Step, document: Bool[Array, "B H S"]
    ) -> Keep:
        """Gives the kept tokens of a document the masses and values that stand for all of it."""
        batch, heads, slots = cache.shape
        q, positions = step.repetition_query, step.repetition_position
        q = q.reshape(batch, heads, -1, *q.shape[2:])
        options, values = step.options, cache.v.read()
        mass = jnp.where(document, cache.log_mass, -jnp.inf)
        out, lse = prompt_attention(
            q, step.keys, values, mass, positions, cache.position, **options.static,
            implementation=step.implementation,
        )  # fmt: skip
        # The fit's arrays have as many slots as a head of this cache can keep of documents.
        most = min(most_slots(self.budget, cache.max_prompt, self.minimum), slots)
        score = jnp.where(document & keep.kept(cache), keep.score, -jnp.inf)
        score, index = jax.lax.top_k(score, most)  # the best first
        kept = jnp.where(score > -jnp.inf, index, slots)
        fitted = None
        if isinstance(self.budget, HeadShares):
            share = MOST_FITTED * self.budget.budget
            most = min(most, int(share * cache.max_prompt) + 1)
            tokens = document.sum(-1, keepdims=True, dtype=jnp.float32)
            numbers = jnp.arange(1, most + 1, dtype=jnp.float32)
            fitted = numbers[None, None] <= share * tokens
        mass = jnp.where(kept < slots, take_slots(mass, index), -jnp.inf)
        seen = None
        if options.window is not None:
            seen = visible_slots(mass, take_slots(cache.position, index), positions, options.window)
        k, v = take_slots(step.keys, index), take_slots(values, index)
        log_mass, v = fit(
            q, k, v, mass, out, lse, scale=options.scale, soft_cap=options.soft_cap, seen=seen,
            fitted=fitted,
        )  # fmt: skip
        return dataclasses.replace(
            keep, values=write_slots(values, kept, v),
            log_mass=write_slots(cache.log_mass, kept, log_mass),
        )  # fmt: skip

    def _newest_others(self, cache: KVCache, others: Bool[Array, "B H S"]) -> Bool[Array, "B H S"]:
        """Returns the newest `room` of the tokens that are of no document."""
        room, age = jnp.full(cache.shape[:1], self.room), cache.position.astype(jnp.float32)
        return keep_best(age, others, cache.position, room)


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


def _relative_size(
    values: Float[Array, "B H S D"], document: Bool[Array, "B H S"]
) -> Float[Array, "B H S"]:
    """Returns `‖v_s‖ / median_s ‖v_s‖`, over the tokens of a document in each head."""
    size = jnp.linalg.norm(values.astype(jnp.float32), axis=-1)
    ascending = jnp.sort(jnp.where(document, size, jnp.inf), axis=-1)
    count = document.sum(-1, keepdims=True)
    middle = [jnp.take_along_axis(ascending, jnp.maximum(count - n, 0) // 2, -1) for n in (1, 0)]
    median = (middle[0] + middle[1]) / 2
    return jnp.where(document & (median > 0), size / jnp.maximum(median, 1e-30), 0.0)
