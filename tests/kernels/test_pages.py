"""Bounds and scores of pages against the reference; no key of a page is above its page's score."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import page_bounds, page_scores
from tests.references import quest as reference
from tests.support.tolerances import close


def check(q, low, high):
    score = np.asarray(page_scores(q, low, high))
    assert score.dtype == np.float32 and score.shape == (*q.shape[:3], low.shape[2])
    q, low, high = (np.asarray(x, np.float64) for x in (q, low, high))
    for row, head, g in np.ndindex(q.shape[:3]):
        expected = reference.page_scores(q[row, head, g], low[row, head], high[row, head])
        close(score[row, head, g], expected, "reference")
    return score


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("group", "pages"), [(1, 1), (4, 9)])
def test_scores(group, pages, dtype):
    """Bounds of either sign; float32 products whatever the dtype."""
    rng = np.random.default_rng(pages)
    q = jnp.asarray(rng.normal(size=(2, 3, group, 16)), dtype)
    keys = rng.normal(size=(2, 3, pages, 5, 16)) + rng.normal(size=(2, 3, pages, 1, 16))
    keys = jnp.asarray(keys, dtype)
    score = check(q, keys.min(3), keys.max(3))
    keys, q = (np.asarray(x, np.float64) for x in (keys, q))
    dots = np.einsum("bhgd,bhpnd->bhgpn", q, keys)
    assert (score[..., None] >= dots - 1e-5).all()


def test_queries_take_the_dtype_of_the_bounds():
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(1, 1, 2, 8)), jnp.float32)
    low = jnp.asarray(rng.normal(size=(1, 1, 3, 8)), jnp.bfloat16)
    np.testing.assert_array_equal(
        page_scores(q, low, low + 1), page_scores(q.astype(jnp.bfloat16), low, low + 1)
    )


def test_zeros_and_equal_bounds():
    """A page of one key scores that key's product; a zero of the query takes neither bound."""
    rng = np.random.default_rng(1)
    q = rng.integers(-1, 2, (1, 2, 2, 6)).astype(np.float32)
    key = rng.integers(-5, 6, (1, 2, 4, 6)).astype(np.float32)
    score = check(q, key, key)
    np.testing.assert_array_equal(score, np.einsum("bhgd,bhpd->bhgp", q, key))
    assert (check(0 * q, key, key) == 0).all()


def test_an_implementation_that_is_not_offered():
    x = np.ones((1, 1, 1, 2), np.float32)
    with pytest.raises(ValueError, match="'cuda'"):
        page_scores(x, x, x, implementation="cuda")


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("slots", [1, 37, 2100])  # the last takes more than one block
@pytest.mark.fast_cases("1-16", "1-4", "37-16", "37-4")
def test_bounds(slots, page):
    """Heads with more and fewer tokens, which stand anywhere; no token reaches a page twice."""
    rng = np.random.default_rng(slots)
    keys = rng.normal(size=(2, 2, slots, 3)).astype(np.float32)
    order = np.argsort(rng.random((2, 2, slots)), axis=-1).astype(np.int32)
    count = rng.integers(0, slots + 1, (2, 2)).astype(np.int32)
    count[0, 0] = slots
    pages = -(-slots // page) + 1  # the last is of nobody
    low, high = page_bounds(jnp.asarray(keys), jnp.asarray(order), jnp.asarray(count), page, pages)
    for row, head in np.ndindex(2, 2):
        own = keys[row, head][order[row, head][: count[row, head]]]
        expected = np.zeros((2, pages, 3))
        if len(own):
            expected[:, : -(-len(own) // page)] = reference.page_bounds(own, page)
        np.testing.assert_array_equal(low[row, head], expected[0])
        np.testing.assert_array_equal(high[row, head], expected[1])
