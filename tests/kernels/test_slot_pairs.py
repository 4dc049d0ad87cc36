"""Comparing keys pair by pair, against loops over the reference."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import join_anchors, pair_cosine, pair_distance
from tests.references.kvmerger import cosine, similar_pairs
from tests.support.implementations import EVERY, each_way
from tests.support.tolerances import close


def run(operation, *args, implementation, **options):
    call = functools.partial(operation, implementation=implementation, **options)
    return np.asarray(jax.jit(call)(*args))


PAIRS = {f"{n}-{dim}": (n, dim) for n, dim in ((1, 3), (7, 80), (512, 3), (700, 3), (90, 256))}


@pytest.mark.parametrize(
    ("count", "dim", "implementation"), each_way(PAIRS, fast=["7-80", "90-256"])
)
def test_every_pair_is_compared(count, dim, implementation):
    """Whole blocks of pairs, none, and a rest; NaN in a slot that no pair names."""
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(1, 2, 41, dim)).astype(np.float32)
    keys[0, 0, 5] = 0.0
    keys[:, :, 40] = np.nan
    first, second = rng.integers(0, 40, (2, 1, 2, count)).astype(np.int32)
    angle = run(pair_cosine, keys, first, second, implementation=implementation)
    away = run(pair_distance, keys, first, second, implementation=implementation)
    for head, n in np.ndindex(2, count):
        a, b = (keys[0, head, pair[0, head, n]].astype(np.float64) for pair in (first, second))
        close(angle[0, head, n], cosine(a, b), "reference")
        close(away[0, head, n], np.linalg.norm(a - b), "reference")


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_that_differ_by_rounding_are_equal(dtype, implementation):
    eps = float(jnp.finfo(dtype).eps)
    keys = jnp.asarray([[[[1.0, 2.0], [1 + eps, 2.0], [1 + 16 * eps, 2.0]]]], dtype)
    first, second = np.array([[[0, 1, 2]]]), np.zeros((1, 1, 3), np.int32)
    apart = run(pair_distance, keys, first, second, implementation=implementation)
    close(apart[0, 0], [0.0, 0.0, 16 * eps])


@pytest.mark.parametrize("implementation", EVERY)
def test_anchors(implementation):
    """Slots in any order, pairs that may not be: the runs of the reference."""
    rng = np.random.default_rng(1)
    keys = np.cumsum(rng.normal(size=(2, 1, 30, 4)), axis=2).astype(np.float32)
    order = rng.permuted(np.broadcast_to(np.arange(30, dtype=np.int32), (2, 1, 30)), axis=-1)
    by_slot = np.empty_like(keys)
    np.put_along_axis(by_slot, order[..., None], keys, axis=2)
    free = rng.random((2, 1, 30)) < 0.9
    pairs = free & np.roll(free, -1, axis=-1)
    pairs[..., -1] = False
    joins = run(join_anchors, by_slot, order, pairs, threshold=0.8, implementation=implementation)
    assert joins.sum() > 20
    for row in range(2):
        expected = similar_pairs(keys[row, 0].astype(float), list(free[row, 0]), 0.8, "anchor")
        assert set(np.flatnonzero(joins[row, 0])) == expected
