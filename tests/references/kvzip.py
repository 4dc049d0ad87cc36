"""KVzip (arXiv 2505.23416): what a document's repetition attends to, of one row and KV head."""

from __future__ import annotations

import numpy as np

from .document_budget import DocumentBudget
from .repetition import repetition


class KVzip(DocumentBudget):
    """Keeps the best tokens of documents, and the newest `room` tokens of all others.

        score[s] = max over pieces, query heads g and queries t of p[g, t, s]

    times ||v_s|| / median over the new document's tokens of ||v||, with `values`.  A token then
    has the mean score of itself and its (kernel - 1) / 2 neighbours on each side in the document,
    where there are zeros before its first and behind its last token.
    """

    def __init__(self, budget, values=True, kernel=3, **arguments) -> None:
        super().__init__(budget, **arguments)
        self.values, self.kernel = values, kernel

    def end_document(self, pieces) -> list[np.ndarray]:
        """Looks at the pieces of the repetition, of which it returns the outputs, and decides."""
        prompt = self.slots.keys, self.slots.values, self.slots.positions
        outs, score = repetition(prompt, pieces, **self.options)
        if self.values:
            score = score * self.relative_size()
        self.keep_best(self.pooled(score, self.kernel))
        return outs
