"""Ranking clusters and listing their slots, against the references."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import build_indices, rank_clusters
from tests.references import cluster_selection as reference

ranked = jax.jit(rank_clusters, static_argnames=("per_query_head", "group_reduce"))
listed = jax.jit(build_indices, static_argnums=4)
SIZES = np.array([[[3, 2, 0]]], np.int32)


def check_ranks(q, centroids, sizes, per_query_head, group_reduce="max"):
    options = {"per_query_head": per_query_head, "group_reduce": group_reduce}
    order = np.asarray(ranked(q, centroids, sizes, **options))
    assert order.dtype == np.int32
    rows, heads, group, _ = q.shape
    choices = group if per_query_head else 1
    assert order.shape == (rows, heads * choices, centroids.shape[2])
    for row, head, g in np.ndindex(rows, heads, choices):
        own = q[row, head, g : g + 1] if per_query_head else q[row, head]
        expected = reference.rank_clusters(
            np.asarray(own, np.float64),
            np.asarray(centroids[row, head], np.float64),
            sizes[row, head].tolist(),
            group_reduce,
        )
        assert order[row, head * choices + g].tolist() == expected
    return order


CHOICES = [(False, "max"), (False, "mean"), (True, "max"), (True, "mean")]


@pytest.mark.parametrize(("per_query_head", "group_reduce"), CHOICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("group", "clusters"), [(4, 30), (1, 5), (3, 1)])
def test_ranks(group, clusters, dtype, per_query_head, group_reduce):
    rng = np.random.default_rng(clusters)
    q = jnp.asarray(rng.normal(size=(2, 3, group, 8)), dtype)
    centroids = rng.normal(size=(2, 3, clusters, 8)).astype(np.float32)
    sizes = rng.integers(0, 4, (2, 3, clusters)).astype(np.int32)
    check_ranks(q, centroids, sizes, per_query_head, group_reduce)


@pytest.mark.parametrize(("per_query_head", "group_reduce"), CHOICES[:3])
def test_ties_go_to_the_lower_and_empty_clusters_come_last(per_query_head, group_reduce):
    """Small whole numbers: many equal scores, zero of either sign among them."""
    rng = np.random.default_rng(0)
    q = rng.integers(-1, 2, (3, 2, 4, 3)).astype(np.float32)
    q[2] = -0.0
    centroids = rng.integers(-2, 3, (3, 2, 50, 3)).astype(np.float32)
    sizes = rng.integers(0, 3, (3, 2, 50)).astype(np.int32)
    sizes[1, 0] = 0
    order = check_ranks(q, centroids, sizes, per_query_head, group_reduce)
    assert order[1, 0].tolist() == list(range(50))


@pytest.mark.parametrize("most", [1, 7, 50])
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_the_first_of_a_ranking(most, implementation):
    rng = np.random.default_rng(0)
    q = rng.integers(-2, 3, (2, 2, 3, 4)).astype(np.float32)
    centroids = rng.integers(-2, 3, (2, 2, 50, 4)).astype(np.float32)
    sizes = rng.integers(0, 3, (2, 2, 50)).astype(np.int32)
    whole = rank_clusters(q, centroids, sizes)
    first = rank_clusters(q, centroids, sizes, most=most, implementation=implementation)
    np.testing.assert_array_equal(first, whole[..., :most])
    count = np.full((2, 1), 5, np.int32)
    listed = functools.partial(build_indices, implementation=implementation)
    got, expected = (
        listed(order, sizes, sizes.cumsum(-1) - sizes, count, 5) for order in (first, whole)
    )
    there = np.minimum(np.take_along_axis(sizes, np.asarray(first), -1).sum(-1), 5)
    for row, head in np.ndindex(2, 2):
        stop = there[row, head]
        np.testing.assert_array_equal(got[row, head, :stop], expected[row, head, :stop])
        assert (got[row, head, stop:] == -1).all()


def check_list(order, sizes, starts, count, length):
    index = np.asarray(listed(order, sizes, starts, count, length))
    assert index.dtype == np.int32 and index.shape == (*order.shape[:2], length)
    group = order.shape[1] // sizes.shape[1]
    for row, choice in np.ndindex(order.shape[:2]):
        head = choice // group
        expected = reference.build_indices(
            order[row, choice].tolist(),
            sizes[row, head].tolist(),
            starts[row, head].tolist(),
            int(np.broadcast_to(count, order.shape[:2])[row, choice]),
            length,
        )
        assert index[row, choice].tolist() == expected


@st.composite
def selections(draw):
    """Few shapes, so that few are compiled; any sizes, orders, counts and gaps between clusters."""
    rows, heads, group, clusters, length = draw(
        st.sampled_from([(1, 1, 1, 1, 1), (2, 1, 3, 5, 12), (1, 2, 1, 8, 30), (1, 2, 2, 8, 5)])
    )
    choices = heads * group

    def integers(shape, most):
        size = int(np.prod(shape))
        values = draw(st.lists(st.integers(0, most), min_size=size, max_size=size))
        return np.array(values, np.int32).reshape(shape)

    sizes = integers((rows, heads, clusters), 6)
    gaps = integers((rows, heads, clusters), 2)
    starts = (np.cumsum(sizes + gaps, axis=-1) - sizes).astype(np.int32)
    orders = draw(
        st.lists(st.permutations(range(clusters)), min_size=rows * choices, max_size=rows * choices)
    )
    order = np.array(orders, np.int32).reshape(rows, choices, clusters)
    count = integers((rows, draw(st.sampled_from((1, choices)))), length + 10)
    return order, sizes, starts, count, length


@settings(max_examples=200, deadline=None)
@given(selections())
@pytest.mark.slow
def test_any_list(selection):
    """Empty clusters anywhere, counts from none to more than there is and than has room."""
    check_list(*selection)


@pytest.mark.parametrize("per_query_head", [False, True])
def test_ranked_clusters_listed(per_query_head):
    """Both, at a larger size: every list is the best clusters, cut within one of them."""
    rng = np.random.default_rng(2)
    q = rng.normal(size=(2, 2, 4, 8)).astype(np.float32)
    centroids = rng.normal(size=(2, 2, 60, 8)).astype(np.float32)
    sizes = rng.integers(0, 40, (2, 2, 60)).astype(np.int32)
    starts = (np.cumsum(sizes, axis=-1) - sizes + 16).astype(np.int32)
    order = check_ranks(q, centroids, sizes, per_query_head)
    for count in (np.full((2, 1), 200), np.array([[0], [5000]])):
        check_list(order, sizes, starts, count.astype(np.int32), 256)


def test_large_slot_numbers():
    """Starts near the largest int32, in falling order."""
    starts = np.array([[[2**31 - 4, 10, 2**30]]], np.int32)
    count = np.array([[5]], np.int32)
    check_list(np.array([[[0, 1, 2]]], np.int32), SIZES, starts, count, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda order, count: rank_clusters(count, count, count, implementation="cuda"), "'cuda'"),
        (
            functools.partial(
                build_indices, sizes=SIZES, starts=SIZES, length=4, implementation="a"
            ),
            "'a'",
        ),
        (
            lambda order, count: rank_clusters(
                np.zeros((1, 1, 1, 2)), np.zeros((1, 1, 3, 2)), SIZES, most=4
            ),
            "most must be from 1 to 3, got 4",
        ),
        (
            lambda order, count: build_indices(order, SIZES[..., :2], SIZES[..., :2], count, 4),
            "order must rank at most 2 clusters, got 3",
        ),
        (
            lambda order, count: build_indices(order, SIZES, SIZES, count, 0),
            "at least 1, got 0",
        ),
        (
            lambda order, count: build_indices(order, SIZES, SIZES, count[0], 4),
            r"\(1, 3\) or \(1, 1\), got \(3,\)",
        ),
        (
            lambda order, count: build_indices(
                order, np.repeat(SIZES, 2, 1), np.repeat(SIZES, 2, 1), count, 4
            ),
            "multiple of 2 heads, got 3",
        ),
    ],
)
def test_refused(call, message):
    order, count = np.zeros((1, 3, 3), np.int32), np.zeros((1, 3), np.int32)
    with pytest.raises(ValueError, match=message):
        call(order=order, count=count)
