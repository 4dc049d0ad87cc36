"""KVzip: keeps the tokens of a document that its own repetition looks up (arXiv 2505.23416)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.budgets.budgets import most_slots
from kvjax.budgets.heads import HeadShares
from kvjax.cache.payload import take_slots, write_slots
from kvjax.cache.slots import KVCache
from kvjax.checks import check_count, check_flag
from kvjax.decisions import Keep, Retain
from kvjax.protocol import Card, Needs, Step
from kvjax.serialization import named
from kvjax.transforms.document_budget import DocumentBudget, document_slots, relative_size
from kvjax.transforms.kvzip.fit import fit
from kvjax.transforms.kvzip.repetition import QuerySample, Repetition
from kvjax.transforms.pooling import check_kernel, pool
from pallas_kernels import Queries, Seen, prompt_attention
from pallas_kernels.base.logits import visible_slots

# Of each head, so many times the budget are fitted. Memory and time of a fit grow with the square
# of its slots, so that the few heads that keep nearly all of their tokens would decide both.
MOST_FITTED = 4


@named("kvzip")
@dataclass(frozen=True)
class KVzip(DocumentBudget):
    """Keeps the document tokens that a repetition of the document attends to.

    The document is followed by an instruction to repeat it, and by itself once more. A token's
    score is the largest attention probability that it receives from any query of the repetition,
    over the query heads of its KV head, `max_{g,t} p[g, t, s]`. With `values`, it is multiplied by
    the size of the token's value relative to its head's, `‖v_s‖ / median_s ‖v_s‖`: sinks and full
    stops draw attention and carry nothing. Then each token gets the mean score of itself and its
    neighbours, `kernel` tokens in all: the digits of a number, say, stay or go together. The best
    `budget` tokens of each head stay. So what is kept serves any question that comes later.

    Nothing of the repetition is stored. What `kvjax.read` reads, and the first prompt of
    `kvjax.generate`, is a document; a further prompt of a context is one if `generate` is told so,
    and is compressed by itself. `DocumentBudget` has the rule, and what becomes of other prompts.

    Args:
      budget, sinks, window, room: as in `DocumentBudget`. The paper has no window.
      values: whether scores count the size of values; False in the paper.
      kernel: number of neighbouring tokens, odd, over which scores are averaged, with zeros beyond
        both ends of a document; 3. It is 1 in the paper, where each token has its own score.
      fit: whether the tokens that stay get masses and values for which attention over them is as
        close as possible to attention over the whole document; False, as in the paper. See
        `kvjax.transforms.kvzip.fit`. Queries of the repetition tell what attention is: those of
        every n-th token, of which there are up to 2,048, for all query heads of a KV head. Of heads
        that share a budget (`ByHead`), no more than four times the budget are fitted, the best
        tokens of each.
      piece: tokens of a piece in which a long document is repeated; 2,048, where the authors' code
        has 2,000. Pieces are shorter where the model has fewer positions behind the document.

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

    values: bool = True
    kernel: int = 3
    fit: bool = False
    piece: int = 2048

    card = Card(
        acts="prompt", paper="KVzip, arXiv 2505.23416", when="document",
        small={"sinks": 2, "window": 2, "room": 4}, unscored=("room", "fit"),
    )  # fmt: skip

    def __post_init__(self):
        super().__post_init__()
        for name in ("values", "fit"):
            check_flag(name, getattr(self, name))
        check_kernel(self.kernel)
        check_count("piece", self.piece, 1)

    @property
    def needs(self) -> Needs:
        """The document's repetition, with queries for the fit."""
        return Needs(probe=Repetition(self.piece, queries=self.fit), writes_values=self.fit)

    def on_prompt(self, cache: KVCache, state: Any, step: Step) -> tuple[Keep | Retain, Any]:
        """Keeps the best tokens of a document, fitted or as they are, or all of another prompt."""
        decision, state = super().on_prompt(cache, state, step)
        if self.fit and isinstance(decision, Keep):
            decision = self._fitted(decision, cache, step, document_slots(cache, step))
        return decision, state

    def scores(
        self, cache: KVCache, state: Any, step: Step, document: Bool[Array, "B H S"]
    ) -> Float[Array, "B H S"]:
        """Scores a document's tokens by what the repetition attends to, and by their values."""
        score = step.record.slots["received"]
        if self.values:
            score = score * relative_size(cache.v.read(), document)
        return pool(score[:, :, None], cache, document, self.kernel, "avg")[:, :, 0]

    def _fitted(
        self, keep: Keep, cache: KVCache, step: Step, document: Bool[Array, "B H S"]
    ) -> Keep:
        """Gives the kept tokens of a document the masses and values that stand for all of it."""
        batch, heads, slots = cache.shape
        q, positions, _ = QuerySample.of(step.record)
        q = q.reshape(batch, heads, -1, *q.shape[2:])
        options, values = step.options, cache.v.read()
        mass = jnp.where(document, cache.log_mass, -jnp.inf)
        out, lse = prompt_attention(
            Queries(q, positions), step.keys, values, Seen(mass, cache.position), options.mask,
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
            slots = Seen(mass, take_slots(cache.position, index))
            seen = visible_slots(slots, positions, options.window)
        k, v = take_slots(step.keys, index), take_slots(values, index)
        log_mass, v = fit(
            q, k, v, mass, out, lse, scale=options.scale, soft_cap=options.soft_cap, seen=seen,
            fitted=fitted,
        )  # fmt: skip
        return dataclasses.replace(
            keep, values=write_slots(values, kept, v),
            log_mass=write_slots(cache.log_mass, kept, log_mass),
        )  # fmt: skip
