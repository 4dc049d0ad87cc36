"""The nearest entry of a codebook, by XLA and by the kernel."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from pallas_kernels import nearest_entries
from tests.references import codebook as reference
from tests.support.implementations import EVERY


def run(*args, implementation):
    call = functools.partial(nearest_entries, implementation=implementation)
    return tuple(map(np.asarray, jax.jit(call)(*args)))


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize(("vectors", "entries", "dim"), [(70, 150, 5), (9, 12, 64), (3, 40, 128)])
def test_the_nearest(vectors, entries, dim, implementation):
    """More vectors and entries than a tile has, and fewer; free places may hold anything."""
    rng = np.random.default_rng(dim)
    vectors = rng.normal(size=(2, vectors, dim)).astype(np.float32)
    entries = rng.normal(size=(2, entries, dim)).astype(np.float32)
    vectors[0, 2] = 0
    count = np.array([entries.shape[1], 5])
    entries[1, 5:] = np.nan
    index, cosine = run(vectors, entries, count, implementation=implementation)
    for row in (0, 1):
        expected = reference.cosines(vectors[row], entries[row, : count[row]])
        np.testing.assert_array_equal(index[row], expected.argmax(1))
        np.testing.assert_allclose(cosine[row], expected.max(1), atol=1e-6)


@pytest.mark.parametrize("implementation", EVERY)
def test_equals_and_none(implementation):
    """The first of equal entries, in whatever tile; entries of length 0 are none."""
    rng = np.random.default_rng(0)
    entries = np.repeat(rng.normal(size=(1, 1, 16)), 100, axis=1).astype(np.float32)
    entries[0, :70] = 0
    vectors = entries[:, 90:94]
    found = functools.partial(run, vectors, entries, implementation=implementation)
    index, cosine = found(np.array([100]))
    assert (index == 70).all()
    np.testing.assert_allclose(cosine, 1.0, atol=1e-6)
    for count in (0, 70):
        index, cosine = found(np.array([count]))
        assert (index == 0).all() and (cosine == -np.inf).all()
