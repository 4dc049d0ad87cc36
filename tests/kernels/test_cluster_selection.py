"""Ranking clusters and listing their slots, by XLA and by kernels, against the references."""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import build_indices, rank_clusters
from tests.references import cluster_selection as reference
from tests.support.implementations import EVERY, each_way

module = importlib.import_module("pallas_kernels.recall.cluster_selection")
SMALL = {"RANKED": 4, "COUNTED": 8, "PLACES": 8, "LOOKED_AT": 4, "SCORED": 8 * 128}
CHOICES = {
    "max": {"group_reduce": "max"}, "mean": {"group_reduce": "mean"},
    "each": {"per_query_head": True},
}  # fmt: skip


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles so small that few clusters and places need several."""
    for name, size in SMALL.items():
        monkeypatch.setattr(module, name, size)


def jitted(operation, **options):
    """A new function every time: what is compiled for other tiles must not be used again."""
    return jax.jit(functools.partial(operation, **options))


# --- ranks ----------------------------------------------------------------------------------------


def check_order(q, centroids, sizes, choice, implementation):
    options = CHOICES[choice]
    order = jitted(rank_clusters, implementation=implementation, **options)(q, centroids, sizes)
    assert order.dtype == jnp.int32
    lists = []
    for row, head in np.ndindex(sizes.shape[:2]):
        group = np.asarray(q, np.float64)[row, head]
        for chosen_by in group[:, None] if choice == "each" else [group]:
            args = np.asarray(centroids, np.float64)[row, head], sizes[row, head].tolist()
            reduce = options.get("group_reduce", "mean")
            lists.append(reference.rank_clusters(chosen_by, *args, reduce))
    np.testing.assert_array_equal(order, np.reshape(lists, (len(sizes), -1, sizes.shape[2])))
    return np.asarray(order)


RANKS = {
    f"{group}-{dim}-{clusters}-{choice}": (group, dim, clusters, choice)
    for group, dim, clusters in (
        (1, 64, 37), (2, 80, 37), (3, 96, 1), (7, 96, 37), (16, 128, 5)
    )
    for choice in CHOICES
}  # fmt: skip


@pytest.mark.parametrize(
    ("group", "dim", "clusters", "choice", "implementation"),
    each_way(RANKS, fast=["1-64-37-each", "2-80-37-max", "2-80-37-mean"]),
)
def test_ranks(group, dim, clusters, choice, implementation, small_tiles):
    """Several tiles of centroids; anything where a cluster is empty."""
    rng = np.random.default_rng(group + dim)
    q = rng.normal(size=(2, 2, group, dim)).astype(
        jnp.dtype("bfloat16" if dim == 80 else "float32")
    )
    sizes = rng.integers(0, 4, (2, 2, clusters)).astype(np.int32)
    centroids = rng.normal(size=(2, 2, clusters, dim)).astype(np.float32)
    centroids[sizes == 0] = np.nan
    check_order(q, centroids, sizes, choice, implementation)


@pytest.mark.parametrize(
    ("clusters", "implementation"),
    each_way({str(n): (n,) for n in (1, 2, 7, 8, 9, 16, 33)}, fast=["33"]),
)
def test_ties_go_to_the_lower_and_empty_clusters_come_last(clusters, implementation, small_tiles):
    """Small whole numbers, zero of either sign among them: most scores are equal."""
    rng = np.random.default_rng(clusters)
    q = rng.integers(-1, 2, (3, 2, 4, 3)).astype(np.float32)
    q[2] = -0.0
    centroids = rng.integers(-1, 2, (3, 2, clusters, 3)).astype(np.float32)
    sizes = rng.integers(0, 3, (3, 2, clusters)).astype(np.int32)
    sizes[1, 0] = 0
    for choice in CHOICES:
        order = check_order(q, centroids, sizes, choice, implementation)
        assert order[1, 0].tolist() == list(range(clusters))


@pytest.mark.parametrize("implementation", EVERY)
def test_every_cluster_has_a_rank_whatever_the_scores(implementation, small_tiles):
    """A place of the order that nobody writes would name a cluster that does not exist."""
    ranks = jitted(rank_clusters, implementation=implementation)
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        rng = np.random.default_rng(1)
        q = rng.normal(size=(2, 1, 2, 8)).astype(np.float32)
        q[1] = bad
        centroids = rng.normal(size=(2, 1, 21, 8)).astype(np.float32)
        centroids[0, 0, 4:9] = bad
        sizes = rng.integers(0, 3, (2, 1, 21)).astype(np.int32)
        order = np.asarray(ranks(q, centroids, sizes))
        expected = np.broadcast_to(np.arange(21), order.shape)
        np.testing.assert_array_equal(np.sort(order, axis=-1), expected, str(bad))
        empty = np.take_along_axis(sizes, order, axis=-1) == 0
        if np.isnan(bad):
            assert (np.diff(empty.astype(int), axis=-1) >= 0).all(), "what is empty comes last"


# --- lists ----------------------------------------------------------------------------------------


def check_list(lists_of, order, sizes, starts, count, length):
    index = np.asarray(lists_of(order, sizes, starts, count))
    assert index.dtype == np.int32 and index.shape == (*order.shape[:2], length)
    counts = np.broadcast_to(count, order.shape[:2])
    for row, choice in np.ndindex(order.shape[:2]):
        head = choice * sizes.shape[1] // order.shape[1]
        parts = (x.tolist() for x in (order[row, choice], sizes[row, head], starts[row, head]))
        expected = reference.build_indices(*parts, int(counts[row, choice]), length)
        assert index[row, choice].tolist() == expected


def starts_of(sizes, gaps=0):
    return (np.cumsum(sizes + gaps, axis=-1) - sizes).astype(np.int32)


def draw_clusters(heads, lists, clusters, most, seed=0):
    """Order, sizes and starts; a third of the clusters empty, and gaps between them."""
    rng = np.random.default_rng(seed)
    shape = (2, heads, clusters)
    sizes = rng.integers(1, most + 1, shape) * (rng.random(shape) < 0.67)
    order = rng.permuted(np.tile(np.arange(clusters), (2, lists, 1)), axis=-1)
    return order.astype(np.int32), sizes.astype(np.int32), starts_of(sizes, rng.integers(3))


LISTS = {
    f"{lists} of {clusters}, {length}": (lists, clusters, most, length)
    for lists, clusters, most in ((2, 1, 30), (2, 23, 1), (6, 13, 30))
    for length in (1, 7, 8, 61, 200)
}


@pytest.mark.parametrize(
    ("lists", "clusters", "most", "length", "implementation"),
    each_way(LISTS, fast=["6 of 13, 8", "6 of 13, 61", "2 of 23, 61", "2 of 1, 1"]),
)
def test_lists(lists, clusters, most, length, implementation, small_tiles):
    """One slot per cluster, and more of them than a program fills places."""
    arrays = draw_clusters(2, lists, clusters, most)
    lists_of = jitted(build_indices, length=length, implementation=implementation)
    for count in (
        np.repeat([[0], [length]], lists, axis=1), np.arange(2 * lists).reshape(2, lists) * 29
    ):  # fmt: skip
        check_list(lists_of, *arrays, count.astype(np.int32), length)


@pytest.mark.parametrize("implementation", EVERY)
def test_large_slot_numbers(implementation):
    """Starts near the largest int32, in falling order, up to the last slot that has a number."""
    starts = np.array([[[2**31 - 3, 10, 2**30]]], np.int32)
    order, sizes = np.array([[[0, 1, 2]]], np.int32), np.array([[[3, 2, 0]]], np.int32)
    lists_of = jitted(build_indices, length=8, implementation=implementation)
    check_list(lists_of, order, sizes, starts, np.array([[5]], np.int32), 8)
