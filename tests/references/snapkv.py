"""SnapKV (arXiv 2404.14469): what the last queries of the prompt look at."""

from __future__ import annotations

import numpy as np

from .budgets import rows_budget
from .slots import Slots, best, reduce_group


def pool(scores: np.ndarray, kernel: int = 7, mode: str = "max") -> np.ndarray:
    """1-D pooling of [..., N] with stride 1: y[i] over x[i - kernel // 2 .. i + kernel // 2].

    Outside stand zeros, which the average counts (it always divides by `kernel`).
    """
    if kernel % 2 == 0:
        raise ValueError(f"an odd kernel keeps the length; given {kernel}")
    reach, size = kernel // 2, scores.shape[-1]
    padded = np.pad(scores, [(0, 0)] * (scores.ndim - 1) + [(reach, reach)])
    shifted = [padded[..., i : i + size] for i in range(kernel)]
    return np.max(shifted, axis=0) if mode == "max" else np.sum(shifted, axis=0) / kernel


class SnapKV:
    """Keeps the W newest tokens and the B - W best of the others (the prefix), at a prompt's end.

        score[g, s] = 1/W * sum over the last W queries t of the prompt of p[g, t, s]

    where p is the causal softmax over prefix and window together.  The scores of the prefix are
    pooled along positions for each query head, then reduced over the group.  At most B live tokens
    are left alone.  Nothing happens while decoding.

    In a second turn everything live is compressed as one prompt: the queries are the last W of that
    turn's prompt, the protected window is the W newest live tokens.  A row without a prompt query
    is left alone.
    """

    def __init__(
        self,
        budget: int | float,
        observation: int = 32,
        kernel: int = 7,
        pooling: str = "max",
        group_reduce: str = "mean",
        **options: float | None,
    ) -> None:
        self.budget, self.observation = budget, observation
        self.kernel, self.pooling, self.group_reduce = kernel, pooling, group_reduce
        self.queries: list[tuple[np.ndarray, int]] = []
        self.prompt_over = False
        self.slots = Slots(**options)

    keeps_queries = False
    """Whether the window goes on from prompt to prompt."""

    @property
    def kept(self) -> list[int]:
        """Positions of the live tokens."""
        return self.slots.positions.tolist()

    def row_budget(self, length: int) -> int:
        """B for a row of `length` tokens so far."""
        return rows_budget(self.budget, length, self.observation + 1)

    def prompt(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray, last: bool = True
    ) -> np.ndarray:
        """q [G, T, D], k and v [T, D], positions [T] -> out [G, T, D].  Evicts if `last`."""
        if self.prompt_over and not self.keeps_queries:
            self.queries = []
        self.prompt_over = last
        self.slots.append(k, v, positions, len(q))
        out, _ = self.slots.attend(q, positions)
        self.queries += [(q[:, t], int(p)) for t, p in enumerate(positions) if p >= 0]
        self.queries = self.queries[-self.observation :]
        if self.slots.ends_prompt(positions, last):
            self._evict(self.row_budget(self.slots.length))
        return out

    def decode(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int) -> np.ndarray:
        """q [G, D], k and v [D] of one token -> out [G, D]."""
        self.slots.append(k[None], v[None], [position], len(q))
        return self.slots.attend(q[:, None], [position])[0][:, 0]

    def prefix_scores(self) -> np.ndarray:
        """[N]: the pooled and reduced scores of the N live tokens before the window."""
        queries = np.stack([query for query, _ in self.queries], axis=1)
        _, probabilities = self.slots.attend(queries, np.array([p for _, p in self.queries]))
        prefix = probabilities.mean(axis=1)[:, : len(self.slots) - self.observation]
        return reduce_group(pool(prefix, self.kernel, self.pooling), self.group_reduce)

    def _evict(self, budget: int) -> None:
        live = len(self.slots)
        if live <= budget:
            return
        prefix = live - self.observation
        chosen = best(self.prefix_scores(), budget - self.observation)
        self.slots.keep([*chosen, *range(prefix, live)])
