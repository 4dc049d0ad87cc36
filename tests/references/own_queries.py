"""OwnQueries: what a document uses and what it would quote, of one row and one KV head."""

from __future__ import annotations

import numpy as np

from .document_budget import DocumentBudget
from .rope import rope


class OwnQueries(DocumentBudget):
    """Keeps the best tokens of documents, and the newest `room` tokens of all others.

    Token s of a document of L tokens, counted from 0, has

        used[s] = sum over queries t of mean over query heads g of p[g, t, s] / max(L - s, 32)

    where p is the attention in which the document is read.  The document is cut into pieces of
    `piece` tokens.  Query t of a piece is turned by L more positions to q' (of a document that is
    read as several prompts by the tokens of all of them), and

        x[g, t] = q'_t . k_j for every j that is a sink or in the piece, and
                  q_t . k_j  for every j <= t in the piece

    are the logits of a softmax, scaled, capped and with the attention's own sinks as all others.
    quoted[s] is the largest probability over g and t of the piece of s that its first column has,
    and 0 if s is a sink.  Both are multiplied by ||v_s|| / median ||v||, and

        score[s] = quoted[s] ** (1 - use) * used[s] ** use

    inv_freq: frequencies by which queries are turned; None: they stay as they are.
    """

    def __init__(self, budget, use=0.5, piece=256, *, inv_freq=None, **arguments) -> None:
        super().__init__(budget, **arguments)
        self.use, self.piece, self.inv_freq = use, piece, inv_freq
        self.queries: dict[int, np.ndarray] = {}  # [G, D] of each token that has been read
        self.received: dict[int, float] = {}

    def begin_prompt(self) -> None:
        """Forgets what earlier prompts have looked at."""
        super().begin_prompt()
        self.queries, self.received = {}, {}

    def read(self, q, k, v, positions) -> np.ndarray:
        """q [G, T, D], k and v [T, D], positions [T] of a prompt or a step -> out [G, T, D]."""
        out = super().read(q, k, v, positions)
        _, probabilities = self.slots.attend(q, positions)
        for p, total in zip(self.slots.positions, probabilities.mean(0).sum(0), strict=True):
            self.received[int(p)] = self.received.get(int(p), 0.0) + total
        self.queries |= {int(p): q[:, t] for t, p in enumerate(positions) if p >= 0}
        return out

    def end_document(self, whole: int = 0) -> None:
        """Decides which tokens stay, of a prompt of a document that has `whole` tokens."""
        self.keep_best(self.scores(whole))

    def scores(self, whole: int) -> np.ndarray:
        """Scores [S] of the live tokens, of which those of the document count."""
        document = self.slots.positions[self.is_new()].tolist()
        used, quoted = (dict.fromkeys(self.slots.positions.tolist(), 0.0) for _ in range(2))
        for s, position in enumerate(document):
            used[position] = self.received[position] / max(len(document) - s, 32)
        for start in range(0, len(document), self.piece):
            quoted |= self.quoted(document[start : start + self.piece], whole or len(document))
        used, quoted = (np.array(list(x.values())) * self.relative_size() for x in (used, quoted))
        return quoted ** (1 - self.use) * used**self.use

    def quoted(self, piece: list[int], length: int) -> dict[int, float]:
        """The largest probability of each token of a piece, where `length` tokens are repeated."""
        keys = {token.position: token.key for token in self.slots.tokens}
        sinks = [p for p in keys if p < self.sinks]
        looked_up = [*piece, *(p for p in sinks if p not in piece)]
        largest = np.zeros(len(piece))
        for count, position in enumerate(piece, 1):
            query = np.asarray(self.queries[position], np.float64)
            turned = query
            if self.inv_freq is not None:
                turned = rope(query, np.full(len(query), length), self.inv_freq)
            first = turned @ np.array([keys[p] for p in looked_up]).T
            second = query @ np.array([keys[p] for p in piece[:count]]).T
            p = self.softmax(np.concatenate((first, second), axis=-1))
            largest = np.maximum(largest, p[:, : len(piece)].max(0))
        return {p: 0.0 if p in sinks else x for p, x in zip(piece, largest, strict=True)}

    def softmax(self, products: np.ndarray) -> np.ndarray:
        """Probabilities [G, N] of products of queries and keys, as the attention makes them."""
        scale, cap = self.options.get("scale"), self.options.get("soft_cap")
        x = products * (self.slots.keys.shape[1] ** -0.5 if scale is None else scale)
        x = x if cap is None else cap * np.tanh(x / cap)
        weights, learned = np.exp(x), self.options.get("sinks")
        other = 0.0 if learned is None else np.exp(np.asarray(learned, np.float64))[:, None]
        return weights / (weights.sum(-1, keepdims=True) + other)
