"""Cases that a hand can compute, and figures of papers, against references and the library."""

from __future__ import annotations

import copy
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import pallas_kernels as kernels
from kvjax.budgets.budgets import slots_for
from kvjax.transforms.infinigen.projections import partial_projection
from kvjax.transforms.pyramidkv import PyramidBudget
from kvjax.transforms.spindlekv.schedule import SpindleBudget
from pallas_kernels.formats.bits import pack_int4, unpack_int4
from tests.references import (
    attention,
    clusterkv,
    codebook,
    column_maxima,
    column_sums,
    hadamard,
    infinigen,
    quantised,
    quest,
    spindlekv,
)
from tests.references import budgets as row_budgets
from tests.references import kmeans as scalar_kmeans
from tests.references.h2o import H2O
from tests.references.pyramidkv import layer_budgets
from tests.references.rope import inverse_frequencies, rope
from tests.references.snapkv import SnapKV
from tests.references.streaming_llm import StreamingLLM
from tests.support.attending import attend, new_cache, slots_of
from tests.support.implementations import EVERY
from tests.support.tolerances import close

# --- budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "length", "expected"),
    [(7, 3, 7), (0.5, 100, 50), (0.5, 10, 10), (0.1, 100, 33), (0.35, 101, 35), (1.0, 50, 50)],
)
def test_slots_of_a_row(budget, length, expected):
    assert row_budgets.rows_budget(budget, length, 33) == expected
    assert slots_for(budget, length, 33) == expected


@pytest.mark.parametrize(
    ("average", "window", "beta", "length", "expected"),
    [
        (28, 8, 20, 1000, [47, 28, 9]),
        (28, 8, 20, 38, [38, 28, 18]),
        # Shares are 3.9, 2.63, 1.37 and 0.1: two of eight slots are missing after rounding down.
        (10, 8, 20, 1000, [12, 11, 9, 8]),
        # Shares are 3, 2.5, 2, 1.5 and 1: one slot is missing, and the lower layer gets it.
        (4, 2, 2, 1000, [5, 5, 4, 3, 3]),
        (28, 8, 20, 1000, [28]),
        (19, 8, 1.1, 1000, [20, 18]),  # 1.1 is 11 / 10, whatever its binary value
        (3, 8, 20, 3, [8, 8, 8, 8]),  # a row shorter than the window has nothing to share out
    ],
)
def test_layers_of_a_pyramid(average, window, beta, length, expected):
    layers = len(expected)
    assert layer_budgets(average, window, beta, length, layers) == expected
    table = PyramidBudget(average, window, beta, layers)(np.array([length]))
    assert table.ravel().tolist() == expected


@pytest.mark.parametrize(
    ("reserve", "beta", "expected"),
    [
        # With L = 132 and W = 32, r_c = (132 r - 32) / 100.
        (1.0, 0.05, [100, 100, 100]),
        (0.5, 0.05, [63, 34, 5]),  # 2 * 0.34 - 0.05 = 0.63, and 0.05
        (0.5, 0.05, [34]),
        (0.75, 0.05, [100, 67, 34]),  # 2 * 0.67 - 1 = 0.34
        (0.275, 0.05, [4, 4, 4]),  # r_c = 0.043 <= beta
        (0.2, 0.05, [0, 0, 0]),  # r_c = -0.056
        (0.5, 0.2, [48, 34, 20]),
    ],
)
def test_layers_of_spindlekv(reserve, beta, expected):
    layers = len(expected)
    reference = [spindlekv.layer_tokens(reserve, 132, 32, i, layers, beta) for i in range(layers)]
    library = SpindleBudget(reserve, 32, beta, layers)(np.array([132, 32, 31, 0]))
    assert reference == (library[:, 0] - 32).tolist() == expected
    assert (library[:, 1:] == 32).all() and spindlekv.layer_tokens(reserve, 32, 32, 0, 2) == 0


def test_figures_of_the_spindlekv_paper():
    """Table 3 has alpha = 0.525 for beta = 0.05, and equation 15 the ratio of a layer."""
    alpha, over = Fraction(525, 1000), Fraction(5250001, 10**7)
    assert [spindlekv.layer_ratio(alpha, layer, 32) for layer in (0, 31)] == [1, Fraction(1, 20)]
    assert spindlekv.layer_ratio(over, 0, 32) == 1
    assert float(spindlekv.layer_ratio(over, 31, 32)) == pytest.approx(0.05, abs=1e-6)
    ratios = codebook.paper_ratios(60, 50, 100, heads=1, dim=128, key_bits=16)
    assert ratios == (0.5, 0.6, pytest.approx(131 / 128))
    printed = codebook.paper_ratios(60, 50, 100, 1, 128, key_bits=16, printed=True)
    assert printed[2] == pytest.approx((128 + 32 / 17) / 128)
    assert codebook.paper_ratios(60, 200, 100, heads=4, dim=128)[0] == 0.5
    unshared = math.prod(codebook.paper_ratios(100, 50, 100, 1, 128))
    assert unshared == pytest.approx(codebook.reserve_ratio(100, 50, 100, 1, 128))


# --- attention ------------------------------------------------------------------------------------

HALF_CAPPED = math.exp(3 * math.tanh(math.log(3) / 3))


@pytest.mark.parametrize(
    ("at", "places", "mass", "options", "expected"),
    [
        ([0, 1, 2], [0, 1, 2], [1, 1, 1], {},
         [[1, 0, 0], [1 / 4, 3 / 4, 0], [1 / 8, 3 / 8, 1 / 2]]),
        ([2], [0, 1, 2], [1, 1, 1], {"window": 2}, [[0, 3 / 7, 4 / 7]]),
        ([-1, 0, 5], [-1, 3, 4], [1, 1, 1], {}, [[0, 0, 0], [0, 0, 0], [0, 3 / 7, 4 / 7]]),
        ([9], [0, 0, 0], [2, 1, 0], {}, [[2 / 5, 3 / 5, 0]]),  # a mass is a key as many times
        ([9], [0, 1, 2], [1, 1, 0], {"soft_cap": 3.0},
         [[1 / (1 + HALF_CAPPED), HALF_CAPPED / (1 + HALF_CAPPED), 0]]),
    ],
)  # fmt: skip
def test_attention(at, places, mass, options, expected):
    """The query 1 gives the keys log 1, log 3 and log 4 weights in proportion to 1, 3 and 4."""
    q, k, v = np.ones((1, len(at), 1)), np.log([[1.0], [3], [4]]), np.array([[0.0], [1], [2]])
    with np.errstate(divide="ignore"):
        log_mass = np.log(mass)
    out, p = attention.softmax_attention(q, k, v, at, places, log_mass, scale=1.0, **options)
    close(p[0], np.array(expected), "rounding")
    close(out[0], expected @ v, "rounding")
    rows, *store, bias = (jnp.asarray(x, jnp.float32)[None, None] for x in (q, k, v, log_mass))
    queries = kernels.Queries(rows, jnp.array([at], jnp.int32))
    seen = kernels.Seen(bias, jnp.array([[places]], jnp.int32))
    mask = kernels.Mask(1.0, **options)
    mixed, lse, shares = kernels.decode_attention(queries, *store, seen, mask)
    close(shares[0, 0, 0], expected, "rounding")
    close(mixed[0, 0, 0], expected @ v, "rounding")
    sums = column_sums.column_sums(q, k, at, places, log_mass, scale=1.0, **options)
    close(sums[0], np.sum(expected, 0), "rounding")
    lse = np.asarray(lse)[0, 0]
    largest = column_maxima.column_maxima(q, k, lse, at, places, log_mass, 1.0, **options)
    close(largest[0], np.max(expected, 0), "rounding")


def test_rotation():
    x = np.array([[1.0, 10.0, 0.0, 0.0, 7.0]])
    expected = [2 * np.cos(1.5), 20 * np.cos(0.3), 2 * np.sin(1.5), 20 * np.sin(0.3), 7]
    np.testing.assert_allclose(rope(x, [3], [0.5, 0.1], factor=2.0)[0], expected)
    library = kvjax.Rope(jnp.array([0.5, 0.1]), factor=2.0)
    close(library.rotate(jnp.asarray(x, jnp.float32)[None, None], [[3]])[0, 0, 0], expected)
    np.testing.assert_allclose(inverse_frequencies(4, 100.0), [1, 0.1])


def test_hadamard_rotation():
    expected = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    np.testing.assert_array_equal(hadamard.hadamard_matrix(4), expected)
    assert [hadamard.block_size(channels) for channels in (64, 80, 96, 7)] == [64, 16, 32, 1]
    x = np.concatenate([np.zeros((4, 8)), np.eye(4)], axis=1)  # blocks of 4 are by themselves
    for rotated in (hadamard.rotate(x), kernels.hadamard_transform(jnp.asarray(x, jnp.float32))):
        np.testing.assert_array_equal(rotated, np.concatenate([np.zeros((4, 8)), expected], axis=1))


# --- methods that evict ---------------------------------------------------------------------------


def steps(*kept: list[int]) -> list:
    """Decode steps of a key of weight 1, and what is kept after each."""
    return [("decode", [1], 1, each) for each in kept]


LETTERS = [1, 1, 2, 4, 1, 1]  # column sums are 2.086, 1.086, 1.172, 1.344, 0.211 and 0.1
FEW = [6, 0.1, 3.5, 3, 1]  # maxima of three: 6, 6, 3.5, 3.5; sums of three: 6.1, 9.6, 6.6, 6.5
EVICTING = {
    # The reference, the method, and calls: weights of the keys, queries, and what is kept then.
    "sinks and recent": (
        StreamingLLM(6, sinks=2, scale=1.0), kvjax.StreamingLLM(6, sinks=2),
        [("prompt", [1] * 10, 1, [0, 1, 6, 7, 8, 9]), *steps([0, 1, 7, 8, 9, 10])],
    ),
    "a share at the prompt's end": (
        StreamingLLM(0.5, sinks=2, scale=1.0), kvjax.StreamingLLM(0.5, sinks=2),
        [("prompt", [1] * 10, 1, [0, 1, 7, 8, 9]), *steps([0, 1, 8, 9, 10]),
         ("prompt", [1] * 4, 1, [0, 1, 10, 11, 12, 13, 14])],  # 7 of 15
    ),
    "a row that is shorter than its sinks": (
        StreamingLLM(0.5, sinks=4, scale=1.0), kvjax.StreamingLLM(0.5, sinks=4),
        [("prompt", [1] * 3, 1, [0, 1, 2]), *steps([0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 5])],
    ),
    "heavy hitters": (
        H2O(4, scale=1.0), kvjax.H2O(4),
        [("prompt", LETTERS, 1, [0, 3, 4, 5]),
         ("decode", [2], 1, [0, 3, 5, 6]),  # 4 had 0.211 + 1/9, and was no longer recent
         ("decode", [1], -1, [0, 3, 6, 7])],
    ),
    "an odd budget": (H2O(5, scale=1.0), kvjax.H2O(5), [("prompt", LETTERS, 1, [0, 2, 3, 4, 5])]),
    "free slots come first": (
        H2O(8, scale=1.0), kvjax.H2O(8),
        [("prompt", LETTERS, 1, [*range(6)]),
         *steps([*range(7)], [*range(8)], [0, 1, 2, 3, 5, 6, 7, 8])],
    ),
    "one token of a share": (
        H2O(0.5, scale=1.0), kvjax.H2O(0.5), [("prompt", [1], 1, [0]), *steps([0, 1], [0, 2])],
    ),
    "scores go on in a second turn": (
        H2O(4, scale=1.0), kvjax.H2O(4),
        [("prompt", LETTERS, 1, [0, 3, 4, 5]), ("prompt", [1, 1], 1, [0, 3, 6, 7])],
    ),
    "no pooling": (
        SnapKV(3, observation=1, kernel=1, scale=1.0), kvjax.SnapKV(3, window=1, kernel=1),
        [("prompt", FEW, 1, [0, 2, 4]), *steps([0, 2, 4, 5])],
    ),
    "pooling by maximum": (
        SnapKV(3, observation=1, kernel=3, scale=1.0), kvjax.SnapKV(3, window=1, kernel=3),
        [("prompt", FEW, 1, [0, 1, 4])],
    ),
    "pooling by average": (  # without zeros beyond the ends, 1 and 3 would be kept
        SnapKV(3, observation=1, kernel=3, pooling="avg", scale=1.0),
        kvjax.SnapKV(3, window=1, kernel=3, pooling="avg"), [("prompt", FEW, 1, [1, 2, 4])],
    ),
    "a second turn has its own queries": (  # the query of 5 gives (1, 2, 4, 1) / 10
        SnapKV(4, observation=2, kernel=1, scale=1.0), kvjax.SnapKV(4, window=2, kernel=1),
        [("prompt", [1, 2, 4], [0, 0, -1], [0, 1, 2]), *steps([0, 1, 2, 3], [0, 1, 2, 3, 4]),
         ("prompt", [1], 1, [1, 2, 4, 5])],
    ),
}  # fmt: skip
LENGTH = 10  # of prompts, with padding: so that few of them are compiled


# The library decides the others alike in the tests of each method.
FAST = ("sinks and recent", "heavy hitters", "pooling by average")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in EVICTING]
)
def test_what_is_kept(name):
    reference, transform, calls = EVICTING[name]
    reference = copy.deepcopy(reference)
    of_scale = {"scale": 1.0}
    size = {"kv_heads": 1, "query_heads": 1, "head_dim": 1, "max_prompt": 16, "max_new": 8}
    cache, first = new_cache(transform, 1, **size, **of_scale), 0
    for phase, weights, queries, kept in calls:
        count = len(weights)
        q = np.broadcast_to(np.array(queries, float), count)[:, None]
        k, place = np.log(np.array(weights, float))[:, None], np.arange(first, first + count)
        v = place[:, None].astype(float)
        width = LENGTH if phase == "prompt" else 1
        pad = [(0, width - count)]
        arrays = (
            jnp.asarray(np.pad(x, [*pad, (0, 0)]), jnp.float32)[None, None] for x in (q, k, v)
        )
        where = jnp.asarray(np.pad(place, pad, constant_values=-1), jnp.int32)[None]
        out, cache = attend(cache, *arrays, where, phase=phase, **of_scale)
        if phase == "prompt":
            expected = reference.prompt(q[None], k, v, place)[0]
        else:
            expected = reference.decode(q, k[0], v[0], first)
        close(out[0, 0, :count], expected, "reference")
        assert reference.kept == slots_of(cache, 0, 0)["position"].tolist() == kept
        first += count


# --- methods that select --------------------------------------------------------------------------


def read(method, keys) -> None:
    """A prompt with these keys [H, T, D]; the value of a token is its position."""
    keys = np.array(keys, float)
    place = np.arange(keys.shape[1])
    values = np.broadcast_to(place[:, None].astype(float), keys.shape)
    method.prompt(np.zeros(keys.shape), keys, values, place)


@pytest.mark.parametrize(
    ("keys", "start", "options", "labels", "centroids"),
    [
        ([[1, 0], [0, 2], [3, 1], [1, 4]], [[1, 0], [0, 2]], {}, [0, 1, 0, 1],
         [[2, 0.5], [0.5, 3]]),  # means of the keys as they are
        ([[0], [1], [2], [10]], [[0], [1]], {"metric": "l2", "rounds": 0}, [0, 1, 1, 1], None),
        ([[0], [1], [2], [10]], [[0], [1]], {"metric": "l2", "rounds": 1}, [0, 0, 0, 1],
         [[0], [13 / 3]]),  # labels are those of the moved centroids
        ([[0], [1], [2], [10]], [[0], [1]], {"metric": "l2"}, [0, 0, 0, 1], [[1], [10]]),
        ([[2, 1], [9, 0]], [[1, 0], [10, 10]], {"metric": "l2", "rounds": 0}, [0, 0], None),
        ([[2, 1], [9, 0]], [[1, 0], [10, 10]], {"rounds": 0}, [1, 0], None),
        ([[2, 1], [9, 0]], [[1, 0], [10, 10]], {"metric": "inner_product", "rounds": 0}, [1, 1],
         None),
        ([[2, 0], [2, 0], [0, 3]], [[2, 0], [2, 0], [0, 3]], {}, [0, 0, 2],
         [[2, 0], [2, 0], [0, 3]]),  # the lower of equals; an empty cluster stays where it is
        ([[0, 0], [-1, 0], [1, 0]], [[1, 0], [0, 0]], {"rounds": 0}, [0, 1, 0], None),
        # Keys that cancel each other out: their centroid, now zero, is no worse than opposed.
        ([[1, 0], [-1, 0], [0, -1]], [[0, 1], [0, -1]], {"rounds": 1}, [0, 0, 1],
         [[0, 0], [0, -1]]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("implementation", EVERY)
def test_kmeans(keys, start, options, labels, centroids, implementation):
    given = {"metric": "cosine", "rounds": 20, **options}
    keys, start = np.array(keys, float), np.array(start, float)
    centroids = start if centroids is None else centroids
    every = (jnp.ones((1, 1, len(x)), bool) for x in (keys, start))
    members, there = every
    library = kernels.kmeans(
        jnp.asarray(keys, jnp.float32)[None, None], members,
        jnp.asarray(start, jnp.float32)[None, None], there, **given, implementation=implementation,
    )  # fmt: skip
    for label, moved in (
        clusterkv.kmeans(keys, start, given["metric"], given["rounds"]),
        scalar_kmeans.kmeans(keys, start, **given)[:2],
        (x[0, 0] for x in library),
    ):
        assert np.asarray(label).tolist() == labels
        close(moved, centroids, "rounding")


# In figure 8 of ClusterKV, k0 and k5 are in cluster 2, k1 in cluster 0, k2, k3 and k4 in cluster 1.
FIGURE_8 = [[1], [2, 3, 4], [0, 5]]


@pytest.mark.parametrize(
    ("scores", "room", "expected"),
    [
        ([2, 1, 3], 3, [0, 5, 1]),  # the figure's: its budget is the second prefix sum
        ([1, 2, 3], 3, [0, 5, 2]),  # trimmed to the lowest positions
        ([3, 2, 1], 1, [1]),
        ([2, 2, 2], 2, [1, 2]),
        ([0, -0.0, 2], 3, [0, 5, 1]),
        ([1, 3, 2], 0, []),
        ([1, 3, 2], 9, [2, 3, 4, 0, 5, 1]),
    ],
)
def test_selected_clusters(scores, room, expected):
    assert clusterkv.take_clusters(scores, FIGURE_8, room) == expected
    members = [token for cluster in FIGURE_8 for token in cluster]
    sizes, starts = jnp.array([[[1, 3, 2]]]), jnp.array([[[0, 1, 4]]])
    query = jnp.asarray(scores, jnp.float32)[None, None, None]
    order = kernels.rank_clusters(query, jnp.eye(3)[None, None], sizes)
    listed = kernels.build_indices(order, sizes, starts, jnp.array([[room]]), 6)[0, 0]
    assert [members[slot] for slot in listed.tolist() if slot >= 0] == expected


def test_bounds_of_pages():
    keys = np.array([[1, 5], [-2, 3], [0, 0], [4, -1], [7, 7]], float)
    low, high, score = [[-2, 3], [0, -1], [7, 7]], [[1, 5], [4, 0], [7, 7]], [-5, 6, -7]
    # 1 and -2 times: max(-2, 1) + max(-6, -10), max(0, 4) + max(2, 0), 7 - 14
    found = quest.page_bounds(keys, 2)
    order, count = jnp.arange(5, dtype=jnp.int32)[None, None], jnp.array([[5]])
    bounds = kernels.page_bounds(jnp.asarray(keys, jnp.float32)[None, None], order, count, 2, 3)
    query = jnp.array([[[[1.0, -2.0]]]])
    for lowest, highest, scores in (
        (*found, quest.page_scores(np.array([1, -2]), *found)),
        (*(x[0, 0] for x in bounds), kernels.page_scores(query, *bounds)[0, 0, 0]),
    ):
        for got, expected in ((lowest, low), (highest, high), (scores, score)):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.1, [0, 1]), (0.2, [0, 1]), (0.39, [0, 1]), (0.4, [0, 1, 3]), (1.0, [0, 1, 2, 3, 4])],
)
def test_partial_channels(share, expected):
    """Queries are strongest along channels 0 and 1, keys along 1 and 3."""
    q, k = np.diag([9.0, 4, 2, 0.5, 0.25]), np.array([[0, 3.0, 0, 2, 0]])
    np.testing.assert_allclose(np.abs(infinigen.skew(q)), np.eye(5), atol=1e-12)
    assert infinigen.partial_channels(q, k, np.eye(5), share) == expected
    library = np.abs(partial_projection(q, k, share))
    np.testing.assert_allclose(library, np.eye(5)[:, expected], atol=1e-12)


# --- the codebook ---------------------------------------------------------------------------------


def at(*degrees: float, norms=None) -> np.ndarray:
    """Vectors of the plane at these angles, [N, 2]; the cosine of two is that of the difference."""
    angle = np.radians(degrees)
    vectors = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    return vectors if norms is None else vectors * np.array(norms, float)[:, None]


TEN = math.cos(math.radians(10.5))
"""A threshold: neighbours are up to ten degrees apart."""
MOST = 10  # vectors of a case, with padding: so that few covers are compiled
covered = jax.jit(kernels.greedy_cover, static_argnames="capacity")
# Cosines are 0-1 0.33; 0-2 and 0-3 0.68; 1-4 and 1-5 0.58.
COVERED = np.array([
    [1, 1, 1, 0, 0], [1, 0, 0, 1, 1], [0.2, 1, 0, 0, 0], [0.2, 0, 1, 0, 0], [0, 0, 0, 1, 0],
    [0, 0, 0, 0, 1],
])  # fmt: skip


@pytest.mark.parametrize(
    ("vectors", "theta", "weights", "capacity", "centers", "index", "overflow"),
    [
        # Neighbours: 0: {0, 1}; 1: {0, 1, 2, 3}; 2: {1, 2, 3}; 3: {1, 2, 3, 4}; 4: {3, 4}; 5: {5}
        (at(-9, 0, 5, 9, 18, 90, norms=[1, 2, 3, 4, 5, 6]), TEN, None, None, [1, 4, 5],
         [0, 0, 0, 0, 1, 2], 0),
        # Only uncovered neighbours count: 5 has four at first, two of which are taken with 2.
        (at(0, 4, 8, 12, 16, 22, 26, 60, 64, 68), TEN, None, None, [2, 7, 5],
         [0, 0, 0, 0, 0, 2, 2, 1, 1, 1], 0),
        # 1 is covered with 0; it alone sees both vertices left, and may not cover them.
        (COVERED, 0.3, None, None, [0, 4, 5], [0, 0, 0, 0, 1, 2], 0),
        (at(0, 5, 40, 45), TEN, None, None, [0, 2], [0, 0, 1, 1], 0),  # the first of equals
        (at(0, 5, 40, 45), TEN, [1, 1, 1, 2], None, [2, 0], [1, 1, 0, 0], 0),
        # What has no room goes to the nearest: 5 and 6 are neighbours, but 0 and 2 are lower.
        (at(0, 5, 90, 100, 30, 50, 45, 180), TEN, None, 2, [0, 2], [0, 0, 1, 1, 0, 1, 0, 1], 4),
        (np.array([[1, 0], [0, 1], [1, 1]]), 0.9, None, 2, [0, 1], [0, 1, 0], 1),  # as near
        (np.array([[0, 0], [0, 2], [0, 0], [3, 0]]), 0.5, None, None, [1, 3], [0, 0, 0, 1], 0),
        (np.zeros((2, 3)), 0.5, None, None, [], [0, 0], 0),
        (at(0, 0, 9), 1.0, None, None, [0, 1, 2], [0, 1, 2], 0),  # no cosine is above 1
    ],
)  # fmt: skip
def test_covering(vectors, theta, weights, capacity, centers, index, overflow):
    cover = codebook.greedy_cover(vectors, theta, weights, capacity)
    assert (cover.centers, cover.index.tolist(), cover.overflow) == (centers, index, overflow)
    count, width = vectors.shape
    given = np.pad(np.ones(count) if weights is None else weights, (0, MOST - count))
    padded = np.pad(vectors, [(0, MOST - count), (0, 5 - width)]).astype(np.float32)
    library = covered(
        padded[None], np.arange(MOST)[None] < count, given[None].astype(np.int32),
        theta=np.float32(theta), capacity=MOST if capacity is None else capacity,
    )  # fmt: skip
    assert library.centers[0, : int(library.count[0])].tolist() == centers
    assert library.index[0, :count].tolist() == index and int(library.overflow[0]) == overflow


# --- 8 and 4 bits ---------------------------------------------------------------------------------


def test_8_bits():
    x = np.array([[127.0, -127, 0.5, 1.5, 2.5], [0, 0, 0, 0, 0], [-254, 2, 3, 5, 0]])
    expected = [[127, -127, 0, 2, 2], [0] * 5, [-127, 1, 2, 2, 0]]  # halves go to the even number
    library = kernels.quantise_slots(jnp.asarray(x, jnp.float32))
    for q, scale in (quantised.quantise_int8(x), library):
        np.testing.assert_array_equal(q, expected)
        np.testing.assert_array_equal(scale, [1, 0, 2])
    read = quantised.dequantise_int8(*quantised.quantise_int8(x))
    np.testing.assert_array_equal(read, np.array(expected) * [[1], [0], [2]])


@pytest.mark.parametrize("axis", ["token", "channel"])
def test_4_bits(axis):
    x = np.array([[0.0, 15, 7.4, 0.5, -2, 28, 13, 12], [3, 3, 3, 3, -1, 14, 0.5, 0.5]])
    # 7.5 and 0.5 go to the even number, 1.5 too
    expected = [[0, 15, 7, 0, 0, 15, 8, 7], [0, 0, 0, 0, 0, 15, 2, 2]]
    turn = (lambda y: np.swapaxes(y, 0, 1)) if axis == "channel" else np.asarray
    q, low, scale = quantised.quantise_4bit(turn(x), 4, axis)
    packed, by, least = kernels.quantise_groups(jnp.asarray(turn(x), jnp.float32), 4, axis)
    for got in (q, unpack_int4(packed)):
        np.testing.assert_array_equal(turn(got), expected)
    for got, wanted in ((low, [[0, -2], [3, -1]]), (scale, [[1, 2], [0, 1]])):
        np.testing.assert_array_equal(turn(got), wanted)
    for got, wanted in ((least, low), (by, scale)):
        np.testing.assert_array_equal(got, wanted)
    read = turn(quantised.dequantise_4bit(q, low, scale, 4, axis))
    np.testing.assert_array_equal(read[0], [0, 15, 7, 0, -2, 28, 14, 12])


def test_two_numbers_a_byte():
    q = np.array([[1, 2, 15, 0, 0, 15]], np.uint8)
    for pack, unpack in ((quantised.pack, quantised.unpack), (pack_int4, unpack_int4)):
        packed = np.asarray(pack(jnp.asarray(q)))
        np.testing.assert_array_equal(packed, [[0x01, 0x02, 0xFF]])
        np.testing.assert_array_equal(unpack(jnp.asarray(packed)), q)
    with pytest.raises(ValueError, match="even number of channels; given 3"):
        quantised.pack(q[:, :3])
