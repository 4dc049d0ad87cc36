"""Buckets along a distance, and centroids of keys, against their references."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.transforms.kvcrush.representatives import (
    bucket_representatives,
    cut,
    nearest_to_centroids,
)
from kvjax.transforms.random import uniform
from tests.references import kvcrush as reference

pick_buckets = jax.jit(bucket_representatives, static_argnums=(3, 4))
nearest = jax.jit(nearest_to_centroids, static_argnums=4)
KEY = jax.random.key(3)


def the_draw(head: int, unit: int) -> float:
    """A number per KV head and position."""
    return float(jax.random.uniform(jax.random.fold_in(jax.random.fold_in(KEY, head), unit)))


def drawn(position):
    return uniform(KEY, position)


@pytest.mark.parametrize("buckets", [1, 2, 5, 7, 16])
def test_buckets_are_equal_runs_along_the_distance(buckets):
    """Ragged: rows with more, as many and fewer evicted units than buckets, and none."""
    rng = np.random.default_rng(buckets)
    distance = rng.integers(0, 4, (4, 30))
    evicted = rng.random((4, 2, 30)) < np.array([1.0, 0.5, 0.15, 0.0])[:, None, None]
    given = jnp.asarray(distance, jnp.int32), jnp.asarray(evicted), jnp.full(4, buckets)
    for own, draw in ((None, None), (drawn, the_draw)):
        chosen = pick_buckets(*given, 16, own)
        for row, head in itertools.product(range(4), range(2)):
            units = {u: int(distance[row, u]) for u in np.flatnonzero(evicted[row, head]).tolist()}
            one = None if draw is None else functools.partial(draw, head)
            runs = reference.buckets(units, buckets)
            expected = sorted(reference.pick(run, one) for run in runs)
            assert np.flatnonzero(chosen[row, head]).tolist() == expected


@pytest.mark.parametrize(
    ("members", "buckets"),
    [(2_000_000_011, 2048), (999_999, 250_000), (139_999, 70_000), (300, 257)],
)
def test_the_first_rank_of_a_bucket_does_not_overflow(members, buckets):
    start, length = jax.jit(cut, static_argnums=2)(
        jnp.array([[members]]), jnp.array([buckets]), buckets
    )
    expected = np.arange(buckets + 1) * members // buckets
    np.testing.assert_array_equal(start[0, 0], expected[:-1])
    np.testing.assert_array_equal(length[0, 0], np.diff(expected))


@pytest.mark.parametrize("count", [1, 4, 9, 30])
@pytest.mark.fast_cases("1")
def test_nearest_to_centroids(count):
    """Slots in any order; rows with 24, 12 and no evicted tokens; clusters that go empty."""
    rng = np.random.default_rng(count)
    keys = (rng.integers(0, 3, (3, 2, 24, 1)) * 5 + rng.normal(size=(3, 2, 24, 4))).astype("f")
    position = rng.permuted(np.broadcast_to(np.arange(24), (3, 2, 24)), axis=-1)
    evicted = rng.permuted(np.arange(24) < np.array([24, 12, 0])[:, None, None], axis=-1)
    evicted = np.broadcast_to(evicted, (3, 2, 24))
    chosen = nearest(keys, evicted, jnp.asarray(position, jnp.int32), jnp.full(3, count), count)
    for row, head in np.ndindex(3, 2):
        own = [s for s in np.argsort(position[row, head]) if evicted[row, head, s]]
        picked = reference.kmeans(np.float64(keys[row, head, own]), count)
        expected = sorted(int(own[i]) for i in picked)
        assert np.flatnonzero(chosen[row, head]).tolist() == expected


def test_centroids_of_equal_keys_still_meet_their_count():
    """All in one cluster: what the empty ones leave goes by position."""
    keys, evicted = jnp.ones((1, 1, 9, 4)), jnp.arange(9)[None, None] > 1
    position = jnp.arange(9, dtype=jnp.int32)[None, None]
    chosen = nearest(keys, evicted, position, jnp.array([3]), 3)
    assert np.flatnonzero(chosen[0, 0]).tolist() == [2, 3, 4]
