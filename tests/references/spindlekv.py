"""SpindleKV: deep layers keep fewer tokens, and shallow ones a codebook of what is alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from .attention import softmax_attention
from .codebook import Codebook
from .slots import best

Rope = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""[..., T, D] and positions [T] -> [..., T, D]."""


def _exact(number: float | Fraction) -> Fraction:
    """0.1 is a tenth: whole products are whole."""
    return Fraction(number).limit_denominator(10**6)


def context_ratio(reserve: float, length: int, window: int) -> Fraction:
    """r_c = (r L - W) / (L - W), for L > W."""
    return (_exact(reserve) * length - window) / (length - window)


def layer_ratio(
    mean: Fraction, layer: int, num_layers: int, beta: float | Fraction = 0.05
) -> Fraction:
    """r_c(layer) of a mean r_c (equations 5 and 6).

        alpha = (1 + beta) / 2
        beta  < r_c <= alpha:   layer 0  min(1, 2 r_c - beta)    the last  beta
        alpha < r_c <= 1:       layer 0  1                       the last  2 r_c - 1

    linear between; in a single layer r_c.  Everywhere max(r_c, 0) for r_c <= beta.  (The paper
    prints 1 - 2 r_c, which is negative.)
    """
    mean, beta = Fraction(mean), _exact(beta)
    if mean <= beta or num_layers == 1:
        return max(mean, Fraction(0))
    if mean <= (1 + beta) / 2:
        first, last = min(Fraction(1), 2 * mean - beta), beta
    else:
        first, last = Fraction(1), 2 * mean - 1
    return first + (last - first) * Fraction(layer, num_layers - 1)


def layer_tokens(
    reserve: float, length: int, window: int, layer: int, num_layers: int, beta: float = 0.05
) -> int:
    """k = floor(r_c(layer) * (L - W)): tokens kept before the window (equation 7).  0 if L <= W."""
    if length <= window:
        return 0
    mean = context_ratio(reserve, length, window)
    return math.floor(layer_ratio(mean, layer, num_layers, beta) * (length - window))


class LayerBudgetEviction:
    """The eviction alone: one row and one layer with all its heads.

    At a prompt's end every deciding head keeps its W newest live tokens and, of the others, the k
    best by (equations 2 and 3, L - a by positions: L is 1 + the newest)

        ac[a] = sum over the last W queries of the prompt of p[t, a] / (L - a)

    unfold: the query heads decide, each for itself.  Else the KV heads do, by the mean over their
    query heads.  Nothing is evicted while decoding.

    A further prompt compresses everything live as one; a row without a query of it is left alone.
    rope: rotates queries and keys, which come unrotated; None for no rotation.  Further options are
    those of `softmax_attention`.
    """

    def __init__(
        self,
        reserve: float,
        layer: int,
        num_layers: int,
        kv_heads: int,
        *,
        observation: int = 32,
        beta: float = 0.05,
        unfold: bool = True,
        rope: Rope | None = None,
        **options: float | None,
    ) -> None:
        self.reserve, self.layer, self.num_layers = reserve, layer, num_layers
        self.kv_heads, self.observation, self.beta = kv_heads, observation, beta
        self.unfold, self.options = unfold, options
        self.rotate = (lambda x, positions: np.asarray(x, np.float64)) if rope is None else rope
        # (position, KV head) -> what attention sees, keys unrotated
        self.keys: dict[tuple[int, int], np.ndarray] = {}
        self.values: dict[tuple[int, int], np.ndarray] = {}
        self.kept: list[list[int]] = []  # positions, increasing, for every deciding head
        self.queries: list[tuple[np.ndarray, int]] = []
        self.prompt_over = False
        self.length = 0

    def prompt(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray, last: bool = True
    ) -> np.ndarray:
        """q [Q, T, D], k and v [H, T, D], positions [T] (-1 = padding) -> out [Q, T, D].

        q and k unrotated.  Evicts if `last`.
        """
        if self.prompt_over:
            self.queries = []
        self.prompt_over = last
        self._append(k, v, positions, len(q))
        rotated = self.rotate(q, positions)
        out, _ = self._attend(rotated, positions)
        self.queries += [(rotated[:, t], int(p)) for t, p in enumerate(positions) if p >= 0]
        self.queries = self.queries[-self.observation :]
        if last and self.queries:
            self._evict()
            self._store()
        return out

    def decode(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int) -> np.ndarray:
        """q [Q, D], k and v [H, D] of one token, unrotated -> out [Q, D]."""
        self._append(k[:, None], v[:, None], [position], len(q))
        self._arrived()
        out, _ = self._attend(self.rotate(q[:, None], np.array([position])), [position])
        return out[:, 0]

    def scores(self) -> list[np.ndarray]:
        """ac of the live tokens [S_i], for every deciding head i."""
        positions = np.array([p for _, p in self.queries])
        _, probabilities = self._attend(np.stack([q for q, _ in self.queries], axis=1), positions)
        own = len(probabilities) // len(self.kept)  # query heads of a deciding head
        scores = []
        for head, kept in enumerate(self.kept):
            received = [p.sum(axis=0) for p in probabilities[head * own : (head + 1) * own]]
            scores.append(np.mean(received, axis=0) / (self.length - np.array(kept)))
        return scores

    def weights(self) -> dict[tuple[int, int], int]:
        """(position, KV head) -> how many deciding heads keep it; position-major order."""
        own = max(len(self.kept) // self.kv_heads, 1)
        weights: dict[tuple[int, int], int] = {}
        for head, kept in enumerate(self.kept):
            for p in kept:
                weights[p, head // own] = weights.get((p, head // own), 0) + 1
        return dict(sorted(weights.items()))

    def _store(self) -> None:
        """Called when a prompt is complete, after eviction."""

    def _arrived(self) -> None:
        """Called when a decode step's token is there, before it attends."""

    def _append(self, k: np.ndarray, v: np.ndarray, positions: np.ndarray, queries: int) -> None:
        self.kept = self.kept or [[] for _ in range(queries if self.unfold else self.kv_heads)]
        for t, p in enumerate(int(p) for p in positions):
            if p < 0:
                continue
            self.length = max(self.length, p + 1)
            for head in range(self.kv_heads):
                self.keys[p, head] = np.array(k[head][t], np.float64)
                self.values[p, head] = np.array(v[head][t], np.float64)
            self.kept = [sorted([*kept, p]) for kept in self.kept]

    def _evict(self) -> None:
        prefix_tokens = layer_tokens(
            self.reserve, self.length, self.observation, self.layer, self.num_layers, self.beta
        )
        kept_before, scores = self.kept, self.scores()
        self.kept = []
        for kept, score in zip(kept_before, scores, strict=True):
            prefix = max(len(kept) - self.observation, 0)
            chosen = best(score[:prefix], prefix_tokens)
            self.kept.append([*(kept[i] for i in chosen), *kept[prefix:]])
        live = self.weights()
        self.keys = {at: self.keys[at] for at in live}
        self.values = {at: self.values[at] for at in live}

    def _attend(self, rotated: np.ndarray, positions: np.ndarray):
        """Rotated queries [Q, T, D] -> out [Q, T, D], and of each head the weights [T, S_i]."""
        outs, probabilities = [], []
        for i, query in enumerate(rotated):
            kept = np.array(self.kept[i * len(self.kept) // len(rotated)], int)
            head = i * self.kv_heads // len(rotated)
            if not len(kept):
                outs.append(np.zeros(query.shape))
                probabilities.append(np.zeros((len(query), 0)))
                continue
            keys = np.array([self.keys[p, head] for p in kept.tolist()])
            values = np.array([self.values[p, head] for p in kept.tolist()])
            keys = self.rotate(keys, kept)
            out, p = softmax_attention(query[None], keys, values, positions, kept, **self.options)
            outs.append(out[0])
            probabilities.append(p[0])
        return np.array(outs), probabilities


class SpindleKV(LayerBudgetEviction):
    """Eviction, then one codebook for the keys (unrotated) and one for the values of all heads.

    A vertex is a token of a KV head; its weight is how many deciding heads keep it.  At the end of
    each prompt in which the row has tokens, what was encoded before keeps its entry, and everything
    else that is live is encoded beside it.

    Decoding: interval 0 encodes a token's vectors before it attends, head after head.  Else tokens
    stay as they are until there are `interval` of them, which are then encoded after the attention.
    reserve 1 is the codebook alone.
    """

    def __init__(
        self,
        *args,
        theta_key: float = 0.98,
        theta_value: float = 0.95,
        capacity: int | None = None,
        magnitude: bool = True,
        interval: int = 0,
        **options,
    ) -> None:
        super().__init__(*args, **options)
        self.key_book = Codebook(theta_key, capacity, magnitude)
        self.value_book = Codebook(theta_value, capacity, magnitude)
        self.interval = interval
        # (position, KV head) -> entry, norm
        self.key_codes: dict[tuple[int, int], tuple[int, float]] = {}
        self.value_codes: dict[tuple[int, int], tuple[int, float]] = {}

    @property
    def slots(self) -> int:
        """Kept slots of all deciding heads, each with a key and a value."""
        return sum(len(kept) for kept in self.kept)

    def decode(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int) -> np.ndarray:
        """As in `LayerBudgetEviction`."""
        out = super().decode(q, k, v, position)
        if self.interval and len(self._plain()) == self.interval * self.kv_heads:
            self._encode_plain()
        return out

    def _arrived(self) -> None:
        if self.interval == 0:
            self._encode_plain()

    def _plain(self) -> list[tuple[int, int]]:
        """What is not encoded yet, in order."""
        return sorted(set(self.keys) - set(self.key_codes))

    def _encode_plain(self) -> None:
        self._encode(self._plain(), lambda book, codes, vectors: book.append(vectors))

    def _store(self) -> None:
        weights = self.weights()
        new = [at for at in weights if at not in self.key_codes]
        chosen = np.array([weights[at] for at in new])

        def grow(book, codes, vectors):
            old = [at for at in weights if at in codes]
            kept = np.array([codes[at][0] for at in old], int)
            norms = [codes[at][1] for at in old]
            kept, *found = book.grow(kept, vectors, chosen)
            codes.clear()
            codes.update(zip(old, zip(kept.tolist(), norms, strict=True), strict=True))
            return found

        self._encode(new, grow)

    def _encode(self, vertices: list[tuple[int, int]], encode) -> None:
        for book, vectors, codes in (
            (self.key_book, self.keys, self.key_codes),
            (self.value_book, self.values, self.value_codes),
        ):
            index, norms = encode(book, codes, np.array([vectors[at] for at in vertices]))
            codes.update(
                zip(vertices, zip(index.tolist(), norms.tolist(), strict=True), strict=True)
            )
            vectors.update(zip(vertices, book.read(index, norms), strict=True))
