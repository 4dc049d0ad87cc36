"""Bipartite soft matching against its reference: the same edges with the same similarities."""

from __future__ import annotations

import functools
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import soft_matching
from pallas_kernels.grouping.cosine import cosine_step, round_cosine
from tests.references.chelsea import soft_matching as reference
from tests.support.attention_cases import use_small_tiles
from tests.support.implementations import EVERY, KERNELS, each_way


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """16 rows of each set, so that few tokens need several."""
    use_small_tiles(monkeypatch)


def match(keys, count, chunk, implementation):
    """In a function of its own: what is compiled for other tiles must not be used again."""

    def call(keys, count):
        return soft_matching(keys, count, chunk=chunk, implementation=implementation)

    return map(np.asarray, jax.jit(call)(keys, jnp.asarray(count)))


def check(keys, count, chunk, implementation="xla"):
    similarity, partner = match(keys, count, chunk, implementation)
    assert similarity.dtype == np.float32 and partner.dtype == np.int32
    own, step = np.arange(keys.shape[2]), cosine_step(keys.shape[3])
    for row, head in np.ndindex(*keys.shape[:2]):
        edges = reference(np.asarray(keys, np.float64)[row, head, : count[row][head]], chunk)
        expected, leads_to = np.full(len(own), -np.inf), own.copy()
        for each, a, b in edges:
            expected[a], leads_to[a] = each, b
        np.testing.assert_allclose(similarity[row, head], expected, atol=step)
        np.testing.assert_array_equal(partner[row, head], leads_to)


EDGES = {
    f"{tokens} in {chunk}": (tokens, chunk)
    for tokens, chunk in ((1, 2), (2, 3), (21, 2), (21, 3), (21, 8), (21, 256))
}  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "chunk", "implementation"), each_way(EDGES, fast=["1 in 2", "21 in 3", "21 in 256"])
)
def test_edges(tokens, chunk, implementation):
    """Chunks that don't fill up, heads with fewer tokens than there is room for, and none."""
    rng = np.random.default_rng(tokens)
    keys = jnp.asarray(rng.normal(size=(2, 2, tokens, 4)), jnp.float32)
    check(keys, [[tokens, tokens // 2], [0, 1]], chunk, implementation)


TILES = {
    f"{dim}-{dtype}": (dim, dtype)
    for dim, dtype in ((64, "float16"), (80, "bfloat16"), (128, "bfloat16"), (256, "float32"))
}


@pytest.mark.parametrize(
    ("dim", "dtype", "implementation"), each_way(TILES, fast=["80-bfloat16"], xla=False)
)
def test_chunks_of_several_tiles(dim, dtype, implementation):
    """NaN where no token is, and a last chunk that is not full."""
    keys = np.random.default_rng(dim).normal(size=(1, 2, 150, dim))
    keys[0, 0, 140:], keys[0, 1, 77:] = np.nan, np.nan
    check(jnp.asarray(keys, dtype), [[140, 77]], 88, implementation)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_copies_and_multiples_tie_as_they_do_by_xla(dtype, implementation):
    """Few directions in many lengths, which rounding alone would tell apart."""
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(7, 64)).astype(jnp.dtype(dtype)).astype(np.float32)
    lengths = 2.0 ** rng.integers(-3, 4, (2, 2, 120, 1))
    keys = jnp.asarray(directions[rng.integers(0, 7, (2, 2, 120))] * lengths, dtype)
    count = [[120, 90], [33, 0]]
    mine, other = (match(keys, count, 64, each) for each in (implementation, "xla"))
    for one, expected in zip(mine, other, strict=True):
        np.testing.assert_array_equal(one, expected)


def test_long_chunks_go_block_by_block():
    keys = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 37, 4)), jnp.float32)
    module = sys.modules["pallas_kernels.grouping.soft_matching"]
    with mock.patch.object(module, "BLOCK", 4):
        check(keys, [[37, 30]], 37)


@pytest.mark.parametrize("implementation", EVERY)
def test_ties_go_to_the_lower_token_and_lengths_do_not_matter(implementation):
    keys = jnp.asarray(np.eye(3)[[0, 1, 0, 0, 2, 0]], jnp.float32)
    keys = (keys * jnp.arange(1.0, 7.0)[:, None])[None, None]
    similarity, partner = match(keys, [[6]], 8, implementation)
    inf = np.inf
    np.testing.assert_allclose(similarity[0, 0], [1, -inf, 1, -inf, 0, -inf], atol=1e-6)
    assert partner[0, 0].tolist() == [3, 1, 3, 3, 1, 5]


@pytest.mark.parametrize("implementation", EVERY)
def test_zero_and_nan_keys_have_edges(implementation):
    """A zero key is like nothing else; a key without a number is less like anything than that."""
    keys = np.zeros((1, 1, 4, 2))
    keys[0, 0, 1], keys[0, 0, 2] = 1.0, np.nan
    similarity, partner = match(jnp.asarray(keys, jnp.float32), [[4]], 4, implementation)
    assert similarity[0, 0, 0] == 0 and similarity[0, 0, 2] == -2
    assert partner[0, 0].tolist() == [1, 1, 1, 3]


@pytest.mark.parametrize("channels", [1, 4, 20, 128, 256])
def test_rounding_in_a_kernel_is_rounding(channels):
    """Halves of steps go to the even one, and NaN stays NaN."""
    step, rng = cosine_step(channels), np.random.default_rng(0)
    x = np.concatenate([
        rng.uniform(-1, 1, 5000), (np.arange(-60, 60) + 0.5) * step, [1, -1, 0, np.nan],
    ]).astype(np.float32)  # fmt: skip
    rounded = jax.jit(functools.partial(round_cosine, channels=channels, in_kernel=True))(x)
    np.testing.assert_array_equal(rounded, round_cosine(jnp.asarray(x), channels))
