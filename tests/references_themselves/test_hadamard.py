"""The reference of the Hadamard rotation, by hand and by its properties."""

from __future__ import annotations

import numpy as np
import pytest

from tests.references.hadamard import block_size, hadamard_matrix, rotate


def test_by_hand():
    expected = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    np.testing.assert_array_equal(hadamard_matrix(4), expected)


@pytest.mark.parametrize("size", [1, 2, 32, 128])
def test_symmetric_and_its_own_inverse(size):
    matrix = hadamard_matrix(size)
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_allclose(matrix @ matrix, np.eye(size), atol=1e-12)


@pytest.mark.parametrize("size", [0, 3, 96])
def test_no_other_sizes(size):
    with pytest.raises(ValueError, match="power of two"):
        hadamard_matrix(size)


@pytest.mark.parametrize(("channels", "size"), [(64, 64), (80, 16), (96, 32), (7, 1)])
def test_blocks_are_rotated_by_themselves(channels, size):
    assert block_size(channels) == size
    x = np.zeros(channels)
    x[-1] = 1
    rotated = rotate(x)
    np.testing.assert_array_equal(rotated[:-size], 0)
    np.testing.assert_allclose(np.abs(rotated[-size:]), size**-0.5)
