"""Packed bits and their distances against NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hamming_distance, pack_bits
from tests.references import packed_bits


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100])
def test_packed_bits(size):
    rng = np.random.default_rng(size)
    bits = rng.random((3, 5, size)) < 0.4
    words = pack_bits(jnp.asarray(bits))
    np.testing.assert_array_equal(words, packed_bits.pack_bits(bits))
    distance = hamming_distance(words, words[:, :1])
    np.testing.assert_array_equal(distance, packed_bits.hamming(bits, bits[:, :1]))
    assert words.dtype == jnp.uint32 and distance.dtype == jnp.int32
