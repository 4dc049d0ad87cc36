"""Which slots are kept: the best of ragged candidates, ties to the lower position."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.selection import keep_best
from tests.support.marks import slow

SCORES = {
    "random": lambda rng, shape: rng.normal(size=shape),
    "ties": lambda rng, shape: rng.integers(-1, 2, shape),
    "equal": lambda rng, shape: np.zeros(shape),
    "signed zeros": lambda rng, shape: np.where(rng.random(shape) < 0.5, -0.0, 0.0),
    "infinite": lambda rng, shape: rng.choice([-np.inf, np.inf, 0.5], shape),
    "neighbours": lambda rng, shape: 1 + rng.integers(0, 4, shape) * 2.0**-23,
    "tiny": lambda rng, shape: rng.integers(-3, 3, shape) * 1e-37,
    "subnormal": lambda rng, shape: rng.integers(-9, 10, shape) * np.float32(1e-45),
    "any bits": lambda rng, shape: any_floats(rng, shape),
}


def any_floats(rng, shape):
    """Every float32 but NaN is as likely as any other, subnormal and infinite ones among them."""
    found = rng.integers(0, 2**32, shape, np.uint32).view(np.float32)
    return np.where(np.isnan(found), np.float32(np.inf), found)


LOOP, UNROLLED = (jax.jit(functools.partial(keep_best, unroll=unroll)) for unroll in (False, True))


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("per_head", [False, True])
def test_keep_best(name, per_head):
    rng = np.random.default_rng(0)
    shape = (4, 2, 33)
    score = SCORES[name](rng, shape).astype(np.float32)
    candidates = rng.random(shape) < np.array([1.0, 0.6, 0.1, 0.0])[:, None, None]
    position = rng.permuted(np.broadcast_to(np.arange(33) * 65_000_000, shape), axis=-1)
    for count in (0, 1, 3, 20, 33, 40):
        counts = np.array([count, max(count - 1, 0), count, count])
        counts = np.stack([counts, counts + 1], 1) if per_head else counts
        given = (
            score, candidates, jnp.asarray(position, jnp.int32), jnp.asarray(counts, jnp.int32)
        )  # fmt: skip
        kept = LOOP(*given)
        np.testing.assert_array_equal(UNROLLED(*given), kept)
        for row, head in np.ndindex(4, 2):
            own = np.flatnonzero(candidates[row, head]).tolist()
            own.sort(key=lambda i: (-score[row, head, i], position[row, head, i]))
            expected = sorted(own[: counts[row, head] if per_head else counts[row]])
            assert np.flatnonzero(kept[row, head]).tolist() == expected


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(("random", 2048), ("subnormal", 2048), ("any bits", 2048), ("any bits", 10**6)),
        *slow(("random", 10**6), ("subnormal", 10**6)),
    ],
)
def test_it_is_a_stable_sort(name, size):
    """The first of the scores sorted from the highest on, equal ones in the order of position."""
    score = np.asarray(SCORES[name](np.random.default_rng(1), (1, 1, size)), np.float32)
    everything = np.ones(score.shape, bool)
    position = jnp.arange(size, dtype=jnp.int32)[None, None]
    order = np.argsort(-score[0, 0], kind="stable")
    for count in (0, 1, size // 5, size - 1, size):
        kept = LOOP(score, everything, position, jnp.array([count], jnp.int32))
        np.testing.assert_array_equal(np.flatnonzero(kept), np.sort(order[:count]))


def test_keep_best_of_numbers_that_are_none():
    """Whichever it takes, they are as many as asked for."""
    score, everything = jnp.full((1, 1, 9), jnp.nan), jnp.ones((1, 1, 9), bool)
    position = jnp.arange(9, dtype=jnp.int32)[None, None]
    assert int(keep_best(score, everything, position, jnp.array([4])).sum()) == 4
