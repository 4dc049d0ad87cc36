"""The weighted mean of segments, against the reference of merging."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import segment_merge
from tests.references.merge import merge
from tests.support.tolerances import close


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 7, 512, 700])
@pytest.mark.fast_cases("1-bfloat16", "1-float32", "512-float32", "7-bfloat16", "7-float32")
def test_segments_of_any_shape(size, dtype):
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
    found = jax.jit(segment_merge)(rows, into, weights)
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
