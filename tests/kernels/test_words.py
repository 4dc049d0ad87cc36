"""Words of stored bytes: the PTX that a GPU runs computes what interpreted kernels compute."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.words import FOUR_BITS, LEAST, PTX, bytes_of, four_bits
from tests.support.tolerances import within_roundings

WORDS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
}
"""Instruction → what it makes of words of 32 bits."""


def of_halves(function, *words):
    """A function of both halves of words, as bfloat16, rounded once."""
    numbers = (word.view(jnp.bfloat16).astype(np.float64) for word in words)
    return function(*numbers).astype(jnp.bfloat16).view(np.uint32)


WORDS |= {
    "fma.rn.bf16x2": functools.partial(of_halves, lambda a, b, c: a * b + c),
    "max.bf16x2": functools.partial(of_halves, np.fmax),
}


def executed(asm: str, *given: np.ndarray) -> np.ndarray:
    """Runs instructions of PTX on words $1, $2, ...; what they write into $0."""
    held = {f"${number}": word for number, word in enumerate(given, 1)}
    for line in asm.strip("{}\n").splitlines():
        name, rest = line.rstrip(";").split(" ", 1)
        if name == ".reg":
            continue
        result, *operands = rest.split(", ")
        words = [held[x] if x in held else np.full_like(given[0], int(x, 0)) for x in operands]
        held[result] = WORDS[name](*words)
    return held["$0"]


@pytest.mark.parametrize("form", PTX)
def test_ptx_makes_the_same_numbers(form):
    pairs = np.arange(2**16, dtype=np.uint16)
    word = np.stack([pairs, pairs[::-1]], axis=1).copy().view(np.uint32)[:, 0]
    for shift, numbers in zip((0, 8), bytes_of(jnp.asarray(pairs), form, True), strict=True):
        halves = executed(PTX[form].format(shift=shift), word).view(jnp.bfloat16).reshape(-1, 2)
        low, high = halves.astype(np.float32).T
        expected = np.asarray(numbers, np.float32)
        for found, wanted in ((low, expected), (high, expected[::-1])):
            assert np.isfinite(found).all()
            is_number = np.isfinite(wanted)  # two bytes of float8 are none, and are not stored
            assert is_number.mean() > 0.99
            np.testing.assert_array_equal(found[is_number], wanted[is_number])


@pytest.mark.parametrize("shift", [0, 4, 8, 12])
def test_ptx_decodes_numbers_of_4_bits(shift):
    rng = np.random.default_rng(shift)
    pairs = rng.permutation(2**16).astype(np.uint16)
    scale, low = (rng.normal(size=2**16).astype(jnp.bfloat16) for _ in range(2))
    scale[::100] = np.nan
    words = (x.view(np.uint32) for x in (pairs, scale, low))
    found = executed(FOUR_BITS.format(shift=shift), *words).view(jnp.bfloat16).astype(np.float32)
    arrays = map(jnp.asarray, (pairs, scale, low))
    expected = np.asarray(four_bits(next(arrays), shift, *arrays, True), np.float32)
    is_number = np.arange(2**16) % 100 != 0
    assert (found[~is_number] == LEAST).all() and (expected[~is_number] == LEAST).all()
    # The PTX rounds once, JAX twice.
    within_roundings(found[is_number], expected[is_number], jnp.bfloat16, 1)
    assert (found == expected).mean() > 0.99
