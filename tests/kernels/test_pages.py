"""Bounds and scores of pages against the reference; no key of a page is above its page's score."""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import page_bounds, page_moments, page_scores
from tests.references import quest as reference
from tests.support.implementations import EVERY, each_way
from tests.support.tolerances import close

module = importlib.import_module("pallas_kernels.recall.page_scores")


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(module, "TILE_BYTES", 1)


def scores_by(implementation, q, low, high):
    """By a function of its own: what is compiled for other tiles must not be used again."""
    call = jax.jit(functools.partial(page_scores, implementation=implementation))
    return np.asarray(call(q, low, high))


CASES = {
    f"{group}-{dim}-{dtype}": (group, dim, dtype)
    for group, dim, dtype in (
        (1, 64, "float32"), (3, 96, "float16"), (4, 128, "bfloat16"), (16, 128, "float32"),
        (5, 3, "bfloat16"),
    )
}  # fmt: skip


@pytest.mark.parametrize(
    ("group", "dim", "dtype", "implementation"),
    each_way(CASES, fast=["1-64-float32", "3-96-float16", "5-3-bfloat16"]),
)
def test_scores(group, dim, dtype, implementation, small_tiles):
    """Bounds of either sign, several tiles of pages; queries take the dtype of the bounds."""
    rng = np.random.default_rng(group + dim)
    pages = 1 if dim == 3 else 35
    q = rng.normal(size=(2, 2, group, dim)).astype(np.float32)
    keys = rng.normal(size=(2, 2, pages, 3, dim)) + rng.normal(size=(2, 2, pages, 1, dim))
    keys = keys.astype(jnp.dtype(dtype))
    low, high = keys.min(3), keys.max(3)
    score = scores_by(implementation, q, low, high)
    assert score.dtype == np.float32 and score.shape == (2, 2, group, pages)
    q, low, high = (x.astype(np.float64) for x in (q.astype(low.dtype), low, high))
    for row, head, g in np.ndindex(2, 2, group):
        expected = reference.page_scores(q[row, head, g], low[row, head], high[row, head])
        close(score[row, head, g], expected)
    dots = np.einsum("bhgd,bhpnd->bhgpn", q, keys.astype(np.float64))
    assert (score[..., None] >= dots - 1e-4).all()


@pytest.mark.parametrize("implementation", EVERY)
def test_zeros_and_equal_bounds(implementation):
    """A page of one key scores that key's product; a zero of the query takes neither bound."""
    rng = np.random.default_rng(1)
    q = rng.integers(-1, 2, (1, 2, 2, 6)).astype(np.float32)
    key = rng.integers(-5, 6, (1, 2, 4, 6)).astype(np.float32)
    score = scores_by(implementation, q, key, key)
    np.testing.assert_array_equal(score, np.einsum("bhgd,bhpd->bhgp", q, key))
    assert (scores_by(implementation, 0 * q, key, key) == 0).all()


@pytest.mark.parametrize(
    ("slots", "page"),
    # The last takes more than one block.
    [(1, 4), (37, 1), (37, 4), (37, 16), pytest.param(2100, 16, marks=pytest.mark.slow)],
)
def test_bounds_and_moments(slots, page):
    """Heads with more and fewer tokens, which stand anywhere; no token reaches a page twice."""
    rng = np.random.default_rng(slots)
    keys = rng.normal(size=(2, 2, slots, 3)).astype(np.float32)
    order = np.argsort(rng.random((2, 2, slots)), axis=-1).astype(np.int32)
    count = rng.integers(0, slots + 1, (2, 2)).astype(np.int32)
    count[0, 0] = slots
    pages = -(-slots // page) + 1  # the last is of nobody
    arguments = *map(jnp.asarray, (keys, order, count)), page, pages
    low, high = page_bounds(*arguments)
    mass = rng.integers(1, 4, (2, 2, slots)).astype(np.float32)
    mean, variance = page_moments(arguments[0], jnp.asarray(mass), *arguments[1:])
    for row, head in np.ndindex(2, 2):
        taken = order[row, head][: count[row, head]]
        own, weights = keys[row, head][taken], mass[row, head][taken]
        expected, moments = np.zeros((2, 2, pages, 3))
        if len(own):
            expected[:, : -(-len(own) // page)] = reference.page_bounds(own, page)
            of_pages = reference.page_moments(own.astype(float), weights.astype(float), page)
            moments[:, : -(-len(own) // page)] = of_pages
        close(mean[row, head], moments[0])
        close(variance[row, head], moments[1])
        np.testing.assert_array_equal(low[row, head], expected[0])
        np.testing.assert_array_equal(high[row, head], expected[1])
