"""StreamingLLM (arXiv 2309.17453): attention sinks and a window of recent tokens."""

from __future__ import annotations

import numpy as np

from .attention import softmax_attention
from .budgets import rows_budget
from .rope import rope
from .slots import Slots


class StreamingLLM:
    """Keeps the first `sinks` live tokens and the newest `budget - sinks`.

    A decode step appends its token, attends over everything (at most B + 1 tokens), and then, if
    more than B are live, evicts the oldest non-sink.  A float budget is fixed at the prompt's end;
    a row so short that it comes out below sinks + 1 may grow to sinks + 1 while decoding.

    reposition=True: q and k are given unrotated, every key is rotated at its rank among the live
    tokens (0, 1, 2 ...), a query at the rank of its own token: while decoding, the last one.
    Which keys are visible is still decided by the tokens' own positions.
    """

    def __init__(
        self,
        budget: int | float,
        sinks: int = 4,
        reposition: bool = False,
        inv_freq: np.ndarray | None = None,
        factor: float = 1.0,
        **options: float | None,
    ) -> None:
        self.budget, self.sinks, self.reposition = budget, sinks, reposition
        self.inv_freq, self.factor = inv_freq, factor
        self.limit = budget if isinstance(budget, int) else sinks + 1
        self.slots = Slots(**options)

    @property
    def kept(self) -> list[int]:
        """Positions of the live tokens."""
        return self.slots.positions.tolist()

    def prompt(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray, last: bool = True
    ) -> np.ndarray:
        """q [G, T, D], k and v [T, D], positions [T] -> out [G, T, D].  Evicts if `last`."""
        self.slots.append(k, v, positions, len(q))
        out = self._attend(q, positions)
        if self.slots.ends_prompt(positions, last):
            minimum = self.sinks + 1
            self.limit = max(rows_budget(self.budget, self.slots.length, minimum), minimum)
            self._evict()
        return out

    def decode(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int) -> np.ndarray:
        """q [G, D], k and v [D] of one token -> out [G, D]."""
        self.slots.append(k[None], v[None], [position], len(q))
        out = self._attend(q[:, None], [position])[:, 0]
        self._evict()
        return out

    def _evict(self) -> None:
        live = len(self.slots)
        if live <= self.limit:
            return
        recent = self.limit - self.sinks
        self.slots.keep([*range(self.sinks), *range(live - recent, live)])

    def _attend(self, q: np.ndarray, positions: np.ndarray) -> np.ndarray:
        slots = self.slots
        if not self.reposition or not len(slots):
            return slots.attend(q, positions)[0]
        rank = {position: i for i, position in enumerate(slots.positions.tolist())}
        query_ranks = [rank.get(int(p), 0) for p in positions]
        return softmax_attention(
            rope(q, query_ranks, self.inv_freq, self.factor),
            rope(slots.keys, np.arange(len(slots)), self.inv_freq, self.factor),
            slots.values,
            positions,
            slots.positions,
            slots.log_mass,
            **slots.options,
        )[0]
