"""Rotation of many vectors by a table, against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Rope
from kvjax.rope import Rotation, TurnTable

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
@pytest.mark.parametrize("tokens", [1, 256, 1000, 40_000])
def test_as_float64_has_it(interleaved, rows, tokens):
    """To rounding, at large positions too: an angle is the sum of two that are as good as exact."""
    frequencies = np.array([FREQUENCIES, FREQUENCIES / 3]) if rows else FREQUENCIES
    frequencies = frequencies.astype(np.float32)
    rope = Rope(jnp.asarray(frequencies), interleaved, 1.5)
    x, positions = vectors(tokens)
    table = TurnTable.below(rope, tokens)
    assert tokens <= table.rows.shape[1] < tokens + 256
    got = rope.turn(jnp.asarray(x), *table.of(jnp.asarray(positions)))
    expected = turned(
        x, positions, np.broadcast_to(frequencies, (BATCH, 3)), interleaved, rope.factor
    )
    # The multiples of 256 are angles rounded to float32, up to 2 ** -24 of themselves.
    np.testing.assert_allclose(got, expected, atol=2e-6 + 4 * tokens * 2**-24)


def products(rope: Rope, q, x, positions, tokens: int):
    """Over blocks of 16 keys, as a decode step has it."""
    rotation = Rotation(rope, jnp.asarray(positions), tokens)

    def compute(product):
        starts = range(0, COUNT, 16)
        return jnp.concatenate([product(q, x[:, :, s : s + 16], s) for s in starts], -1)

    return rotation.logits(compute)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("tokens", "table"), [(500, True), (400, True), (10_000_000, False)], ids=str
)
def test_products(interleaved, tokens, table):
    """From a table, one by one where a position is beyond it, and for few of many positions."""
    rope = Rope(jnp.asarray(FREQUENCIES, jnp.float32), interleaved, 1.5)
    x, positions = vectors(500)
    positions[1, 2, 3] = 513 if tokens == 400 else -1  # beyond a table of 512, or a free slot
    q = np.random.default_rng(1).normal(size=(BATCH, HEADS, 2, DIM)).astype(np.float32)
    got = jax.jit(products, static_argnums=4)(rope, q, x, positions, tokens)
    frequencies = np.broadcast_to(FREQUENCIES, (BATCH, 3))
    keys = turned(x, positions, frequencies, interleaved, rope.factor)
    expected = np.einsum("bhrd,bhsd->bhrs", q, keys)
    there = np.broadcast_to((positions >= 0)[:, :, None], expected.shape)
    np.testing.assert_allclose(np.asarray(got)[there], expected[there], atol=2e-4)
    jaxpr = str(jax.make_jaxpr(products, static_argnums=4)(rope, q, x, positions, tokens))
    assert ("cond[" in jaxpr) == table
