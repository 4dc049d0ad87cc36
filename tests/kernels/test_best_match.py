"""The kernel of best partners, interpreted and on a GPU, against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.base.tiles import Tile
from pallas_kernels.grouping.best_match import Every, best_match
from pallas_kernels.grouping.cosine import cosine_step, round_cosine
from tests.references.best_match import best_match as reference
from tests.references.chelsea import cosine
from tests.support.implementations import KERNELS, each_way
from tests.support.tolerances import close

SMALL = Tile(tile_bytes=1, warps=4, stages=2, programs=1, cores=1)  # 16 rows of each store

# As k-means orders: |a - b|² is |a|² - 2 (a·b - |b|² / 2).
SIMILARITIES = {
    "rounded_cosine": cosine,
    "cosine": lambda a, b: cosine(a, b) * np.linalg.norm(a),
    "l2": lambda a, b: float(a @ b - 0.5 * b @ b),
    "inner_product": lambda a, b: float(a @ b),
}
# Rows of each store, and which of them: chunks that end early, strides, offsets, stores of others.
PARTS = {
    "all": (40, 37, Every(40), Every(37)),
    "even and odd": (45, 45, Every(20, 0, 2), Every(20, 1, 2)),
    "even and odd of long chunks": (81, 81, Every(81, 0, 2), Every(81, 1, 2)),
    "every third": (31, 18, Every(9, 2, 3), Every(5, 1, 2)),
    "one of each": (3, 2, Every(1), Every(1)),
}


def chunks_of(part, there):
    """The rows of each chunk, by the definition of `Every`."""
    a_rows, b_rows, of_a, of_b = part

    def rows(every, size, chunk):
        first = chunk * every.chunk
        return range(min(first + every.first, size), min(first + every.chunk, size), every.step)

    for chunk in range(-(-a_rows // of_a.chunk)):
        others = [row for row in rows(of_b, b_rows, chunk) if there[row]]
        yield rows(of_a, a_rows, chunk), others


def run(part, a, b, there, similarity, implementation, tile=SMALL):
    call = functools.partial(
        best_match, of_a=part[2], of_b=part[3], similarity=similarity, tile=tile,
        interpret=implementation == "interpret",
    )  # fmt: skip
    best, match = jax.jit(call)(a, b, there)
    assert best.dtype == jnp.float32 and match.dtype == jnp.int32
    return np.asarray(best), np.asarray(match)


def check(part, a, b, there, similarity, implementation, tile=SMALL):
    best, match = run(part, a, b, there, similarity, implementation, tile)
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    for where in np.ndindex(a.shape[:2]):
        chunks = list(chunks_of(part, there[where]))
        expected = reference(a[where], b[where], chunks, SIMILARITIES[similarity])
        assert expected[2] > 1e-5, "rounding must not choose"
        close(best[where], expected[0])
        np.testing.assert_array_equal(match[where], expected[1])


def draw(part, dim, dtype="float32", seed=0):
    """Stores of two rows and heads; NaN where nothing is, and one head without any partner."""
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(2, 2, part[0], dim)).astype(np.float32)
    b = rng.normal(size=(2, 2, part[1], dim)).astype(np.float32)
    there = rng.random(b.shape[:3]) < 0.8
    there[0, 1] = False
    b[~there] = np.nan
    return jnp.asarray(a, dtype), jnp.asarray(b, dtype), there


@pytest.mark.parametrize(
    ("name", "similarity", "implementation"),
    each_way(
        {f"{name}-{each}": (name, each) for name in PARTS for each in SIMILARITIES},
        fast=["all-cosine", "all-l2", "even and odd-rounded_cosine", "every third-inner_product"],
        xla=False,
    ),
)
def test_matches(name, similarity, implementation):
    part = PARTS[name]
    check(part, *draw(part, 8), similarity, implementation)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_ties_go_to_the_lower_row_of_any_tile(similarity, implementation):
    """Axes and their copies, in tiles of 16; products are exact, and zero rows tie with all."""
    axes = np.eye(4, dtype=np.float32)
    b = np.tile(np.concatenate((axes, -axes)), (5, 1))[None, None]
    a = np.concatenate((axes, -axes, 0 * axes))[None, None]
    there = np.ones(b.shape[:3], bool)
    there[..., :9] = False
    part = (12, 40, Every(12), Every(40))
    check(part, jnp.asarray(a), jnp.asarray(b), there, similarity, implementation)


@pytest.mark.parametrize("implementation", KERNELS)
def test_rows_that_hold_nan(implementation):
    """A rounded cosine of -2, below every cosine; no candidate for the other similarities."""
    a = np.array([[1.0, 0.0], [np.nan, 0.0]], np.float32)[None, None]
    b = np.array([[np.nan, 0.0], [-1.0, 0.0]], np.float32)[None, None]
    there, part = np.ones((1, 1, 2), bool), (2, 2, Every(2), Every(2))
    best, match = run(part, a, b, there, "rounded_cosine", implementation)
    assert best[0, 0].tolist() == [-1, -2] and match[0, 0].tolist() == [1, 0]
    best, match = run(part, a, b, there, "inner_product", implementation)
    assert best[0, 0].tolist() == [-1, -np.inf] and match[0, 0].tolist() == [1, 0]


@pytest.mark.parametrize("shape", [(0, 1, 4), (1, 0, 4), (1, 1, 0)])
def test_without_rows_there_is_no_match(shape):
    a, b = jnp.ones((*shape[:2], 3, 2)), jnp.ones((*shape, 2))
    there = jnp.ones(shape, bool)
    best, match = best_match(a, b, there, Every(3), Every(4), "cosine", tile=SMALL, interpret=True)
    assert best.shape == match.shape == (*shape[:2], 3)
    assert (np.asarray(best) == -np.inf).all() and not np.asarray(match).any()


@pytest.mark.parametrize("channels", [1, 4, 20, 128, 256])
def test_rounding_in_a_kernel_is_rounding(channels):
    """Halves of steps go to the even one, and what is no number stays none."""
    step, rng = cosine_step(channels), np.random.default_rng(0)
    x = np.concatenate([
        rng.uniform(-1, 1, 5000), (np.arange(-60, 60) + 0.5) * step, [1, -1, 0, np.nan],
    ]).astype(np.float32)  # fmt: skip
    rounded = jax.jit(functools.partial(round_cosine, channels=channels, in_kernel=True))(x)
    np.testing.assert_array_equal(rounded, round_cosine(jnp.asarray(x), channels))
