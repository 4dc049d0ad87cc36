"""H2O (arXiv 2306.14048): heavy hitters by accumulated attention, and recent tokens."""

from __future__ import annotations

import numpy as np

from .budgets import rows_budget
from .slots import Slots, best, reduce_group


class H2O:
    """Keeps `recent` = B - floor(B / 2) newest tokens and the floor(B / 2) best of the others.

    score[g, s] = sum over all queries t so far of p[g, t, s]; reduced over the group's query
    heads when a choice is made.  At the prompt's end all live tokens compete.  A decode step
    appends its token, attends over at most B + 1, adds its probabilities, and if more than B are
    live evicts the lowest of those that are not recent (of equal ones, the higher position).
    A float budget is fixed at the prompt's end; a row so short that it comes out below 2 may grow
    to 2 while decoding.
    """

    def __init__(
        self, budget: int | float, group_reduce: str = "mean", **options: float | None
    ) -> None:
        self.budget, self.group_reduce = budget, group_reduce
        self.limit = budget if isinstance(budget, int) else 2
        self.slots = Slots(**options)

    @property
    def kept(self) -> list[int]:
        """Positions of the live tokens."""
        return self.slots.positions.tolist()

    def prompt(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray, last: bool = True
    ) -> np.ndarray:
        """q [G, T, D], k and v [T, D], positions [T] -> out [G, T, D].  Evicts if `last`."""
        out = self._step(q, k, v, positions)
        if self.slots.ends_prompt(positions, last):
            self.limit = max(rows_budget(self.budget, self.slots.length, 2), 2)
            self._evict()
        return out

    def decode(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int) -> np.ndarray:
        """q [G, D], k and v [D] of one token -> out [G, D]."""
        out = self._step(q[:, None], k[None], v[None], [position])[:, 0]
        self._evict()
        return out

    def _step(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray
    ) -> np.ndarray:
        self.slots.append(k, v, positions, len(q))
        out, probabilities = self.slots.attend(q, positions)
        if len(self.slots):
            self.slots.add_scores(probabilities.sum(axis=1))
        return out

    def _evict(self) -> None:
        live = len(self.slots)
        if live <= self.limit:
            return
        heavy = self.limit // 2
        others = live - (self.limit - heavy)
        scores = reduce_group(self.slots.scores, self.group_reduce)
        self.slots.keep([*best(scores[:others], heavy), *range(others, live)])
