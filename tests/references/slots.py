"""One row and one KV head of a cache, as a list of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .attention import softmax_attention


@dataclass
class Token:
    """A live slot.  `score` is the method's accumulator, one number per query head of the group."""

    position: int
    key: np.ndarray
    value: np.ndarray
    score: np.ndarray
    log_mass: float = 0.0


class Slots:
    """Live tokens in position order.

    scale, window, soft_cap and sinks are those of `softmax_attention`.
    """

    def __init__(
        self,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: np.ndarray | None = None,
    ) -> None:
        self.tokens: list[Token] = []
        self.options = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks}
        self.prompted = False  # whether the prompt that is being read has brought a token

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def positions(self) -> np.ndarray:
        """[S], increasing."""
        return np.array([t.position for t in self.tokens], int)

    @property
    def keys(self) -> np.ndarray:
        """[S, D]."""
        return np.array([t.key for t in self.tokens])

    @property
    def values(self) -> np.ndarray:
        """[S, D]."""
        return np.array([t.value for t in self.tokens])

    @property
    def log_mass(self) -> np.ndarray:
        """[S]."""
        return np.array([t.log_mass for t in self.tokens])

    @property
    def scores(self) -> np.ndarray:
        """[G, S]."""
        return np.array([t.score for t in self.tokens]).T

    @property
    def length(self) -> int:
        """Tokens so far: 1 + the newest position (the newest token is never evicted)."""
        return 1 + self.tokens[-1].position if self.tokens else 0

    def append(self, k: np.ndarray, v: np.ndarray, positions: np.ndarray, group: int) -> None:
        """Add tokens with k, v [T, D]; positions of -1 are padding and add nothing."""
        for key, value, position in zip(k, v, positions, strict=True):
            if position >= 0:
                key, value = np.array(key, np.float64), np.array(value, np.float64)
                self.tokens.append(Token(int(position), key, value, np.zeros(group)))
        self.tokens.sort(key=lambda token: token.position)

    def ends_prompt(self, positions: np.ndarray, last: bool) -> bool:
        """Whether a prompt that has brought tokens is complete with these."""
        brought = self.prompted or bool((np.asarray(positions) >= 0).any())
        self.prompted = brought and not last
        return brought and last

    def attend(self, q: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """q [G, T, D] at `positions` [T] over all live slots: out [G, T, D], weights [G, T, S]."""
        if not self.tokens:
            return np.zeros(np.shape(q)), np.zeros((*np.shape(q)[:2], 0))
        return softmax_attention(
            q,
            self.keys,
            self.values,
            positions,
            self.positions,
            self.log_mass,
            **self.options,
        )

    def add_scores(self, scores: np.ndarray) -> None:
        """Add `scores` [G, S] to the tokens' accumulators."""
        for token, score in zip(self.tokens, scores.T, strict=True):
            token.score = token.score + score

    def keep(self, indices: list[int] | np.ndarray) -> None:
        """Keep the live tokens at these indices (into position order), evict all others."""
        chosen = {int(i) for i in indices}
        self.tokens = [token for i, token in enumerate(self.tokens) if i in chosen]


def reduce_group(scores: np.ndarray, how: str) -> np.ndarray:
    """[G, N] -> [N]: the mean, maximum or sum over the query heads of the group."""
    return {"mean": np.mean, "max": np.max, "sum": np.sum}[how](scores, axis=0)


def best(scores: np.ndarray, count: int) -> list[int]:
    """The indices of the `count` highest of `scores` [N], ties to the lower index; sorted."""
    return sorted(np.argsort(-scores, kind="stable")[:count].tolist())
