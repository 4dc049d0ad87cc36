"""The weighted mean of segments, against the reference of merging."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import segment_merge
from tests.references.merge import merge
from tests.support.tolerances import close

EVERY = ["xla", "interpret", pytest.param("pallas", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 7, 512, 700])
@pytest.mark.fast_cases(
    "1-bfloat16-xla", "1-float32-xla", "512-float32-xla", "7-bfloat16-xla", "7-float32-xla",
    "7-bfloat16-interpret", "512-float32-interpret",
)  # fmt: skip
def test_segments_of_any_shape(size, dtype, implementation):
    """In whole blocks, none, and a rest; what is no target stays bit for bit."""
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
    merge_all = functools.partial(segment_merge, implementation=implementation)
    found = jax.jit(merge_all)(rows, into, weights)
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
    into[0, 0, 3] = 3
    rows[0, 0, 99] = np.nan
    weights = rng.uniform(size=into.shape).astype(np.float32)
    merge_all = functools.partial(segment_merge, implementation=implementation)
    found = np.asarray(jax.jit(merge_all)(rows, into, weights))[0, 0]
    members = into[0, 0] == 40
    own = weights[0, 0, members].astype(np.float64)
    close(found[40], own @ rows[0, 0, members].astype(np.float64) / own.sum(), "reference")
    others = np.arange(size) != 40
    np.testing.assert_array_equal(found[others], rows[0, 0, others])


@pytest.mark.parametrize("name", ["into", "weights"])
def test_shapes_are_checked(name):
    rows, into, weights = jnp.ones((1, 1, 4, 2)), jnp.zeros((1, 1, 4), jnp.int32), jnp.ones(4)
    args = {"into": into, "weights": jnp.ones((1, 1, 4))} | {name: weights}
    with pytest.raises(ValueError, match=rf"{name} must have shape \(1, 1, 4\), got \(4,\)"):
        segment_merge(rows, **args)
