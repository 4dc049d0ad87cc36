"""k-means against its reference: the same labels from the same initial centroids."""

from __future__ import annotations

import functools
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kmeans
from tests.references.kmeans import kmeans as reference
from tests.support.attention_cases import use_small_tiles
from tests.support.implementations import EVERY, KERNELS, each_way
from tests.support.tolerances import close

METRICS = ("cosine", "l2", "inner_product")
TOKENS, CLUSTERS = 60, 7


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """16 keys and 16 clusters, so that few of them need several."""
    use_small_tiles(monkeypatch)


def run(keys, members, centroids, there, **options):
    jitted = jax.jit(functools.partial(kmeans, **options))
    label, moved = map(np.asarray, jitted(keys, members, centroids, there))
    assert label.dtype == np.int32 and moved.dtype == np.float32
    return label, moved


def check(keys, members, centroids, there, margin=1e-5, implementation="xla", **options):
    """Every row and head against the reference, on data that float32 can't confuse."""
    label, moved = run(keys, members, centroids, there, implementation=implementation, **options)
    keys, start = np.asarray(keys, np.float64), np.asarray(centroids, np.float64)
    for where in np.ndindex(keys.shape[:2]):
        own, clusters = np.flatnonzero(members[where]), np.flatnonzero(there[where])
        expected, means = np.full(keys.shape[2], len(there[where])), start[where].copy()
        if len(clusters):
            labels, means[clusters], gap = reference(
                keys[where][own], start[where][clusters], **options
            )
            assert gap > margin
            expected[own] = clusters[np.array(labels, int)]
        np.testing.assert_array_equal(label[where], expected)
        close(moved[where], means, "rounding", "centroids")
    return label


def ragged(seed, dtype="float32"):
    """Rows: all tokens, about a half, fewer than clusters, none. NaN where nothing is."""
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(4, 2, TOKENS, 8)) + 0.5 * rng.normal(size=(4, 2, 1, 8))
    share = np.array([[1.0, 0.9], [0.5, 0.6], [0.0, 0.0], [0.0, 0.0]])
    members = rng.random((4, 2, TOKENS)) < share[..., None]
    members[2, :, [4, 31, 50]] = True
    there = np.arange(CLUSTERS) < np.array([[7, 7], [5, 1], [3, 2], [0, 0]])[..., None]
    there[0, 1] = np.arange(CLUSTERS) % 3 != 1  # in any places
    chosen = np.argsort(~members + rng.random(members.shape), axis=-1)[..., :CLUSTERS, None]
    keys = np.where(members[..., None], keys, np.nan)
    centroids = np.take_along_axis(keys, chosen, axis=2)
    centroids = np.where(there[..., None], centroids, np.nan)
    return jnp.asarray(keys, dtype), members, jnp.asarray(centroids, dtype), there


RAGGED = {
    f"{metric}-{rounds}-{dtype}": (metric, rounds, dtype)
    for metric, rounds, dtype in (
        ("cosine", 20, "float32"), ("inner_product", 1, "float32"), ("l2", 0, "float32"),
        ("l2", 3, "float32"), ("cosine", 20, "bfloat16"),
        ("l2", 20, "bfloat16"),
    )
}  # fmt: skip


@pytest.mark.parametrize(
    ("metric", "rounds", "dtype", "implementation"),
    each_way(RAGGED, fast=["cosine-20-float32", "inner_product-1-float32", "l2-20-bfloat16"]),
)
def test_ragged_rows(metric, rounds, dtype, implementation):
    """Means and similarities are float32."""
    rows = ragged(rounds if dtype == "float32" else 5, dtype)
    label = check(*rows, metric=metric, rounds=rounds, implementation=implementation)
    assert len(np.unique(label[0, 0])) > 3 and label.max() == CLUSTERS


@pytest.mark.parametrize(
    ("metric", "most"),
    [("l2", 7), ("cosine", 7 * 13), ("l2", 7 * 13), ("inner_product", 3 * 7 * TOKENS)],
)
def test_few_similarities_at_a_time(metric, most):
    """Token by token, in blocks with a rest, and three heads at a time."""
    module = sys.modules["pallas_kernels.grouping.kmeans"]  # the package's name is the function's
    with mock.patch.multiple(module, SIMILARITIES=most, ACCELERATOR_SIMILARITIES=most):
        check(*ragged(0), metric=metric)


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize("metric", METRICS)
def test_ties_go_to_the_lower_cluster(metric, implementation):
    """Whole numbers, and centroids along the axes: both computations are exact."""
    rng = np.random.default_rng(0)
    keys = rng.integers(-2, 3, (1, 1, 200, 4)).astype(np.float32)
    centroids = np.concatenate((3 * np.eye(4), -3 * np.eye(4), 3 * np.eye(4)), dtype=np.float32)
    members, there = np.ones((1, 1, 200), bool), np.ones((1, 1, 12), bool)
    there[..., 1] = False  # of two equal ones, the first isn't there
    kind = {"metric": metric, "rounds": 0, "implementation": implementation}
    check(keys, members, centroids[None, None], there, **kind)


@pytest.mark.parametrize("implementation", EVERY)
def test_members_without_any_cluster(implementation):
    """They are in none, like keys that are not members."""
    keys, members, centroids, there = ragged(4)
    label, _ = run(keys, members, centroids, np.zeros_like(there), implementation=implementation)
    assert (label == CLUSTERS).all()


# --- the kernels ----------------------------------------------------------------------------------


TILES = {
    f"{dim}-{dtype}": (dim, dtype)
    for dim, dtype in ((64, "float16"), (80, "float32"), (128, "bfloat16"), (256, "bfloat16"))
}


@pytest.mark.parametrize(
    ("dim", "dtype", "implementation"), each_way(TILES, fast=["80-float32"], xla=False)
)
def test_more_keys_clusters_and_channels_than_a_tile(dim, dtype, implementation):
    """A key in each of 37 clusters, and many in some: whole tiles of clusters may have none."""
    rng = np.random.default_rng(dim)
    centre = 10 * rng.normal(size=(1, 2, 37, dim))
    owner = np.concatenate((np.arange(37), rng.integers(0, 5, 60)))
    keys = jnp.asarray(centre[:, :, owner] + rng.normal(size=(1, 2, 97, dim)), dtype)
    members, there = np.ones((1, 2, 97), bool), np.ones((1, 2, 37), bool)
    members[0, 1, 20:] = False
    start = jnp.asarray(centre, jnp.float32)
    check(keys, members, start, there, implementation=implementation, rounds=2)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("shape", [(0, 2, 5, 3), (2, 1, 0, 3), (1, 1, 5, 0)])
def test_without_keys_or_clusters(shape, implementation):
    rows, heads, size, clusters = shape
    keys, members = jnp.ones((rows, heads, size, 4)), jnp.ones((rows, heads, size), bool)
    start, there = 2 * jnp.ones((rows, heads, clusters, 4)), jnp.ones((rows, heads, clusters), bool)
    label, moved = run(keys, members, start, there, implementation=implementation)
    assert label.shape == members.shape and (label == clusters).all()
    np.testing.assert_array_equal(moved, start)
