"""KVzip: keeps the tokens of a document that its own repetition looks up (arXiv 2505.23416)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Bool, Float

from kvjax.cache.slots import KVCache
from kvjax.checks import check_count, check_flag
from kvjax.protocol import Card, Needs, Step
from kvjax.serialization import named
from kvjax.transforms.document_budget import DocumentBudget, relative_size
from kvjax.transforms.kvzip.repetition import Repetition
from kvjax.transforms.pooling import check_kernel, pool


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
      piece: tokens of a piece in which a long document is repeated; 2,048, where the authors' code
        has 2,000. Pieces are shorter where the model has fewer positions behind the document.

    Raises:
      TypeError, ValueError: `budget` is not a number, below `sinks + window + 1` or a share outside
        (0, 1]; a count is negative; an even kernel.

    Example:
      >>> import kvjax
      >>> kvjax.KVzip(budget=0.05).extent(kvjax.kit.Extent(prompt=4096, new=100)).total
      560

    References:
      Kim et al., KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, arXiv
      2505.23416.

    Deviations from the paper:
      Scores count the size of values (`values`) and the neighbours of a token (`kernel`), which
      keeps the needles of small models at much smaller budgets. Every head keeps the same number
      of tokens; `kvjax.ByHead` shares a budget among heads, as the paper does for each document
      anew. A repetition attends to the document as it is in all layers, and to its own piece.
      Where a long document is repeated in pieces, the probabilities of a query are over all that
      it attends to, and a token's score is the largest from any piece; in the authors' code, each
      piece scores the part that it repeats, by probabilities over the system prompt, that part and
      the piece. There the system prompt stays whole; here it counts as a part of the document.
    """

    values: bool = True
    kernel: int = 3
    piece: int = 2048

    card = Card(
        acts="prompt", paper="KVzip, arXiv 2505.23416", when="document",
        small={"sinks": 2, "window": 2, "room": 4}, unscored=("room",),
    )  # fmt: skip

    def __post_init__(self):
        super().__post_init__()
        check_flag("values", self.values)
        check_kernel(self.kernel)
        check_count("piece", self.piece, 1)

    @property
    def needs(self) -> Needs:
        """The document's repetition."""
        return Needs(probe=Repetition(self.piece))

    def scores(
        self, cache: KVCache, state: Any, step: Step, document: Bool[Array, "B H S"]
    ) -> Float[Array, "B H S"]:
        """Scores a document's tokens by what the repetition attends to, and by their values."""
        score = step.record.slots["received"]
        if self.values:
            score = score * relative_size(cache.v.read(), document)
        return pool(score[:, :, None], cache, document, self.kernel, "avg")[:, :, 0]
