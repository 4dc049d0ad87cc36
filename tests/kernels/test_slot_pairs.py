"""Comparing keys pair by pair, against loops over the reference."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import join_anchors, pair_cosine, pair_distance
from tests.references.kvmerger import cosine, similar_pairs
from tests.support.tolerances import close


@pytest.mark.parametrize("count", [1, 7, 512, 700])
def test_every_pair_is_compared(count):
    """Whole blocks of pairs, none, and a rest."""
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(1, 2, 40, 3)).astype(np.float32)
    keys[0, 0, 5] = 0.0
    first, second = rng.integers(0, 40, (2, 1, 2, count)).astype(np.int32)
    angle = np.asarray(pair_cosine(keys, first, second))
    away = np.asarray(pair_distance(keys, first, second))
    for head, n in np.ndindex(2, count):
        a, b = (keys[0, head, pair[0, head, n]].astype(np.float64) for pair in (first, second))
        close(angle[0, head, n], cosine(a, b), "reference")
        close(away[0, head, n], np.linalg.norm(a - b), "reference")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_that_differ_by_rounding_are_equal(dtype):
    eps = float(jnp.finfo(dtype).eps)
    keys = jnp.asarray([[[[1.0, 2.0], [1 + eps, 2.0], [1 + 16 * eps, 2.0]]]], dtype)
    first, second = np.array([[[0, 1, 2]]]), np.zeros((1, 1, 3), np.int32)
    close(np.asarray(pair_distance(keys, first, second))[0, 0], [0.0, 0.0, 16 * eps])


def test_anchors():
    """Slots in any order, pairs that may not be: the runs of the reference."""
    rng = np.random.default_rng(1)
    keys = np.cumsum(rng.normal(size=(2, 1, 30, 4)), axis=2).astype(np.float32)
    order = rng.permuted(np.broadcast_to(np.arange(30, dtype=np.int32), (2, 1, 30)), axis=-1)
    by_slot = np.empty_like(keys)
    np.put_along_axis(by_slot, order[..., None], keys, axis=2)
    free = rng.random((2, 1, 30)) < 0.9
    pairs = free & np.roll(free, -1, axis=-1)
    pairs[..., -1] = False
    joins = np.asarray(join_anchors(by_slot, order, pairs, 0.8))
    assert joins.sum() > 20
    for row in range(2):
        expected = similar_pairs(keys[row, 0].astype(float), list(free[row, 0]), 0.8, "anchor")
        assert set(np.flatnonzero(joins[row, 0])) == expected
