"""Rows of documents, questions and answers, in the library and in references of single heads."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import numpy as np

import kvjax
from kvjax.budgets.heads import HeadShares
from tests.references.document_budget import DocumentBudget
from tests.references.rope import rope as rotate
from tests.support.attending import OPTIONS, attend, init_cache, of_heads
from tests.support.tolerances import close

ROWS, DIM, MAX_PROMPT, WIDTH = 3, 8, 128, 56
INV_FREQ = np.array([1.0, 0.3, 0.02, 0.001], np.float32)
ROPE = kvjax.Rope(INV_FREQ)


class Documents:
    """Rows of documents, questions and answers, in the library and in one reference per head.

    A subclass names the method and its reference, and reads documents in `document`. A budget may
    be a tuple with the share of each head.
    """

    method: ClassVar[type[kvjax.KVTransform]]
    reference: ClassVar[type[DocumentBudget]]

    def __init__(
        self, budget: float | tuple[float, ...] = 20, *, heads=(2, 2), attention=None, seed=0,
        rope=ROPE, of_reference=None, **arguments,
    ):  # fmt: skip
        by_head = isinstance(budget, tuple)
        if by_head:
            least = arguments.get("sinks", 4) + arguments.get("window", 0) + 1
            shared = HeadShares((budget,), (0,), least)
        self.tx: Any = self.method(shared if by_head else budget, **arguments)  # pyright: ignore[reportPossiblyUnboundVariable]  # a tuple has shares
        self.rope = rope
        self.rng, self.options = np.random.default_rng(seed), attention or {}
        self.kv_heads, self.group = heads
        self.length = np.zeros(ROWS, int)
        self.cache = init_cache(
            self.tx, batch=ROWS, kv_heads=heads[0], query_heads=heads[0] * heads[1], head_dim=DIM,
            max_prompt=MAX_PROMPT, max_new=32, dtype=np.float32,
            **{name: self.options[name] for name in OPTIONS if name in self.options},
        )  # fmt: skip
        self.heads = [(row, head) for row in range(ROWS) for head in range(heads[0])]
        self.references = {
            (row, head): self.reference(
                budget[head] if by_head else budget,  # pyright: ignore[reportIndexIssue]  # a tuple
                **(of_reference or {}),
                **arguments,
                max_prompt=MAX_PROMPT,
                attention=of_heads(self.options, self.of(head)),
            )
            for row, head in self.heads
        }

    def of(self, head: int) -> slice:
        """The query heads of a KV head."""
        return slice(head * self.group, (head + 1) * self.group)

    def tokens(self, counts, width: int, side: str = "right"):
        """Queries, keys, values and positions behind what there is; noise is padding."""
        heads = self.kv_heads * self.group, self.kv_heads, self.kv_heads
        new = [self.rng.normal(size=(ROWS, n, width, DIM)) * (2 if n > 2 else 1) for n in heads]
        where = np.full((ROWS, width), -1)
        for row, count in enumerate(counts):
            start = width - count if side == "left" else 0
            where[row, start : start + count] = self.length[row] + np.arange(count)
        return [x.astype(np.float32) for x in new], where

    def call(self, new, where, phase: str, last: bool = True) -> np.ndarray:
        out, self.cache = attend(
            self.cache, *new, where.astype(np.int32), phase=phase, last=last,
            rope=self.rope, **self.options,
        )  # fmt: skip
        return np.asarray(out)

    def of_head(self, new, where, row: int, head: int):
        """Returns queries and keys, rotated, and values of a row and head, for a reference."""
        q, k, v = (x.astype(np.float64)[row] for x in new)
        at = where[row]
        q, k, v = q[self.of(head)], k[head], v[head]
        if self.rope is None:
            return q, k, v, at
        q, k = (rotate(x, at, self.rope.inv_freq, self.rope.factor) for x in (q, k))
        return q, k, v, at

    def read(self, counts, side: str, chunks: int, last: bool) -> None:
        """Reads a prompt, which the references attend to and do not end."""
        for reference in self.references.values():
            reference.begin_prompt()
        new, where = self.tokens(counts, WIDTH, side)
        parts = np.array_split(np.arange(WIDTH), chunks)
        for number, part in enumerate(parts):
            piece, at = [x[:, :, part] for x in new], where[:, part]
            out = self.call(piece, at, "prompt", last=last and number == chunks - 1)
            for row, head in self.heads:
                reference = self.references[row, head]
                expected = reference.read(*self.of_head(piece, at, row, head))
                close(out[row, self.of(head)], expected, "reference")
        self.length += counts

    def question(self, counts, width: int, side: str = "right"):
        """A prompt that is not repeated."""
        new, where = self.tokens(counts, width, side)
        out = self.call(new, where, "prompt")
        for row, head in self.heads:
            reference = self.references[row, head]
            expected = reference.read(*self.of_head(new, where, row, head))
            close(out[row, self.of(head)], expected, "reference")
            if counts[row]:
                reference.end_question()
        self.length += counts
        return self.check()

    def decode(self, steps: int, alive=(True,) * ROWS):
        for _ in range(steps):
            new, where = self.tokens(np.array(alive, int), 1)
            out = self.call(new, where, "decode")
            for row, head in self.heads:
                reference = self.references[row, head]
                expected = reference.read(*self.of_head(new, where, row, head))
                close(out[row, self.of(head)], expected, "reference")
            self.length += alive
        return self.check()

    def kept(self, row: int, head: int) -> list[int]:
        kv = jax.device_get(self.cache.kv)
        return sorted(kv.position[row, head][kv.live[row, head]].tolist())

    def check(self):
        for row, head in self.heads:
            assert self.kept(row, head) == self.references[row, head].kept, (row, head)
        assert not np.asarray(self.cache.kv.dropped).any()
        return self
