"""The kernels of the greedy cover: bits of its graph, lists of neighbours, and whole covers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import greedy_cover
from pallas_kernels.grouping import cover_search
from pallas_kernels.grouping.cover_graph import MARGIN, sketch_of
from pallas_kernels.grouping.cover_heavy import heavy_entries
from pallas_kernels.grouping.cover_kernels import neighbour_bits, neighbour_lists
from pallas_kernels.grouping.nearest_entries import directions
from tests.kernels.test_greedy_cover import around, check, check_margin
from tests.references import codebook as reference
from tests.support.lowering import KERNEL, lower_for_cuda

KERNELS = [True, pytest.param(False, marks=pytest.mark.gpu)]  # interpreted, or compiled


def unpacked(words: np.ndarray) -> np.ndarray:
    bits = words[..., None] >> np.arange(32, dtype=np.uint32) & 1
    return bits.reshape(*words.shape[:-1], -1) > 0


@pytest.mark.parametrize("interpret", KERNELS)
@pytest.mark.parametrize(("size", "dim", "theta"), [(64, 8, 0.9), (192, 80, 0.3), (128, 3, -0.5)])
def test_bits_of_neighbours(size, dim, theta, interpret):
    """The same answer for both vectors of a pair; not where one has no neighbours at all."""
    rng = np.random.default_rng(size)
    vectors = around(size, dim, seed=size)
    there = rng.random(size) < 0.8
    check_margin(vectors, theta)
    units = jnp.where(there[:, None], directions(jnp.asarray(vectors))[0], 0)
    make = jax.jit(functools.partial(neighbour_bits, interpret=interpret))
    limits = np.float32(theta), np.float32(theta - MARGIN)
    near = unpacked(np.asarray(make(units, sketch_of(units), there, *limits)))
    expected = reference.cosines(vectors, vectors) > theta
    np.fill_diagonal(expected, False)
    np.testing.assert_array_equal(near, expected & there & there[:, None])


@pytest.mark.parametrize("interpret", KERNELS)
@pytest.mark.parametrize(("words", "length"), [(1, 32), (9, 5), (300, 32)])
def test_lists_of_neighbours(words, length, interpret):
    """Longer than there is room for, empty, and in words that are passed over."""
    rng = np.random.default_rng(words)
    size, rows = words * 32, 6
    near = rng.random((rows, size)) < [[0.5], [0.0], [0.02], [0.01], [0.5], [1.0]]
    near[3, : size // 2] = False
    uncovered, wanted = rng.random(size) < 0.6, np.arange(rows) != 4
    place = np.uint32(1) << np.arange(32, dtype=np.uint32)
    bits = (near.reshape(rows, words, 32) * place).sum(-1, dtype=np.uint32)
    make = functools.partial(neighbour_lists, length=length, interpret=interpret)
    lists = np.asarray(jax.jit(make)(bits, uncovered, wanted))
    for row in range(rows):
        own = np.flatnonzero(near[row] & uncovered & wanted[row])[:length]
        assert lists[row].tolist() == own.tolist() + [size] * (length - len(own))


@pytest.mark.parametrize(
    "implementation", ["interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(("capacity", "few"), [(9, 32), (200, 32), (9, 1), (200, 1)])
@pytest.mark.fast_cases("200-32-interpret", "9-1-interpret")
def test_covers(capacity, few, implementation, monkeypatch):
    """Entries one by one and many at a time, zeros, weights, no room; NaN in what is no member."""
    monkeypatch.setattr(cover_search, "FEW", few)
    vectors = np.stack([around(150, seed=s, centers=c) for s, c in ((7, 3), (5, 40))])
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 4, size=(2, 150)).astype(np.int32)
    members = rng.random((2, 150)) < [[1.0], [0.8]]
    vectors[0, 7] = 0
    vectors[~members] = np.nan
    cover = jax.jit(  # a function of its own: FEW is another one
        lambda *args, **options: greedy_cover(*args, **options, implementation=implementation),
        static_argnames=("theta", "capacity"),
    )
    check(vectors, members, weights, 0.97, capacity, cover)


@pytest.mark.parametrize("interpret", KERNELS)
def test_entries_one_by_one(interpret):
    """Equal gains in several blocks, lists that share vertices: as a search through all of them."""
    rng = np.random.default_rng(3)
    size, few, capacity = 192, 1, 25
    near = np.triu(rng.random((size, size)) < 0.06, 1)
    near |= near.T
    there, weights = rng.random(size) < 0.9, rng.integers(1, 3, size).astype(np.int32)
    near &= there & there[:, None]
    weights[~there] = 0
    number = rng.permutation(size).astype(np.int32)
    place = np.uint32(1) << np.arange(32, dtype=np.uint32)
    bits = (near.reshape(size, -1, 32) * place).sum(-1, dtype=np.uint32)
    gain = weights + near @ weights
    make = functools.partial(heavy_entries, few=few, capacity=capacity, interpret=interpret)
    found = jax.jit(make)(bits, there, weights, number, gain.astype(np.int32))
    uncovered, bounds, center, value, count = map(np.asarray, found)
    left, centers, entries = there.copy(), np.full(size, size), {}
    for _ in range(capacity):
        own = (near | np.eye(size, dtype=bool)) & left
        weigh = np.where(left & (own @ weights > np.maximum(weights, few)), own @ weights, -1)
        entry = max(range(size), key=lambda v: (weigh[v], -number[v]))
        if weigh[entry] < 0:
            break
        centers[own[entry]], entries[entry] = entry, weigh[entry]
        left &= ~own[entry]
    assert len(entries) > 10 and int(count) == len(entries)
    np.testing.assert_array_equal(uncovered, left)
    np.testing.assert_array_equal(center, centers)
    assert {v: int(value[v]) for v in np.flatnonzero(value)} == entries
    assert (bounds >= ((near | np.eye(size, dtype=bool)) & left) @ weights)[left].all()


@pytest.mark.parametrize(("size", "dim"), [(1000, 64), (5000, 128), (300, 96)])
def test_it_lowers_for_cuda(size, dim):
    """The graph, the entries one by one, the lists, and the nearest entries."""
    vectors = jax.ShapeDtypeStruct((2, size, dim), jnp.bfloat16)
    members, weights = (jax.ShapeDtypeStruct((2, size), x) for x in ("bool", "int32"))
    cover = functools.partial(greedy_cover, theta=0.9, capacity=500, implementation="pallas")
    assert lower_for_cuda(cover, vectors, members, weights).count(KERNEL) == 4
