"""Rotation of stored keys, block by block, against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Rope

BATCH, HEADS, COUNT, DIM = 2, 3, 40, 8
FREQUENCIES = 10_000.0 ** (-np.arange(3) / 3)  # of three pairs: the last two channels pass


def turned(x, positions, frequencies, interleaved, factor):
    """Pairs of channels as complex numbers; `frequencies [B, R]`."""
    x = np.asarray(x, np.float64)
    pairs = frequencies.shape[-1]
    first, second = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
        if interleaved
        else (slice(0, pairs), slice(pairs, 2 * pairs))
    )
    angle = positions[..., None] * np.asarray(frequencies, np.float64)[:, None, None]
    z = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angle) * factor
    out = x.copy()
    out[..., first], out[..., second] = z.real, z.imag
    return out


def vectors(most: int):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH, HEADS, COUNT, DIM)).astype(np.float32)
    return x, rng.integers(most, size=(BATCH, HEADS, COUNT))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("tokens", [1, 1000, 10_000_000])
def test_as_float64_has_it(interleaved, rows, tokens):
    """To rounding, at large positions too: angles are whole numbers of turns of 2 ** -32."""
    frequencies = np.array([FREQUENCIES, FREQUENCIES / 3]) if rows else FREQUENCIES
    frequencies = frequencies.astype(np.float32)
    rope = Rope(jnp.asarray(frequencies), interleaved, 1.5)
    x, positions = vectors(tokens)
    got = jax.jit(lambda x, at: rope.at(at).rotate(x))(x, positions)
    expected = turned(
        x, positions, np.broadcast_to(frequencies, (BATCH, 3)), interleaved, rope.factor
    )
    # A frequency is rounded to 2 ** -33 turns.
    np.testing.assert_allclose(got, expected, atol=4e-6 + 8 * np.pi * tokens * 2**-33)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("most", [500, 10_000_000])
def test_products(interleaved, most):
    """Over blocks of 16 keys, as a decode step has it; without a conditional or a loop."""
    rope = Rope(jnp.asarray(FREQUENCIES, jnp.float32), interleaved, 1.5)
    x, positions = vectors(most)
    positions[1, 2, 3] = -1  # a free slot
    q = np.random.default_rng(1).normal(size=(BATCH, HEADS, 2, DIM)).astype(np.float32)

    def products(q, x, positions):
        turn, starts = rope.at(positions), range(0, COUNT, 16)
        return jnp.concatenate([turn.product(q, x[:, :, s : s + 16], s) for s in starts], -1)

    got = jax.jit(products)(q, x, positions)
    frequencies = np.broadcast_to(FREQUENCIES.astype(np.float32), (BATCH, 3))
    keys = turned(x, positions, frequencies, interleaved, rope.factor)
    expected = np.einsum("bhrd,bhsd->bhrs", q, keys)
    there = np.broadcast_to((positions >= 0)[:, :, None], expected.shape)
    atol = 2e-5 + 16 * np.pi * most * 2**-33
    np.testing.assert_allclose(np.asarray(got)[there], expected[there], atol=atol)
    jaxpr = str(jax.make_jaxpr(products)(q, x, positions))
    assert "cond[" not in jaxpr and "while[" not in jaxpr
