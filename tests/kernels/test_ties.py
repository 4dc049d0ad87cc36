"""Equal cosines are equal numbers, so that ties go to the lower token."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from pallas_kernels import join_anchors, pair_cosine, soft_matching

A, B = [1, 2, 1, 0, 1, 2, 2, 2], [2, 2, 2, 0, 0, 0, 0, 0]  # whose lengths are not whole numbers
LENGTHS = [(1, 2), *(pytest.param(x, marks=pytest.mark.slow) for x in ((1, 1), (3, 1)))]
DRAWS = 40


def draw(seed: int, number: int, dim: int = 8) -> np.ndarray:
    """Vectors of small whole numbers, `[DRAWS, number, dim]`, none of them 0."""
    vectors = np.random.default_rng(seed).integers(0, 3, (DRAWS, number, dim))
    vectors[..., 0] += (vectors == 0).all(-1)
    return vectors.astype(np.float32)


def doubled(vectors: np.ndarray, lengths: tuple[float, float] = (1, 1)) -> np.ndarray:
    """`a a b b ...`, or multiples of a and of b of these lengths."""
    pairs = np.stack([length * vectors for length in lengths], axis=2)
    return pairs.reshape(len(vectors), -1, vectors.shape[-1])


def issue_and_draws() -> np.ndarray:
    """The vectors a and b of every row: first those that once did not tie."""
    return np.concatenate((np.float32([[A, B]]), draw(0, 2)))


def kept(transform: kvjax.KVTransform, q: np.ndarray, keys: np.ndarray) -> list[list[int]]:
    """The positions that stay of a prompt of these queries and keys, `[B, T, D]`, row by row."""
    rows, tokens, dim = keys.shape
    cache = kvjax.init_cache(
        transform, batch=rows, query_heads=1, kv_heads=1, head_dim=dim, max_prompt=tokens,
        max_new=1, dtype=jnp.float32,
    )  # fmt: skip
    positions = np.broadcast_to(np.arange(tokens, dtype=np.int32), (rows, tokens))
    call = jax.jit(functools.partial(kvjax.attend, phase="prompt"))
    q, keys = q[:, None], keys[:, None]
    _, cache = call(cache, q, keys, keys, positions)
    position, live = (np.asarray(x)[:, 0] for x in (cache.kv.position, cache.kv.live))
    return [sorted(position[row, live[row]].tolist()) for row in range(rows)]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_kvmerger_merges_the_first_of_equal_pairs(lengths):
    keys = doubled(issue_and_draws(), lengths)
    # The older token of a pair has received more attention, and is the pivot.
    expected = [[0, 2, 3]] * len(keys)
    assert kept(kvjax.KVMerger(budget=3, recent=0, heavy=0), 0 * keys, keys) == expected


@pytest.mark.parametrize("lengths", LENGTHS)
def test_chelsea_merges_the_first_of_equal_pairs(lengths):
    keys = doubled(issue_and_draws(), lengths)
    keys = np.concatenate((keys, keys[:, :1]), axis=1)  # the newest token is not merged
    transform = kvjax.Chelsea(budget=4, sinks=0, recent=1, chunk=4)
    assert kept(transform, 0 * keys, keys) == [[1, 2, 3, 4]] * len(keys)


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [
        (2, "bfloat16"), (64, "bfloat16"), pytest.param(1, "float32", marks=pytest.mark.slow),
        pytest.param(128, "float32", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_cosine_of_parallel_keys_is_1(dim, dtype):
    """Whatever the keys, their number of channels and their lengths, in all operations."""
    a = jnp.asarray(np.random.default_rng(dim).normal(size=(2, 512, dim)), dtype)
    keys = jnp.stack((a, a * jnp.asarray([[2.0], [-0.25]], dtype)[:, None]), axis=2)
    keys = keys.reshape(1, 2, -1, dim)
    expected = np.array([1.0, -1.0])[None, :, None]
    first = jnp.broadcast_to(jnp.arange(0, keys.shape[2], 2, dtype=jnp.int32), (1, 2, 512))
    slots = jnp.broadcast_to(jnp.arange(keys.shape[2], dtype=jnp.int32), keys.shape[:3])
    for implementation in ("xla", "interpret"):
        by = {"implementation": implementation}
        cosine = np.asarray(pair_cosine(keys, first, first + 1, **by))
        np.testing.assert_array_equal(cosine, np.broadcast_to(expected, cosine.shape))
        assert not join_anchors(keys, slots, slots % 2 == 0, 1.0, **by).any()
        similarity, _ = soft_matching(
            keys[:, :1], jnp.full((1, 1), keys.shape[2]), chunk=256, implementation=implementation
        )
        np.testing.assert_array_equal(np.asarray(similarity)[..., ::2], 1.0)


def test_orthogonal_keys_tie():
    """Sums that are 0 but for their rounding."""
    turns = np.random.default_rng(0).uniform(size=(200, 1)) * 2 * np.pi
    a = np.concatenate((np.cos(turns), np.sin(turns)), axis=1)
    b = np.stack((-a[:, 1], a[:, 0]), axis=1) * 3
    keys = jnp.asarray(np.stack((a, b), axis=1).reshape(1, 1, 400, 2), jnp.float32)
    first = jnp.arange(0, 400, 2, dtype=jnp.int32)[None, None]
    np.testing.assert_array_equal(np.asarray(pair_cosine(keys, first, first + 1)), 0.0)


@pytest.mark.parametrize("threshold", [0.8, 0.28, 5 / 13])
def test_a_cosine_that_is_the_threshold_is_not_above_it(threshold):
    """Pairs of keys whose cosine is a quotient of whole numbers, in many lengths and directions."""
    rng = np.random.default_rng(0)
    sine = np.sqrt(1 - threshold**2)
    lengths, turns = rng.uniform(0.1, 9, (2, 300)), rng.uniform(0, 2 * np.pi, 300)
    first = np.stack((np.cos(turns), np.sin(turns)), axis=-1)
    second = threshold * first + sine * np.stack((-first[:, 1], first[:, 0]), axis=-1)
    keys = np.stack((lengths[0][:, None] * first, lengths[1][:, None] * second), axis=1)
    keys = jnp.asarray(keys[:, None], jnp.float32)
    order = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32), (300, 1, 2))
    joins = functools.partial(join_anchors, keys, order, order < 1)
    assert not joins(threshold).any()
    assert joins(threshold - 1e-5)[..., 0].all()
