"""The Hadamard transform against the matrix of its definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hadamard_transform
from tests.references import hadamard as reference
from tests.support.draws import normal
from tests.support.lowering import lower_for_cuda
from tests.support.tolerances import close

transform = jax.jit(hadamard_transform)
# Powers of two, blocks of 16, 32 and 2 channels, and an odd number.
DIMS = [1, 2, 16, 64, 80, 96, 128, 256, 14, 7]


@pytest.mark.parametrize(
    ("dim", "dtype"), [*((dim, "float32") for dim in DIMS), (64, "bfloat16"), (64, "float16")]
)
def test_against_the_matrix(dim, dtype):
    x = normal(2, 3, 5, dim, dtype=dtype)
    rows = transform(x)
    assert rows.shape == x.shape and rows.dtype == jnp.float32
    close(rows, reference.rotate(x.astype(np.float64)))


def test_it_lowers_for_cuda_as_one_product():
    text = lower_for_cuda(hadamard_transform, jnp.zeros((2, 4, 3, 128)))
    assert text.count("dot_general") == 1 and "HIGHEST" in text
