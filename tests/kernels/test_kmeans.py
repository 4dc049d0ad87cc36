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
from tests.references.kmeans import assign
from tests.references.kmeans import kmeans as reference
from tests.support.tolerances import close

METRICS = ("cosine", "l2", "inner_product")
TOKENS, CLUSTERS = 60, 7
FULL = np.ones((1, 1, 1), bool)


def run(keys, members, centroids, there, **options):
    jitted = jax.jit(functools.partial(kmeans, **options))
    label, moved = map(np.asarray, jitted(keys, members, centroids, there))
    assert label.dtype == np.int32 and moved.dtype == np.float32
    return label, moved


def check(keys, members, centroids, there, margin=1e-5, **options):
    """Every row and head against the reference, on data that float32 can't confuse."""
    label, moved = run(keys, members, centroids, there, **options)
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


@pytest.mark.parametrize("rounds", [0, 1, 3, 20])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.fast_cases("cosine-20", "inner_product-1", "l2-0", "l2-1")
def test_ragged_rows(metric, rounds):
    label = check(*ragged(rounds), metric=metric, rounds=rounds)
    assert len(np.unique(label[0, 0])) > 3 and label.max() == CLUSTERS


@pytest.mark.parametrize("metric", METRICS)
def test_bfloat16_keys(metric):
    """Means and similarities are float32."""
    check(*ragged(5, "bfloat16"), metric=metric)


@pytest.mark.parametrize("most", [7, 7 * 13, 3 * 7 * TOKENS])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.fast_cases("cosine-91", "l2-7", "l2-91")
def test_few_similarities_at_a_time(metric, most):
    """Token by token, in blocks with a rest, and three heads at a time."""
    module = sys.modules["pallas_kernels.grouping.kmeans"]  # the package's name is the function's
    with mock.patch.multiple(module, SIMILARITIES=most, ACCELERATOR_SIMILARITIES=most):
        check(*ragged(0), metric=metric)


@pytest.mark.parametrize("metric", METRICS)
def test_ties_go_to_the_lower_cluster(metric):
    """Whole numbers, and centroids along the axes: both computations are exact."""
    rng = np.random.default_rng(0)
    keys = rng.integers(-2, 3, (1, 1, 200, 4)).astype(np.float32)
    centroids = np.concatenate((3 * np.eye(4), -3 * np.eye(4), 3 * np.eye(4)), dtype=np.float32)
    members, there = np.ones((1, 1, 200), bool), np.ones((1, 1, 12), bool)
    there[..., 1] = False  # of two equal ones, the first isn't there
    check(keys, members, centroids[None, None], there, metric=metric, rounds=0)


@pytest.mark.parametrize("metric", METRICS)
def test_an_empty_cluster_keeps_its_centroid(metric):
    """The second of two equal ones, and one that nothing is close to."""
    rng = np.random.default_rng(1)
    keys = rng.normal(size=(1, 1, 40, 4)).astype(np.float32)
    keys[..., 0] = np.abs(keys[..., 0]) + 3
    centroids = keys[:, :, [0, 1, 0, 2]]
    centroids[:, :, 3] = [-100, 0, 0, 0]
    members, there = np.ones((1, 1, 40), bool), np.ones((1, 1, 4), bool)
    label = check(keys, members, centroids, there, metric=metric, rounds=1)
    assert 3 not in label
    _, moved = run(keys, members, centroids, there, metric=metric, rounds=1)
    np.testing.assert_array_equal(moved[0, 0, 3], centroids[0, 0, 3])
    label, moved = run(keys, members, centroids, there, metric=metric, rounds=0)
    assert not np.isin(label, [2, 3]).any()
    np.testing.assert_array_equal(moved, centroids)


def test_equal_keys_are_one_cluster():
    keys = np.tile(np.array([1.0, 2.0, 2.0, 4.0], np.float32), (1, 1, 9, 1))
    members, there = np.ones((1, 1, 9), bool), np.ones((1, 1, 3), bool)
    for metric in METRICS:
        label = check(keys, members, keys[:, :, :3], there, metric=metric)
        assert (label == 0).all()


def test_zero_keys_and_zero_centroids():
    """Cosine 0: above an opposite direction, below a like one, and no NaN."""
    keys = np.array([[0, 0], [2, 0], [-1, 0], [1, 0]], np.float32)[None, None]
    centroids = np.array([[0, 0], [1, 0]], np.float32)[None, None]
    members, there = np.ones((1, 1, 4), bool), np.ones((1, 1, 2), bool)
    label = check(keys, members, centroids, there, rounds=0)
    assert label[0, 0].tolist() == [0, 1, 0, 1]
    check(keys, members, centroids, there, rounds=1)


@pytest.mark.parametrize("metric", METRICS)
def test_one_cluster(metric):
    """All keys, whatever they are; its centroid is their mean."""
    keys, members, centroids, _ = ragged(3)
    there = np.ones((4, 2, 1), bool)
    label = check(keys, members, centroids[:, :, :1], there, metric=metric)
    np.testing.assert_array_equal(label, ~members)


def test_members_without_any_cluster():
    """They are in none, like those that are no members."""
    keys, members, centroids, there = ragged(4)
    label, _ = run(keys, members, centroids, np.zeros_like(there))
    assert (label == CLUSTERS).all()


def test_it_ends_when_no_label_changes():
    """Keys that are their own centroids: no move without labels, one with them, and no more."""
    keys = np.eye(3, dtype=np.float32)[None, None]
    there, moves = np.ones((1, 1, 3), bool), []
    module = sys.modules["pallas_kernels.grouping.kmeans"]
    means = module._means

    def counted(*args):
        jax.debug.callback(lambda: moves.append(1))
        return means(*args)

    with mock.patch.object(module, "_means", counted):
        label, _ = run(keys, there, keys, there)
    jax.effects_barrier()
    assert label[0, 0].tolist() == [0, 1, 2] and len(moves) == 2


def test_labels_are_those_of_the_final_centroids():
    keys, members, centroids, there = ragged(7)
    label, moved = run(keys, members, centroids, there, rounds=2)
    own = np.flatnonzero(members[0, 0])
    expected, _ = assign(np.asarray(keys[0, 0, own], np.float64), moved[0, 0], "cosine")
    assert label[0, 0, own].tolist() == expected
    assert (label != run(keys, members, centroids, there, rounds=1)[0]).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "dot"}, r"'cosine', 'l2', 'inner_product'.*'dot'"),
        ({"rounds": -1}, "at least 0, got -1"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        kmeans(np.ones((1, 1, 1, 2), np.float32), FULL, np.ones((1, 1, 1, 2)), FULL, **options)
