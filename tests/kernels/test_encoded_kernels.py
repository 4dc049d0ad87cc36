"""Quantised and codebook attention by XLA and by kernels, against float64."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    Encoded,
    References,
    Turn,
    codebook_attention,
    quantise_groups,
    quantise_slots,
    quantized_attention,
)
from pallas_kernels.formats import bits, codebook
from tests.references import quantised
from tests.references.rope import inverse_frequencies, rope
from tests.support.attention_cases import Case, Shape, check, run, use_small_tiles
from tests.support.implementations import each_way

ENTRIES = 40  # of a book
to_8_bits = jax.jit(quantise_slots, static_argnums=1)
to_4_bits = jax.jit(quantise_groups, static_argnums=(1, 2))


def finite(x) -> np.ndarray:
    """Zeros where a slot is free."""
    x = np.asarray(x)
    return np.where(np.isnan(x), np.zeros_like(x), x)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """For kernels; XLA decodes blocks of slots that are not a multiple of a group, and a rest."""
    use_small_tiles(monkeypatch)
    monkeypatch.setattr(bits, "BLOCK", 20)
    monkeypatch.setattr(codebook, "BLOCK", 20)


@dataclass(frozen=True)
class Form:
    """How keys and values are stored."""

    name: str  # "int8", "float8", "4 bits" or "codebook"
    group: int = 1
    axis: str = "token"
    magnitude: bool = True

    def __str__(self):
        return " ".join([self.name, *([f"{self.axis}{self.group}"] if self.group > 1 else [])])

    def encode(self, x, free, axis="token"):
        """What is stored, with garbage where a slot is free, and what it means in float64."""
        x = finite(x)
        if self.name == "codebook":
            return self.refer(x, free)
        if self.name == "4 bits":
            group = self.group if axis == self.axis else 16
            stored = Encoded(*map(np.asarray, to_4_bits(x, group, axis)))
            own = [np.asarray(part, np.float64) for part in (stored.scale, stored.low)]
            q = quantised.unpack(stored.values)
            decoded = quantised.dequantise_4bit(q, own[1], own[0], group, axis)
        else:
            dtype = {"int8": "int8", "float8": "float8_e4m3fn"}[self.name]
            stored = Encoded(*map(np.asarray, to_8_bits(x, jnp.dtype(dtype))))
            q = stored.values
            if self.name == "float8":
                q = q.view(jnp.float8_e4m3fn)
            decoded = q.astype(np.float64) * stored.scale.astype(np.float64)[..., None]
        return self.spoil(stored, free, axis), decoded

    def spoil(self, stored, free, axis):
        """NaN in what a free slot has for itself alone."""
        if axis == "channel":  # groups that hold no token at all
            lone = free.reshape(*free.shape[:2], -1, self.group).all(-1)[..., None]
        else:
            lone = free if stored.scale.ndim == 3 else free[..., None]
        bad = [None if x is None else np.where(lone, np.nan, x).astype(x.dtype)
               for x in stored[1:]]  # fmt: skip
        return Encoded(stored.values, *bad)

    def refer(self, x, free):
        rng = np.random.default_rng(7)
        entries = rng.normal(size=(len(x), 1, ENTRIES, x.shape[3])).astype(x.dtype)
        index = rng.integers(0, ENTRIES - 1, size=free.shape)
        entries[:, :, -1] = np.nan  # the last entry is that of free slots
        index = np.where(free, ENTRIES - 1, index).astype(np.uint16)
        magnitude = None
        if self.magnitude:
            magnitude = np.where(free, np.nan, rng.uniform(0.5, 2, size=free.shape))
            magnitude = magnitude.astype(x.dtype)
        pairs = zip(np.asarray(entries, np.float64), np.asarray(index, int), strict=True)
        own = np.stack([rows[0][at] for rows, at in pairs])
        if magnitude is not None:
            own = own * np.asarray(magnitude, np.float64)[..., None]
        return References(entries, index, magnitude), own


@dataclass(frozen=True)
class Rope:
    """How keys are turned on the way."""

    pairs: int
    interleaved: bool = False
    factor: float = 1.0
    ranks: bool = False  # turned elsewhere than at the position

    def __str__(self):
        return " ".join(["turned", *["interleaved"] * self.interleaved, *["by ranks"] * self.ranks])

    def turn(self, position):
        at = np.flip(position, axis=2) if self.ranks else position
        frequencies = inverse_frequencies(2 * self.pairs, 100.0).astype(np.float32)[None]
        return Turn(frequencies, at, self.interleaved, self.factor)

    def rotate(self, rows, turn):
        """Float64 rows `[B, H, S, D]`, turned one by one."""
        order = np.arange(rows.shape[-1])
        if self.interleaved:
            inside = order[: 2 * self.pairs].reshape(-1, 2).T.reshape(-1)
            order = np.concatenate([inside, order[2 * self.pairs :]])
        out = np.empty_like(rows)
        for b, h in np.ndindex(rows.shape[:2]):
            own = rows[b, h][:, order], np.asarray(turn.position)[b, h]
            out[b, h][:, order] = rope(*own, np.asarray(turn.inv_freq, np.float64)[0], self.factor)
        return out


class EncodedCase(Case):
    """A case whose keys and values are stored in another form."""

    def __init__(self, shape: Shape, form: Form, rotation: Rope | None):
        super().__init__(shape)
        if rotation is not None:  # a live slot's position is turned at, whatever stands in others
            self.position = np.where(self.free, np.minimum(self.position, 0), self.position)
        self.form = form
        self.k_stored, k = form.encode(self.k, self.free, form.axis)
        self.v_stored, v = form.encode(self.v, self.free)
        self.turn = None if rotation is None else rotation.turn(self.position)
        if rotation is not None:
            k = rotation.rotate(np.where(self.free[..., None], 0, k), self.turn)
        self.rows = k, v

    def attention(self, implementation):
        if self.form.name == "codebook":
            operation = codebook_attention
        else:
            operation = functools.partial(quantized_attention, key_axis=self.form.axis)
        turned_elsewhere = self.turn is not None and self.turn.position is not self.position

        def call(queries, k, v, seen, other, **options):
            turn = self.turn
            if turn is not None:
                turn = turn.at(other if turned_elsewhere else seen.position)
            return operation(queries, k, v, seen._replace(turn=turn), **options)

        other = self.turn.position if turned_elsewhere else None
        args = (self.queries, self.k_stored, self.v_stored, self.seen, other)
        return run(call, args, **self.options, implementation=implementation)


CASES = [
    (Form("int8"), Shape(group=1), None),
    (Form("int8"), Shape(group=4, dim=128, dtype="bfloat16"), Rope(64)),
    (Form("int8"), Shape(group=7, dim=96, dtype="float16", options={"soft_cap": 2.0}), None),
    (Form("float8"), Shape(group=2, dim=80, tokens=3, options={"window": 9}), None),
    (Form("float8"), Shape(group=16, dim=64, dtype="bfloat16"), None),
    (Form("int8"), Shape(group=4, dim=128, dtype="bfloat16"), None),
    (Form("float8"), Shape(group=2, dim=64, dtype="float16"), None),
    (Form("4 bits", 32), Shape(group=4, dim=128, dtype="bfloat16"), None),
    (Form("4 bits", 32), Shape(group=4, dim=96, tokens=2, dtype="bfloat16"), None),
    (Form("4 bits", 9, "channel"), Shape(group=4, dim=128, dtype="bfloat16"), None),
    (Form("4 bits", 32), Shape(group=3, dim=96, tokens=5, options={"window": 6}), None),
    (Form("4 bits", 16), Shape(group=2, dim=80), Rope(20, interleaved=True)),
    (Form("4 bits", 5), Shape(group=2, dim=80), Rope(20, interleaved=True)),
    (Form("4 bits", 15, "channel"), Shape(group=2, dim=80, dtype="float16"), None),
    (Form("4 bits", 9, "channel"), Shape(group=4, dim=64), Rope(32, ranks=True)),
    (Form("codebook"), Shape(group=1), None),
    (Form("codebook"), Shape(group=4, dim=128, dtype="bfloat16"), Rope(64)),
    # More products with entries than with slots, which are then decoded.
    (Form("codebook", magnitude=False), Shape(group=16, dim=96, tokens=2), Rope(48, factor=1.2)),
    (Form("codebook"), Shape(group=2, dim=80, tokens=3), Rope(16, interleaved=True, ranks=True)),
]
NAMED = {" ".join(str(part) for part in case if part is not None): case for case in CASES}


@pytest.mark.parametrize(
    ("form", "shape", "rotation", "implementation"),
    each_way(NAMED, fast=["4 bits token5 G2 D80 T1 float32 turned interleaved"]),
)
def test_attention_over_what_is_stored(form, shape, rotation, implementation):
    case = EncodedCase(shape, form, rotation)
    check(case, case.attention(implementation), case.expected(rows=case.rows))


def test_small_values_survive_float16():
    """A scale of 1e-6 times a probability is less than float16 knows."""
    case = Case(Shape(dtype="float16", group=2))
    case.v = (np.asarray(case.v, np.float32) * 1e-4).astype(np.float16)
    form = Form("int8")
    (k, k_rows), (v, v_rows) = (form.encode(x, case.free) for x in (case.k, case.v))
    args = case.queries, k, v, case.seen
    out, _, _ = run(quantized_attention, args, **case.options, implementation="interpret")
    expected = case.expected(rows=(k_rows, v_rows))[0]
    error = np.abs(np.asarray(out, np.float64) - expected).max()
    assert error < 0.01 * np.abs(expected).max()
