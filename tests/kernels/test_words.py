"""Words of stored bytes: the PTX that a GPU runs computes what interpreted kernels compute."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.words import PTX, bytes_of

WORDS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
}
"""Instruction → what it makes of words of 32 bits."""


def fma(*words):
    """`a · b + c` of both halves of words, as bfloat16, rounded once."""
    a, b, c = (word.view(jnp.bfloat16).astype(np.float64) for word in words)
    return (a * b + c).astype(jnp.bfloat16).view(np.uint32)


def executed(asm: str, word: np.ndarray) -> np.ndarray:
    """Runs instructions of PTX on words $1; what they write into $0."""
    held = {"$1": word}
    for line in asm.strip("{}\n").splitlines():
        name, rest = line.rstrip(";").split(" ", 1)
        if name == ".reg":
            continue
        result, *operands = re.split(", ", rest)
        words = [held[x] if x in held else np.full_like(word, int(x, 0)) for x in operands]
        held[result] = (fma if name == "fma.rn.bf16x2" else WORDS[name])(*words)
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
