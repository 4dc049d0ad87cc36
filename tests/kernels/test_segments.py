"""Sums and weighted means of segments, by XLA and by kernels, against the references."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import segment_merge, segment_sum
from tests.references import segments as reference
from tests.references.merge import merge
from tests.support.implementations import EVERY, KERNELS, each_way
from tests.support.tolerances import close


def sums_of(rows, into, places=None, implementation="xla"):
    call = functools.partial(segment_sum, places=places, implementation=implementation)
    return np.asarray(jax.jit(call)(rows, into))


def merged_by(implementation, *args):
    return jax.jit(functools.partial(segment_merge, implementation=implementation))(*args)


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize(
    ("rows", "places", "rest"),
    [(1, 1, ()), (7, 7, ()), (40, 13, (3,)), (40, 90, (2, 5)), (150, 150, (80,))],
)
def test_sums(rows, places, rest, implementation):
    """More places than rows and fewer; places that get many, one, none; rows that go nowhere."""
    rng = np.random.default_rng(rows)
    into = (rng.random((2, 2, rows)) ** 2 * (places + 2)).astype(np.int32)
    into[1, 0] = places  # none
    into[1, 1] = places - 1  # all
    x = rng.normal(size=(*into.shape, *rest)).astype(np.float32)
    x[into >= places] = np.nan
    found = sums_of(x, into, places, implementation)
    assert found.dtype == np.float32
    for row, head in np.ndindex(2, 2):
        expected = reference.segment_sum(x[row, head], into[row, head], places)
        close(found[row, head], expected, "accumulated")


@pytest.mark.parametrize("implementation", EVERY)
def test_whole_numbers_are_summed_exactly(implementation):
    rng = np.random.default_rng(0)
    into = rng.integers(0, 5, (1, 2, 30)).astype(np.int32)
    x = rng.integers(2**24, 2**25, into.shape).astype(np.int32)
    found = sums_of(x, into, 5, implementation)
    for head in range(2):
        expected = reference.segment_sum(x[0, head], into[0, head], 5)
        np.testing.assert_array_equal(found[0, head], expected)


@pytest.mark.parametrize("implementation", KERNELS)
def test_sums_do_not_depend_on_other_places(implementation):
    """The order of additions is that of the rows: the same segment has the same sum anywhere."""
    rng = np.random.default_rng(1)
    own = rng.normal(size=17).astype(np.float32)
    sums = set()
    for before in (0, 5):
        others = rng.normal(size=before).astype(np.float32)
        rows = np.concatenate((others, own))[None, None]
        into = np.array([[[0] * before + [2] * 17]], np.int32)
        sums.add(float(sums_of(rows, into, 3, implementation)[0, 0, 2]))
    assert len(sums) == 1


MEANS = {
    f"{size}-{dtype}": (size, dtype)
    for size, dtype in (
        (1, "float32"), (7, "bfloat16"), (7, "float32"), (512, "float32"), (700, "bfloat16")
    )
}  # fmt: skip


@pytest.mark.parametrize(
    ("size", "dtype", "implementation"), each_way(MEANS, fast=["7-bfloat16", "512-float32"])
)
def test_means(size, dtype, implementation):
    """In whole blocks, none, and a rest; places that are not targets stay bit for bit."""
    rng = np.random.default_rng(size)
    batch, heads, dim = 2, 3, 5
    into = np.empty((batch, heads, size), np.int32)
    for own in into.reshape(-1, size):
        targets = rng.choice(size, max(size // 4, 1), replace=False)
        own[:] = rng.choice(targets, size)
        own[rng.random(size) < 0.1] = size  # none
        own[targets] = targets
    weights = rng.uniform(size=into.shape).astype(np.float32)
    weights[:, 0] = 0.0  # whose rows stay as they are
    rows = jnp.asarray(rng.normal(size=(*into.shape, dim)), dtype)
    found = merged_by(implementation, rows, into, weights)
    assert found.dtype == rows.dtype
    rows, found = (np.asarray(x.astype(jnp.float32)) for x in (rows, found))
    for b, h in np.ndindex(batch, heads):
        own = np.where(into[b, h] < size, into[b, h], np.arange(size))
        merged = (np.bincount(own, minlength=size) > 1) & (h > 0)
        np.testing.assert_array_equal(found[b, h][~merged], rows[b, h][~merged])
        if h > 0:
            log_mass = np.where(into[b, h] < size, 0.0, -np.inf)
            expected, *_ = merge(
                rows[b, h], rows[b, h], log_mass, np.arange(size), own, weights[b, h]
            )
            kind = "reference" if dtype == "float32" else "bfloat16"
            close(found[b, h][merged], expected[merged], kind)


@pytest.mark.parametrize("implementation", EVERY)
def test_long_segments_and_rows_that_are_not_numbers(implementation):
    """A segment longer than a program adds up at a time; NaN where nothing reads it."""
    rng = np.random.default_rng(0)
    size = 100
    rows = rng.normal(size=(1, 1, size, 80)).astype(np.float32)
    into = np.full((1, 1, size), 40, np.int32)
    into[0, 0, [3, 99]] = 3, size
    rows[0, 0, 99] = np.nan
    weights = rng.uniform(size=into.shape).astype(np.float32)
    found = np.asarray(merged_by(implementation, rows, into, weights))[0, 0]
    members = into[0, 0] == 40
    own = weights[0, 0, members].astype(np.float64)
    close(found[40], own @ rows[0, 0, members].astype(np.float64) / own.sum(), "reference")
    others = np.arange(size) != 40
    np.testing.assert_array_equal(found[others], rows[0, 0, others])
