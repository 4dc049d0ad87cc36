"""The greedy cover of `pallas_kernels` against its reference, entry by entry."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import greedy_cover
from pallas_kernels.grouping import cover_graph, cover_search
from pallas_kernels.grouping.cover_kernels import neighbour_lists
from pallas_kernels.grouping.nearest_entries import directions
from tests.references import codebook as reference
from tests.support.implementations import KERNELS, each_way

run = functools.partial(jax.jit, static_argnames=("theta", "capacity"))
cover_of = run(greedy_cover)


def around(count: int, dim: int = 8, seed: int = 0, centers: int = 6) -> np.ndarray:
    """Float32 vectors of any length around a few directions, some further from it than others."""
    rng = np.random.default_rng(seed)
    middle = rng.normal(size=(centers, dim))
    vectors = middle[rng.integers(centers, size=count)] + 0.2 * rng.normal(size=(count, dim))
    return (vectors * rng.uniform(0.2, 3.0, size=(count, 1))).astype(np.float32)


def check_margin(vectors: np.ndarray, theta: float) -> None:
    """Fails where float32 might draw other edges; then another seed has to be taken."""
    cosine = reference.cosines(vectors, vectors)
    np.fill_diagonal(cosine, -1)
    assert np.abs(cosine - theta).min() > 2e-6, "near threshold: change the seed"


def check(vectors, members, weights, theta, capacity, cover=cover_of):
    """vectors [B, N, D], members and weights [B, N]."""
    got = cover(vectors, members, weights, theta=theta, capacity=capacity)
    for row, (x, inside, weight) in enumerate(zip(vectors, members, weights, strict=True)):
        x = np.where(inside[:, None], x, 0)
        check_margin(x[np.abs(x).sum(1) > 0], theta)
        expected = reference.greedy_cover(x, theta, weight, capacity)
        count = int(got.count[row])
        assert got.centers[row, :count].tolist() == expected.centers
        assert (np.asarray(got.centers[row, count:]) == len(x)).all()
        np.testing.assert_array_equal(got.index[row], expected.index)
        assert int(got.overflow[row]) == expected.overflow
    return got


@pytest.fixture
def cover_with(monkeypatch):
    """`greedy_cover` with other constants: small tiles make many of few vectors."""

    def compiled(implementation=None, **constants):
        for name, value in constants.items():
            monkeypatch.setattr(cover_search if name == "FEW" else cover_graph, name, value)
        # A function of its own: a shared one is traced once for all constants.
        return run(functools.partial(greedy_cover, implementation=implementation))

    return compiled


COVERS = {"9-1": (9, 1), "300-32": (300, 32)}


@pytest.mark.parametrize(("capacity", "few", "implementation"), each_way(COVERS, fast=["9-1"]))
def test_many_tiles(cover_with, capacity, few, implementation):
    """Groups across tiles, entries one by one and many at a time; NaN outside of members."""
    size, draws, tiles = 150, ((7, 3), (5, 40)), {}
    if implementation == "xla":
        size, draws, tiles = 290, ((2, 6), (5, 60)), {"COSINES": 64**2, "PIVOTS": 8}
    cover = cover_with(implementation, FEW=few, **tiles)
    vectors = np.stack([around(size, seed=s, centers=c) for s, c in draws])
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 4, size=(2, size)).astype(np.int32)
    members = rng.random((2, size)) < [[1.0], [0.8]]
    vectors[0, 7] = 0
    vectors[~members] = np.nan
    got = check(vectors, members, weights, 0.97, capacity, cover)
    assert (np.asarray(got.overflow) > 0).any() == (capacity == 9)


@pytest.mark.parametrize("dim", [1, 2, 16])
def test_products_of_sketches_bound_cosines(dim):
    """Also where a sketch's rest is next to nothing."""
    flat = around(100, dim) * np.where(np.arange(dim) < 3, 1, 1e-4).astype(np.float32)
    for vectors in (around(100, dim), flat):
        units = directions(jnp.asarray(vectors))[0]
        sketch = np.asarray(cover_graph.sketch_of(units), np.float64)
        assert sketch.shape[1] == max(dim // 4, 1)
        assert (sketch @ sketch.T - reference.cosines(vectors, vectors)).min() > -1e-5


@pytest.mark.parametrize("few", [pytest.param(1, marks=pytest.mark.slow), 32])
def test_entries_that_wait_for_each_other(cover_with, few):
    """Along an arc, where each vector is near the next two, and weights rise."""
    angle = 0.1 * np.arange(40)
    vectors = np.stack([np.cos(angle), np.sin(angle)], 1).astype(np.float32)[None]
    members = np.ones((1, 40), bool)
    cover = cover_with(FEW=few)
    for weights in (np.arange(1, 41) // 8 + 1, np.ones(40)):
        check(vectors, members, weights.astype(np.int32)[None], np.cos(0.25), 40, cover)


@pytest.mark.parametrize("capacity", [pytest.param(1, marks=pytest.mark.slow), 63])
def test_what_has_no_room_goes_to_the_nearest(cover_with, capacity):
    """Heavy vectors that stand alone are entries before light groups."""
    vectors = np.concatenate([around(200, dim=4, seed=3), around(60, dim=4, seed=4, centers=60)])
    weights = np.concatenate([np.ones(200), np.full(60, 50)]).astype(np.int32)
    order = np.random.default_rng(0).permutation(260)
    members = np.ones((1, 260), bool)
    cover = cover_with(COSINES=64**2, PIVOTS=4, FEW=4)
    got = check(vectors[order][None], members, weights[order][None], 0.998, capacity, cover)
    assert int(got.overflow[0]) > 0


def test_tiny_vectors_have_a_direction():
    vectors = (1e-30 * around(20)[None]).astype(np.float32)
    ones = np.ones((1, 20), np.int32)
    small, large = (
        cover_of(x, ones > 0, ones, theta=0.9, capacity=20) for x in (vectors, around(20)[None])
    )
    np.testing.assert_array_equal(small.index, large.index)


# --- by kernels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize(("words", "length"), [(1, 32), (9, 5), (300, 32)])
def test_lists_of_neighbours(words, length, implementation):
    """Longer than there is room for, empty, and in words that are passed over."""
    rng = np.random.default_rng(words)
    size, rows = words * 32, 6
    near = rng.random((rows, size)) < [[0.5], [0.0], [0.02], [0.01], [0.5], [1.0]]
    near[3, : size // 2] = False
    uncovered, wanted = rng.random(size) < 0.6, np.arange(rows) != 4
    place = np.uint32(1) << np.arange(32, dtype=np.uint32)
    bits = (near.reshape(rows, words, 32) * place).sum(-1, dtype=np.uint32)
    interpret = implementation == "interpret"
    make = functools.partial(neighbour_lists, length=length, interpret=interpret)
    lists = np.asarray(jax.jit(make)(bits, uncovered, wanted))
    for row in range(rows):
        own = np.flatnonzero(near[row] & uncovered & wanted[row])[:length]
        assert lists[row].tolist() == own.tolist() + [size] * (length - len(own))
