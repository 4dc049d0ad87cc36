"""How wide indices are, and what is refused as a codebook.

`tests/transforms/test_spindlekv.py` compares entries and codes with the reference, and
`tests/kernels/test_encoded_kernels.py` attention to them.
"""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import kvjax
from kvjax.storage.codebook.payload import Book, CodebookPayload


def test_more_entries_take_wider_indices():
    for entries, dtype in ((2**16, jnp.uint32), (2**16 - 1, jnp.uint16)):
        payload = CodebookPayload.zeros((1, 1, 5, 8), jnp.float32, Book(0.9, entries, False))
        assert payload.index.dtype == dtype and payload.magnitude is None


@pytest.mark.parametrize("bad", [{"theta_key": 1.01}, {"theta_value": 0.0}, {"capacity": 1.5}])
def test_bad_input(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        kvjax.Codebook(**bad)
