"""Forms that encode each row by itself: what has not changed stays as it is stored."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.payload import Dense, Slots
from kvjax.kit import RowPayload, pytree_node
from pallas_kernels import Mask, Queries, Seen
from tests.references.attention import softmax_attention
from tests.support.tolerances import close

RNG = np.random.default_rng(0)
B, H, S, D = 2, 2, 6, 8


@pytree_node
@dataclass(frozen=True)
class Shrinks(RowPayload):
    """Rows that lose a tenth whenever they are encoded."""

    data: jax.Array

    @classmethod
    def encoded(cls, rows):
        return cls((rows * 0.9).astype(jnp.float32))

    def decoded(self):
        return self.data


def rows(slots: int = S) -> np.ndarray:
    return RNG.normal(size=(B, H, slots, D)).astype(np.float32)


def test_a_prompt_encodes_what_is_new_or_changed():
    k, v = Shrinks(jnp.asarray(rows())), Shrinks(jnp.asarray(rows()))
    source = np.tile([3, 0, 1, -1, 2, -1], (B, H, 1))
    dense = [
        np.take_along_axis(np.asarray(x.data), np.maximum(source, 0)[..., None], 2) for x in (k, v)
    ]
    for x in dense:
        x[source < 0] = RNG.normal(size=(B * H * 2, D))
        x[:, :, 2] += 1.0  # merged, say
    live = np.ones((B, H, S), bool)
    slots = Slots(
        jnp.asarray(source), jnp.asarray(live), jnp.array([True, False]), jnp.asarray(source)
    )
    for before, new, x in zip(
        (k, v), k.encode(v, *map(jnp.asarray, dense), slots), dense, strict=True
    ):
        again = np.isin(np.arange(S), (2, 3, 5))[:, None]
        np.testing.assert_allclose(new.data[0], np.where(again, x[0] * 0.9, x[0]), rtol=1e-6)
        np.testing.assert_array_equal(new.data[1], before.data[1])  # no tokens


def test_writing_all_rows_leaves_equal_ones():
    stored = Shrinks(jnp.asarray(rows()))
    changed = stored.read().at[0, 1, 4].add(1.0)
    new = stored.write(None, changed)
    expected = np.array(stored.data)
    expected[0, 1, 4] = np.asarray(changed)[0, 1, 4] * np.float32(0.9)
    np.testing.assert_array_equal(new.data, expected)


def test_slots_are_read_written_and_moved():
    stored, index = Shrinks(jnp.asarray(rows())), jnp.full((B, H, 1), 2)
    few = jnp.asarray(rows(1))
    written = stored.write(index, few)
    np.testing.assert_allclose(written.read(index), few * 0.9, rtol=1e-6)
    np.testing.assert_array_equal(stored.write(jnp.full_like(index, S), few).data, stored.data)
    moved = written.flush(4, (index, jnp.zeros_like(index)))
    expected = Dense(written.data).flush(4, (index, jnp.zeros_like(index))).data
    np.testing.assert_array_equal(moved.data, expected)
    assert (stored.shape, stored.dtype) == ((B, H, S, D), jnp.float32)
    assert not Shrinks.empty(stored).data.any() and Shrinks.empty(stored).shape == stored.shape
    for slots in (S - 2, S + 3):
        resized = stored.resized(slots, 0)
        both = min(slots, S)
        np.testing.assert_array_equal(resized.data[:, :, :both], stored.data[:, :, :both])
        assert resized.shape == (B, H, slots, D) and not resized.data[:, :, both:].any()
    assert stored.free_bytes(6) == stored.data.nbytes * 18 // 24


@pytest.mark.parametrize("selected", [False, True])
def test_attention_is_over_what_is_stored(selected):
    """Over all slots, or over lists of them, of which -1 is none; in float64 by the reference."""
    keys, values = (Shrinks(jnp.asarray(rows())) for _ in range(2))
    position = np.tile(np.arange(S, dtype=np.int32), (B, H, 1))
    log_mass = RNG.normal(size=(B, H, S)).astype(np.float32)
    index = np.tile(np.array([4, -1, 1], np.int32), (B, H, 1)) if selected else None
    q = RNG.normal(size=(B, H, 2, 1, D)).astype(np.float32)
    at = np.array([[S], [3]], np.int32)  # the second row does not see its last slots

    @jax.jit
    def attend(keys, values, q, log_mass):
        return keys.attention(
            values, Queries(q, at), Seen(log_mass, position, index=index), Mask(0.5),
            probabilities=True, implementation="xla",
        )  # fmt: skip

    out, probability = attend(keys, values, q, log_mass)
    taken = np.array([4, 1] if selected else range(S))
    places = [0, 2] if selected else taken
    for row, head in np.ndindex(B, H):
        of_slots = keys.data, values.data, position, log_mass
        k, v, where, mass = (np.asarray(x)[row, head][taken] for x in of_slots)
        expected, weights = softmax_attention(q[row, head], k, v, at[row], where, mass, scale=0.5)
        close(out[row, head], expected)
        close(probability[row, head][..., places], weights)
        assert not selected or not probability[row, head][..., 1].any()
