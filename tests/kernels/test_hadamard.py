"""The Hadamard transform against the matrix of its definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hadamard_transform
from tests.references import hadamard as reference
from tests.support.lowering import lower_for_cuda
from tests.support.tolerances import close

transform = jax.jit(hadamard_transform)
# Powers of two, blocks of 16, 32 and 2 channels, and an odd number.
DIMS = [1, 2, 16, 64, 80, 96, 128, 256, 14, 7]


def normal(*shape, seed=0, dtype="float32"):
    return np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("dim", "dtype"), [*((dim, "float32") for dim in DIMS), (64, "bfloat16"), (64, "float16")]
)
def test_against_the_matrix(dim, dtype):
    x = normal(2, 3, 5, dim, dtype=dtype)
    rows = transform(x)
    assert rows.shape == x.shape and rows.dtype == jnp.float32
    close(rows, reference.rotate(x.astype(np.float64)))


@pytest.mark.parametrize("dim", DIMS)
def test_it_is_its_own_inverse_and_keeps_inner_products(dim):
    q, k = normal(9, dim), normal(40, dim, seed=1)
    close(transform(transform(k)), k, "accumulated")
    close(transform(q) @ transform(k).T, q @ k.T, "accumulated")


def test_a_large_channel_is_spread_over_its_block():
    x = np.zeros((1, 96), np.float32)
    x[0, 40] = 8
    rows = np.abs(transform(x))[0]
    close(rows, np.where(np.arange(96) // 32 == 1, 8 / np.sqrt(32), 0.0))


def test_nothing_of_one_row_reaches_another():
    x = normal(3, 64)
    x[1] = np.nan
    rows = np.asarray(transform(x))
    assert np.isfinite(rows[[0, 2]]).all() and np.isnan(rows[1]).all()


def test_it_lowers_for_cuda_as_one_product():
    text = lower_for_cuda(hadamard_transform, jnp.zeros((2, 4, 3, 128)))
    assert text.count("dot_general") == 1 and "HIGHEST" in text
