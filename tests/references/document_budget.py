"""How methods that compress documents share their budget, of one row and one KV head."""

from __future__ import annotations

import math

import numpy as np

from .budgets import rows_budget
from .slots import Slots, best
from .snapkv import pool


class DocumentBudget:
    """Keeps the best tokens of documents, and the newest `room` tokens of all others.

    Sinks and the newest `window` tokens come first.  Of a document of T tokens,

        n = min(T, max(B(D) - K, b(T)))

    stay, where D counts the tokens of all documents so far and K what is held of earlier ones.

        a share f:   B(D) = min(D, max(floor(f D), sinks + window + 1)),
                     b(T) = max(floor(f T), window + 1)
        a number N:  B(D) = N,  b(T) = max(floor((N - sinks) T / D), window + 1)

    If K + n > B(max_prompt), the worst of the earlier documents' tokens go: those with the largest
    floor(16 log2(max score of its document / score)), of which 253 is the most that counts, the
    newest first. Sinks and windows come last.
    """

    def __init__(
        self, budget, sinks=4, window=0, room=256, *, max_prompt=128, attention=None
    ) -> None:
        self.budget, self.room = budget, room
        self.sinks, self.window, self.max_prompt = sinks, window, max_prompt
        self.options = attention or {}
        self.slots = Slots(**self.options)
        self.steps_below: dict[int, float] = {}  # of each token that is held of a document
        self.tokens = 0  # of all documents
        self.length, self.length_before = 0, 0  # the newest token may have been evicted

    @property
    def kept(self) -> list[int]:
        """Positions of the live tokens."""
        return self.slots.positions.tolist()

    def begin_prompt(self) -> None:
        """Notes how many tokens come before the prompt."""
        self.length_before = self.length

    def read(self, q, k, v, positions) -> np.ndarray:
        """q [G, T, D], k and v [T, D], positions [T] of a prompt or a step -> out [G, T, D]."""
        self.slots.append(k, v, positions, len(q))
        self.length = max(self.length, 1 + int(np.max(positions)))
        return self.slots.attend(q, positions)[0]

    def keep_best(self, score) -> None:
        """Ends a document, whose tokens have the scores `[S]`, of all live tokens."""
        slots, length = self.slots, self.length
        new = self.is_new()
        first = slots.positions < self.sinks
        first |= slots.positions >= length - self.window
        count, least = int(new.sum()), self.window + 1
        self.tokens += count
        if isinstance(self.budget, float):
            part = math.floor(self.budget * count)
        else:
            part = (self.budget - self.sinks) * count // self.tokens
        least = max(part, least)
        held = len(self.steps_below)
        n = min(count, max(self.slots_of_documents(self.tokens) - held, least))
        ranked = np.where(new, np.where(first, np.inf, score), -np.inf)
        with np.errstate(divide="ignore", invalid="ignore"):  # sinks alone may have 0
            steps = np.floor(16 * np.log2(score[new].max() / score))
        steps = np.where(first, -np.inf, np.minimum(steps, 253))
        earlier = sorted(self.steps_below, key=lambda p: (self.steps_below[p], p))
        earlier = earlier[: max(self.slots_of_documents(self.max_prompt) - n, 0)]
        kept = {p: self.steps_below[p] for p in earlier}
        others = self.others(~new & ~self.is_document())
        kept |= {int(slots.positions[i]): float(steps[i]) for i in best(ranked, n)}
        self.steps_below = kept
        slots.keep(sorted(others | set(np.flatnonzero(self.is_document()).tolist())))

    def relative_size(self) -> np.ndarray:
        """||v_s|| / median over the new document's tokens of ||v||."""
        size = np.linalg.norm(self.slots.values, axis=1)
        return size / np.median(size[self.is_new()])

    def pooled(self, score, kernel: int) -> np.ndarray:
        """The mean scores of tokens and their neighbours in the new document."""
        order = np.flatnonzero(self.is_new())
        order = order[np.argsort(self.slots.positions[order])]
        pooled = np.zeros_like(score)
        pooled[order] = pool(score[order], kernel, "avg")
        return pooled

    def is_new(self) -> np.ndarray:
        """Marks the tokens of the new document, among the live tokens."""
        return self.slots.positions >= self.length_before

    def end_question(self) -> None:
        """Keeps documents, and the newest of all other tokens."""
        old = set(np.flatnonzero(self.is_document()).tolist())
        self.slots.keep(sorted(old | self.others(~self.is_document())))

    def slots_of_documents(self, tokens: int) -> int:
        """Slots of documents that have so many tokens together."""
        return rows_budget(self.budget, tokens, self.sinks + self.window + 1)

    def is_document(self) -> np.ndarray:
        """Marks what is kept of documents, among the live tokens."""
        return np.isin(self.slots.positions, sorted(self.steps_below))

    def others(self, among: np.ndarray) -> set[int]:
        """The newest `room` of these tokens."""
        places = np.flatnonzero(among).tolist()
        return set(places[max(len(places) - self.room, 0) :])
