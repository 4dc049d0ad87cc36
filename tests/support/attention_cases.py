"""Calls of attention operations: what is given, and what must come out of it in float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import Mask, Queries, Seen
from pallas_kernels.base import tiles
from tests.references.attention import softmax_attention
from tests.support.implementations import EVERY as EVERY
from tests.support.implementations import KERNELS as KERNELS
from tests.support.tolerances import close

SLOTS = 45
PROMPTS = ("prompt_attention", "column_sums", "column_maxima")


@dataclass(frozen=True)
class Shape:
    """One call: four heads of different lengths, free slots in between, NaN in what is free."""

    group: int = 4
    dim: int = 64
    tokens: int = 1
    dtype: str = "float32"
    options: dict = field(default_factory=dict, hash=False)
    slots: int = SLOTS
    shuffled: bool = True  # whether slots are in another order than positions

    def __str__(self):
        parts = [f"G{self.group}", f"D{self.dim}", f"T{self.tokens}", self.dtype, *self.options]
        parts += [f"S{self.slots}"] * (self.slots != SLOTS) + ["in order"] * (not self.shuffled)
        return " ".join(parts)


class Case:
    """Arguments of a call, and what must come out of it in float64."""

    def __init__(self, shape: Shape, seed: int = 3):
        rng = np.random.default_rng(seed)
        self.kind, dtype = ("bfloat16" if "16" in shape.dtype else "float32"), shape.dtype
        heads, slots = (2, 2), shape.slots
        # Of the four heads of two rows: nothing, one slot, odd, full.
        lengths = np.reshape((0, 1, slots // 2 + 1, slots), heads)
        q = rng.normal(size=(*heads, shape.group, shape.tokens, shape.dim))
        k, v = rng.normal(size=(2, *heads, slots, shape.dim))
        position = np.tile(np.arange(slots), (*heads, 1))
        if shape.shuffled:
            position = rng.permuted(position, axis=-1)
        free = np.arange(slots) >= lengths[..., None]
        free |= (rng.random(free.shape) < 0.2) & (lengths[..., None] > 1)
        free[-1, -1, [0, -1]] = False  # what an entry of -1 could be taken for
        self.free, self.used = free, jnp.asarray(lengths, jnp.int32)
        query = np.tile(np.arange(slots - shape.tokens, slots), (2, 1))
        if shape.tokens > 1:
            query[0, 0] = -1  # padding
        bias = np.where(free, -np.inf, np.log(rng.integers(1, 5, size=free.shape)))
        # A free slot may be told by either; what else stands there means nothing.
        position = np.where(free & (rng.random(free.shape) < 0.5), -1, position)
        k, v = (np.where(free[..., None], np.nan, x) for x in (k, v))
        self.q, self.k, self.v = (jnp.asarray(x, dtype) for x in (q, k, v))
        self.bias = jnp.asarray(bias, jnp.float32)
        self.query, self.position = (jnp.asarray(x, jnp.int32) for x in (query, position))
        self.logits = {"scale": 0.3, **shape.options}
        self.options = {"mask": Mask(**self.logits)}

    @property
    def args(self):
        return self.queries, self.k, self.v, self.seen

    @property
    def queries(self):
        return Queries(self.q, self.query)

    @property
    def seen(self):
        return Seen(self.bias, self.position)

    def expected(self, index=None, rows=None):
        """Output, log-sum-exp and probabilities, of all slots or of lists `[B, K, N]` of them.

        Of the rows given, keys and values in float64, instead of its own.
        """
        outs = []
        q = np.asarray(self.q, np.float64)
        lists = q.shape[1] if index is None else index.shape[1]
        q = q.reshape(len(q), lists, -1, *q.shape[3:])
        for b, h in np.ndindex(q.shape[:2]):
            head = h * 2 // lists
            own = [np.asarray(x, np.float64)[b, head] for x in rows or (self.k, self.v)]
            own = [np.where(self.free[b, head, :, None], 0, x) for x in own]
            position, bias = np.asarray(self.position)[b, head], np.asarray(self.bias)[b, head]
            if index is not None:
                at = index[b, h]
                own = [x[at] for x in own]
                position, bias = position[at], np.where(at < 0, -np.inf, bias[at])
            outs.append(self.one(q[b, h], *own, np.asarray(self.query)[b], position, bias))
        return [np.reshape(x, (*q.shape[:2], *x[0].shape)) for x in zip(*outs, strict=True)]

    def one(self, q, k, v, query, position, bias):
        out, p = softmax_attention(q, k, v, query, position, bias, **self.logits)
        logits = self.logits["scale"] * np.einsum("gtd,sd->gts", q, k)
        if cap := self.logits.get("soft_cap"):
            logits = cap * np.tanh(logits / cap)
        best = p.argmax(-1)[..., None]
        top = np.take_along_axis(p, best, -1)[..., 0]
        logit = np.take_along_axis(logits + np.where(bias > -np.inf, bias, 0), best, -1)[..., 0]
        return out, np.where(top > 0, logit - np.log(np.where(top > 0, top, 1)), -np.inf), p


def run(operation, args, **options):
    names = tuple(options)
    call = jax.jit(operation, static_argnames=names)
    return call(*args, **options)


def check(case, actual, expected):
    out, lse, p = actual
    assert out.dtype == case.v.dtype and lse.dtype == p.dtype == jnp.float32
    close(out, expected[0], case.kind, "output")
    close(lse, expected[1], case.kind, "log-sum-exp")
    close(p, expected[2], case.kind, "probabilities")
    assert (np.asarray(p)[expected[2] == 0] == 0).all(), "what is not seen gets exactly nothing"
    blind = expected[2].sum(-1) == 0
    assert (np.asarray(out, np.float32)[blind] == 0).all()


def use_small_tiles(monkeypatch):
    """Tiles of 16 slots and as many parts as there are tiles, so that few slots need several.

    A prompt's queries come in tiles of 16, too.
    """
    sizes = {"tile_bytes": 1, "warps": 4, "stages": 3, "programs": 99, "cores": 99}
    row = dict.fromkeys(tiles.table()["hopper"], sizes)
    row |= {name: {**sizes, "query_bytes": 1} for name in PROMPTS}
    small = dict.fromkeys(tiles.table(), row)
    monkeypatch.setattr(tiles, "table", lambda: small)
    monkeypatch.setattr(tiles, "BLOCKS_PER_SPLIT", 1)
