"""CaM (ICML 2024): evicted values live on, spread over the tokens that come next."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .attention import softmax_attention
from .slots import Token


class CaM:
    """Runs another reference, and adds the values of what it evicts to tokens that it keeps.

    For a token i that the base evicts, with a_i the attention that it has received so far (summed
    over all queries, averaged over the group's query heads), and T_i the next m kept tokens by
    position (fewer where fewer are left):

        p_i  = clip(a_i / mean of a over T_i, 0, 1)         (0 / 0 is 0, a / 0 is 1)
        v_t += z_i / m * v_i      for t in T_i, with z_i = 1 with probability p_i, else 0

    always divided by m.  expected: z_i = p_i.  Only evictions while decoding count, those of the
    prompt too with `prompt`.

    merge: m, or a function of the base that gives it.  draw: position -> u in [0, 1);
    z_i = u < p_i.
    """

    def __init__(
        self,
        base,
        merge: int | Callable[[object], int],
        draw: Callable[[int], float] | None = None,
        prompt: bool = False,
    ) -> None:
        self.base, self.merge, self.draw, self.merges_prompt = base, merge, draw, prompt
        self.received: dict[int, np.ndarray] = {}  # per query head
        self.merged: list[tuple[int, float]] = []  # (position, p) of all evicted so far

    @property
    def slots(self):
        """The base's slots, whose values this changes."""
        return self.base.slots

    @property
    def kept(self) -> list[int]:
        """Positions of the live tokens."""
        return self.base.kept

    def prompt(self, q, k, v, positions, last: bool = True) -> np.ndarray:
        """q [G, T, D], k and v [T, D], positions [T] -> out [G, T, D]."""
        before = self._observe(q, k, v, positions)
        out = self.base.prompt(q, k, v, positions, last=last)
        if self.merges_prompt:
            self._merge(before)
        self._write_scores()
        return out

    def decode(self, q, k, v, position: int) -> np.ndarray:
        """q [G, D], k and v [D] of one token -> out [G, D]."""
        before = self._observe(q[:, None], k[None], v[None], [position])
        out = self.base.decode(q, k, v, position)
        self._merge(before)
        self._write_scores()
        return out

    def flush(self, room: int) -> None:
        """What the base does between two decode steps, and the values of what it evicts."""
        if hasattr(self.base, "flush"):
            before = list(self.slots.tokens)
            self.base.flush(room)
            self._merge(before)
            self._write_scores()

    def _write_scores(self) -> None:
        for token in self.slots.tokens:
            token.score = self.received[token.position]

    def _observe(self, q, k, v, positions) -> list[Token]:
        """Adds this call's attention; the tokens that are there before the base decides."""
        tokens = list(self.slots.tokens)
        for key, value, position in zip(k, v, positions, strict=True):
            if position >= 0:
                value = np.array(value, np.float64)
                tokens.append(Token(int(position), np.array(key, np.float64), value, np.zeros(1)))
        tokens.sort(key=lambda token: token.position)
        if tokens:
            _, probabilities = softmax_attention(
                q,
                np.array([t.key for t in tokens]),
                np.array([t.value for t in tokens]),
                positions,
                np.array([t.position for t in tokens]),
                **self.slots.options,
            )
            for token, a in zip(tokens, probabilities.sum(axis=1).T, strict=True):
                self.received[token.position] = self.received.get(token.position, 0.0) + a
        return tokens

    def _merge(self, before: list[Token]) -> None:
        kept, positions = self.slots.tokens, set(self.kept)
        m = self.merge(self.base) if callable(self.merge) else self.merge
        for token in before:
            if token.position in positions:
                continue
            targets = [t for t in kept if t.position > token.position][:m]
            if not targets:
                continue
            a = self.received[token.position].mean()
            mean = np.mean([self.received[t.position] for t in targets])
            p = min(max(a / mean, 0.0), 1.0) if mean > 0 else float(a > 0)
            z = p if self.draw is None else float(self.draw(token.position) < p)
            self.merged.append((token.position, p))
            for target in targets:
                target.value = target.value + z / m * token.value
