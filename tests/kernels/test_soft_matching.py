"""Bipartite soft matching against its reference: the same edges with the same similarities."""

from __future__ import annotations

import sys
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import soft_matching
from tests.references.chelsea import soft_matching as reference


def check(keys, count, chunk):
    similarity, partner = map(np.asarray, soft_matching(keys, jnp.asarray(count), chunk=chunk))
    assert similarity.dtype == np.float32 and partner.dtype == np.int32
    own = np.arange(keys.shape[2])
    for row, head in np.ndindex(*keys.shape[:2]):
        edges = reference(np.asarray(keys, np.float64)[row, head, : count[row][head]], chunk)
        expected, leads_to = np.full(len(own), -np.inf), own.copy()
        for each, a, b in edges:
            expected[a], leads_to[a] = each, b
        np.testing.assert_allclose(similarity[row, head], expected, atol=1e-6)
        np.testing.assert_array_equal(partner[row, head], leads_to)


@pytest.mark.parametrize("chunk", [2, 3, 8, 256])
@pytest.mark.parametrize("tokens", [1, 2, 21])
@pytest.mark.fast_cases("1-256", "1-3", "1-8", "2-2", "2-256", "2-3", "2-8")
def test_edges(tokens, chunk):
    """Chunks that don't fill up, heads with fewer tokens than there is room for, and none."""
    rng = np.random.default_rng(tokens)
    keys = jnp.asarray(rng.normal(size=(2, 2, tokens, 4)), jnp.float32)
    check(keys, [[tokens, tokens // 2], [0, 1]], chunk)


def test_long_chunks_go_block_by_block():
    keys = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 37, 4)), jnp.float32)
    module = sys.modules["pallas_kernels.grouping.soft_matching"]
    with mock.patch.object(module, "BLOCK", 4):
        check(keys, [[37, 30]], 37)


def test_ties_go_to_the_lower_token_and_lengths_do_not_matter():
    keys = jnp.asarray(np.eye(3)[[0, 1, 0, 0, 2, 0]], jnp.float32)
    keys = (keys * jnp.arange(1.0, 7.0)[:, None])[None, None]
    similarity, partner = soft_matching(keys, jnp.array([[6]]), chunk=8)
    inf = np.inf
    np.testing.assert_allclose(similarity[0, 0], [1, -inf, 1, -inf, 0, -inf], atol=1e-6)
    assert partner[0, 0].tolist() == [3, 1, 3, 3, 1, 5]


def test_zero_and_nan_keys_have_edges():
    """A zero key is like nothing else; a key without a number is less like anything than that."""
    keys = np.zeros((1, 1, 4, 2))
    keys[0, 0, 1], keys[0, 0, 2] = 1.0, np.nan
    similarity, partner = soft_matching(jnp.asarray(keys, jnp.float32), jnp.array([[4]]), chunk=4)
    assert similarity[0, 0, 0] == 0 and similarity[0, 0, 2] == -2
    assert partner[0, 0].tolist() == [1, 1, 1, 3]


def test_a_chunk_of_one_token_is_refused():
    with pytest.raises(ValueError, match="at least 2, got 1"):
        soft_matching(jnp.ones((1, 1, 4, 2)), jnp.array([[4]]), chunk=1)
