"""SnapKV and then H2O, each of which chooses among what the one before it has left."""

from __future__ import annotations

import numpy as np

from .h2o import H2O
from .snapkv import SnapKV


class SnapKVThenH2O(SnapKV):
    """SnapKV at a prompt's end, then H2O there and in every step, over the same slots.

    H2O's scores are sums over all queries, whatever SnapKV has evicted since.
    """

    def __init__(self, budget: int, then: int, **options) -> None:
        super().__init__(budget, **options)
        self.then = H2O(then)
        self.then.slots = self.slots

    def prompt(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray, last: bool = True
    ) -> np.ndarray:
        """q [G, T, D], k and v [T, D], positions [T] -> out [G, T, D].  Evicts if `last`."""
        out = super().prompt(q, k, v, positions, last=False)
        self.prompt_over = last
        if len(self.slots):
            self.slots.add_scores(self.slots.attend(q, positions)[1].sum(axis=1))
        if self.slots.ends_prompt(positions, last):
            self._evict(self.row_budget(self.slots.length))
            self.then._evict()
        return out

    def decode(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int) -> np.ndarray:
        """q [G, D], k and v [D] of one token -> out [G, D]."""
        return self.then.decode(q, k, v, position)
