"""How wide indices are, and what is refused as a codebook.

`tests/transforms/test_spindlekv.py` compares entries and codes with the reference, and
`tests/kernels/test_encoded_kernels.py` attention to them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.storage.codebook.payload import Book, CodebookPayload
from pallas_kernels import Mask, Queries, Seen
from tests.references.attention import softmax_attention
from tests.support.tolerances import close

# Two directions of each row, at six lengths, `[B, H, S, D]`: as many entries hold them.
LENGTHS = np.array([[2.0, 1.0, 3.0], [0.5, 1.0, 4.0]])
DIRECTIONS = np.array([[0, 1, 0], [1, 0, 1]])


def rows_of_two_directions() -> np.ndarray:
    units = np.array([[1.0, 0, 0, 0], [0, 0.6, 0.8, 0]])
    return (LENGTHS[..., None] * units[DIRECTIONS])[None].astype(np.float32)


@functools.cache
def payload_of_all_rows() -> CodebookPayload:
    empty = CodebookPayload.zeros((1, 2, 3, 4), jnp.float32, Book(0.9, 4, True))
    return jax.jit(lambda rows: empty.write(None, rows))(rows_of_two_directions())


def test_all_rows_make_a_new_book():
    payload = payload_of_all_rows()
    assert payload.count.tolist() == [2] and payload.overflow.tolist() == [0]
    assert payload.waiting.tolist() == [0] and payload.book == Book(0.9, 4, True)
    first = np.asarray(payload.index)[0, 0, 0]  # the entry of the first direction
    np.testing.assert_array_equal(payload.index[0] == first, DIRECTIONS == 0)
    close(payload.magnitude[0], LENGTHS, "rounding")
    close(payload.read(), rows_of_two_directions(), "rounding")


def test_rows_move_among_slots():
    source, slots = jnp.array([[[2], [0]]]), jnp.array([[[0], [3]]])  # 3: none
    read = jax.jit(lambda payload, moves: payload.flush(0, moves).read())
    expected = rows_of_two_directions()
    expected[0, 0, 0] = expected[0, 0, 2]
    close(read(payload_of_all_rows(), (source, slots)), expected, "rounding")


@pytest.mark.parametrize("selected", [False, True])
def test_attention_to_rotated_keys(selected):
    """Over all slots, or over a list of them, without a rotation of the keys that are read."""
    keys, rows = payload_of_all_rows(), rows_of_two_directions()
    rng = np.random.default_rng(0)
    q, log_mass = (
        rng.normal(size=size).astype(np.float32) for size in ((1, 2, 2, 1, 4), (1, 2, 3))
    )
    position, at = np.tile(np.arange(3, dtype=np.int32), (1, 2, 1)), np.array([[7]], np.int32)
    taken = np.array([2, 0]) if selected else np.arange(3)
    index = np.tile(taken.astype(np.int32), (1, 2, 1)) if selected else None

    @jax.jit
    def attend(keys, q, log_mass):
        return keys.attention(
            keys, Queries(q, at), Seen(log_mass, position, index=index), Mask(0.5),
            probabilities=True, implementation="xla",
        )  # fmt: skip

    out, probability = attend(keys, q, log_mass)
    for head in range(2):
        of_slots = rows, rows, position, log_mass
        k, v, where, mass = (x[0, head][taken] for x in of_slots)
        expected, weights = softmax_attention(q[0, head], k, v, at[0], where, mass, scale=0.5)
        close(out[0, head], expected)
        close(probability[0, head], weights)


def test_more_entries_take_wider_indices():
    for entries, dtype in ((2**16, jnp.uint32), (2**16 - 1, jnp.uint16)):
        payload = CodebookPayload.zeros((1, 1, 5, 8), jnp.float32, Book(0.9, entries, False))
        assert payload.index.dtype == dtype and payload.magnitude is None


@pytest.mark.parametrize("bad", [{"theta_key": 1.01}, {"theta_value": 0.0}, {"capacity": 1.5}])
def test_bad_input(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        kvjax.Codebook(**bad)
