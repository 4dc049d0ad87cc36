"""Attention with a sliding window, of which a cache need hold the newest tokens alone."""

from __future__ import annotations

import numpy as np

from .slots import Slots


class Ring:
    """Every token ever seen stays here; attention masks what lies outside the window.

    A query at position p sees the positions p - window + 1 ... p.  After a token at position n - 1
    the next query, at n, sees n - window + 1 ... n: `kept` are those of them that there are.
    """

    def __init__(self, window: int, **options: float | None) -> None:
        self.window, self.first = window, 0
        self.slots = Slots(window=window, **options)

    @property
    def kept(self) -> list[int]:
        """Positions that a later query may see; all of the prompt that is being read."""
        return [p for p in self.slots.positions.tolist() if p >= self.first]

    def prompt(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray, last: bool = True
    ) -> np.ndarray:
        """q [G, T, D], k and v [T, D], positions [T] -> out [G, T, D]."""
        self.slots.append(k, v, positions, len(q))
        out, _ = self.slots.attend(q, positions)
        if self.slots.ends_prompt(positions, last):
            self.first = self.slots.length - self.window + 1
        return out

    def decode(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int) -> np.ndarray:
        """q [G, D], k and v [D] of one token -> out [G, D]."""
        self.slots.append(k[None], v[None], [position], len(q))
        out, _ = self.slots.attend(q[:, None], [position])
        self.first = self.slots.length - self.window + 1
        return out[:, 0]
