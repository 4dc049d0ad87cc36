"""The references of SpindleKV and of quantised payloads, on cases that a hand can compute."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from tests.references.attention import softmax_attention
from tests.references.codebook import (
    Codebook,
    cosines,
    directions,
    greedy_cover,
    paper_ratios,
    reserve_ratio,
)
from tests.references.quantised import (
    attention_error_bound,
    dequantise_4bit,
    dequantise_int8,
    error_bound,
    pack,
    quantise_4bit,
    quantise_int8,
    quantised_keys,
    quantised_values,
    rounded,
    rounding_excess,
    unpack,
)
from tests.references.rope import inverse_frequencies, rope
from tests.references.spindlekv import (
    LayerBudgetEviction,
    SpindleKV,
    context_ratio,
    layer_ratio,
    layer_tokens,
)


def at(*degrees: float, norms=None) -> np.ndarray:
    """Vectors of the plane at these angles, [N, 2]; the cosine of two is that of the difference."""
    angle = np.radians(degrees)
    vectors = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    return vectors if norms is None else vectors * np.array(norms, float)[:, None]


TEN = math.cos(math.radians(10.5))
"""A threshold: neighbours are up to ten degrees apart."""


def clouds(count: int, dim: int = 4, seed: int = 0) -> np.ndarray:
    """Vectors of any length around five directions, some further from it than others."""
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(5, dim))
    vectors = centers[rng.integers(5, size=count)] + 0.15 * rng.normal(size=(count, dim))
    return vectors * rng.uniform(0.2, 3.0, size=(count, 1))


# --- the cover ------------------------------------------------------------------------------------


def test_cover_by_hand():
    """Vertex 2 has four neighbours with itself; then 4 and 5 are alone among the uncovered."""
    vectors = at(-9, 0, 5, 9, 18, 90, norms=[1, 2, 3, 4, 5, 6])
    cover = greedy_cover(vectors, TEN)
    # Neighbours: 0: {0, 1}; 1: {0, 1, 2, 3}; 2: {1, 2, 3}; 3: {1, 2, 3, 4}; 4: {3, 4}; 5: {5}
    assert cover.centers == [1, 4, 5]
    assert cover.index.tolist() == [0, 0, 0, 0, 1, 2]
    assert (cover.overflow, cover.covered.all()) == (0, True)


def test_only_uncovered_neighbours_count():
    """Vertex 5 has four neighbours to begin with, more than 7 has; two are taken with vertex 2."""
    vectors = at(0, 4, 8, 12, 16, 22, 26, 60, 64, 68)
    cover = greedy_cover(vectors, TEN)
    assert cover.centers == [2, 7, 5]
    assert cover.index.tolist() == [0, 0, 0, 0, 0, 2, 2, 1, 1, 1]


def test_an_entry_is_uncovered_itself():
    """Vertex 1 is covered with 0; it alone sees both vertices left, and may not cover them."""
    vectors = np.eye(8)[:6]
    vectors[0], vectors[1] = [1, 1, 1, 0, 0, 0, 0, 0], [1, 0, 0, 1, 1, 0, 0, 0]
    vectors[2:4] = [[0.2, 1, 0, 0, 0, 0, 0, 0], [0.2, 0, 1, 0, 0, 0, 0, 0]]
    vectors[4:] = [[0, 0, 0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0, 0, 0]]
    # cosines: 0-1 0.33; 0-2, 0-3 0.68; 1-4, 1-5 0.58
    cover = greedy_cover(vectors, 0.3)
    assert cover.centers == [0, 4, 5]
    assert cover.index.tolist() == [0, 0, 0, 0, 1, 2]


def test_weights_decide_and_ties_go_to_the_first():
    vectors = at(0, 5, 40, 45)
    assert greedy_cover(vectors, TEN).centers == [0, 2]
    cover = greedy_cover(vectors, TEN, weights=[1, 1, 1, 2])
    assert (cover.centers, cover.index.tolist()) == ([2, 0], [1, 1, 0, 0])


def test_a_weight_is_that_many_copies():
    vectors, rng = clouds(40), np.random.default_rng(1)
    weights = rng.integers(1, 5, size=40)
    copies = np.repeat(np.arange(40), weights)
    once = greedy_cover(vectors, 0.97, weights)
    every = greedy_cover(vectors[copies], 0.97)
    assert [copies[c] for c in every.centers] == once.centers
    np.testing.assert_array_equal(every.index, once.index[copies])


def test_overflow_points_at_the_nearest_entry():
    vectors = at(0, 5, 90, 100, 30, 50, 45, 180)
    cover = greedy_cover(vectors, TEN, capacity=2)
    # 30, 50, 45 degrees: 5 and 6 are neighbours, but 0 and 2 are lower
    assert cover.centers == [0, 2]
    assert cover.index.tolist() == [0, 0, 1, 1, 0, 1, 0, 1]
    assert cover.covered.tolist() == [True] * 4 + [False] * 4
    assert cover.overflow == 4


def test_the_order_of_overflow_ties():
    """45 degrees lie as near to either axis: the first entry."""
    cover = greedy_cover(np.array([[1, 0], [0, 1], [1, 1]]), 0.9, capacity=2)
    assert cover.index.tolist() == [0, 1, 0]


def test_zero_vectors_are_no_vertices():
    vectors = np.array([[0, 0], [0, 2], [0, 0], [3, 0]])
    cover = greedy_cover(vectors, 0.5)
    assert (cover.centers, cover.index.tolist()) == ([1, 3], [0, 0, 0, 1])
    assert cover.overflow == 0
    book = Codebook(0.5)
    np.testing.assert_array_equal(book.read(*book.encode(vectors)), vectors)


@pytest.mark.parametrize("magnitude", [True, False])
def test_nothing_but_zeros(magnitude):
    book = Codebook(0.5, magnitude=magnitude)
    for store in (book.encode, book.append):
        np.testing.assert_array_equal(book.read(*store(np.zeros((2, 3)))), np.zeros((2, 3)))
        assert (len(book), book.overflow) == (0, 0)


def brute_force(vectors, theta, weights) -> list[int]:
    """Entries, with sets of vertices and every candidate tried."""
    n = len(vectors)

    def linked(a, b):
        u, w = vectors[a], vectors[b]
        product = sum(x * y for x, y in zip(u, w, strict=True))
        return a == b or product / math.hypot(*u) / math.hypot(*w) > theta

    near = [{b for b in range(n) if linked(a, b)} for a in range(n)]
    left, centers = set(range(n)), []
    while left:
        gain = {a: sum(weights[b] for b in near[a] & left) for a in left}
        centers.append(min(a for a in left if gain[a] == max(gain.values())))
        left -= near[centers[-1]]
    return centers


@pytest.mark.parametrize("seed", range(8))
def test_greed_against_brute_force(seed):
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(9, 3))
    weights = rng.integers(1, 4, size=9)
    cover = greedy_cover(vectors, 0.4, weights)
    expected = brute_force(vectors.tolist(), 0.4, weights.tolist())
    assert cover.centers == expected
    near = cosines(vectors, vectors) > 0.4
    fewest = next(
        n for n in range(10) for some in combinations(range(9), n) if near[list(some)].any(0).all()
    )
    assert fewest <= len(cover.centers) < 9


@pytest.mark.parametrize("theta", [0.5, 0.9, 0.97, 0.995])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_covered_vertex_is_near_its_entry(theta, seed):
    vectors = clouds(60, seed=seed)
    cover = greedy_cover(vectors, theta)
    nearness = cosines(vectors, vectors[cover.centers])
    assert (nearness[np.arange(60), cover.index] > theta).all()
    among = cosines(vectors[cover.centers], vectors[cover.centers])
    assert (among - np.eye(len(among)) <= theta).all()  # no entry could stand for another
    assert cover.index[cover.centers].tolist() == list(range(len(cover.centers)))

    room = max(len(cover.centers) // 2, 1)
    short = greedy_cover(vectors, theta, capacity=room)
    assert short.centers == cover.centers[:room]
    np.testing.assert_array_equal(short.covered, cover.index < room)
    outside = ~short.covered
    best = cosines(vectors, vectors[short.centers])
    np.testing.assert_array_equal(short.index[outside], best[outside].argmax(1))


@pytest.mark.parametrize("magnitude", [True, False])
def test_theta_one_keeps_every_vector(magnitude):
    """Even equal ones: their cosine is not above 1."""
    vectors = np.concatenate([clouds(30), clouds(30)[:4]])
    book = Codebook(1.0, magnitude=magnitude)
    index, norms = book.encode(vectors)
    assert index.tolist() == list(range(34))
    np.testing.assert_allclose(book.read(index, norms), vectors, rtol=1e-14)
    almost = greedy_cover(clouds(30), 1 - 1e-9)
    assert len(almost.centers) == 30


# --- reading and adding ---------------------------------------------------------------------------


def test_reading_by_hand():
    vectors = at(0, 5, 90, norms=[2, 3, 4])
    book = Codebook(TEN)
    index, norms = book.encode(vectors)
    np.testing.assert_allclose(book.entries, at(0, 90), atol=1e-15)
    np.testing.assert_allclose(norms, [2, 3, 4])
    np.testing.assert_allclose(book.read(index, norms), [[2, 0], [3, 0], [0, 4]], atol=1e-14)

    raw = Codebook(TEN, magnitude=False)
    index, norms = raw.encode(vectors)
    np.testing.assert_allclose(raw.read(index, norms), [[2, 0], [2, 0], [0, 4]], atol=1e-14)


def test_magnitudes_leave_only_the_angle():
    """|x - x'|^2 = 2 |x|^2 (1 - cos) < 2 |x|^2 (1 - theta)."""
    vectors, book = clouds(60), Codebook(0.95)
    read = book.read(*book.encode(vectors))
    norms = directions(vectors)[1]
    np.testing.assert_allclose(directions(read)[1], norms)
    off = np.sum((vectors - read) ** 2, axis=-1)
    assert (off < 2 * norms**2 * (1 - 0.95)).all() and len(book) < 60


@pytest.mark.parametrize(("capacity", "magnitude"), [(None, True), (3, True), (None, False)])
def test_encoding_what_was_read_changes_nothing(capacity, magnitude):
    book = Codebook(0.97, capacity, magnitude)
    once = book.read(*book.encode(clouds(50)))
    count = len(book)
    np.testing.assert_allclose(book.read(*book.encode(once)), once, rtol=1e-12)
    assert (len(book), book.overflow) == (count, 0)


def test_adding_by_hand():
    book = Codebook(TEN, capacity=3)
    book.encode(at(0, 20))
    new = at(8, 12, 40, 45, 180, norms=[2, 2, 5, 5, 7])
    index, norms = book.append(new)
    # 8 is near both; 12 nearer to 20; 40 becomes an entry, which 45 finds; 180 has no room
    assert index.tolist() == [0, 1, 2, 2, 2]
    np.testing.assert_allclose(book.entries, at(0, 20, 40))
    np.testing.assert_allclose(norms, [2, 2, 5, 5, 7])
    assert book.overflow == 1
    np.testing.assert_allclose(book.read(index, norms)[3], at(40)[0] * 5)


def test_adding_to_an_empty_book_and_adding_zero():
    book = Codebook(TEN, magnitude=False)
    assert book.append(np.array([[0.0, 0], [0, 3], [0, 0], [0, 9]]))[0].tolist() == [0, 0, 0, 0]
    np.testing.assert_array_equal(book.entries, [[0, 3]])


def test_overflow_adds_up():
    book = Codebook(0.99, capacity=2)
    book.encode(np.eye(4))
    assert book.overflow == 2
    book.append(np.eye(4))
    assert book.overflow == 4
    book.encode(np.eye(4)[:2])
    assert book.overflow == 0


# --- ratios ---------------------------------------------------------------------------------------


def test_reserve_ratio_by_hand():
    """8 bytes for each kept key or value of 16 numbers: an eighth of 4 bytes each."""
    assert reserve_ratio(0, 10, 10, kv_heads=1, dim=16) == 1 / 8
    assert reserve_ratio(20, 10, 10, kv_heads=1, dim=16) == 1 + 1 / 8
    assert reserve_ratio(20, 10, 10, kv_heads=1, dim=16, magnitude_bytes=0) == 1 + 1 / 16
    # 2 heads of 100 tokens in bfloat16; 50 entries, 120 slots: (50 * 64 * 2 + 240 * 6) / 51200
    ratio = reserve_ratio(
        50, 120, 100, kv_heads=2, dim=64, vector_bytes=2, index_bytes=4, magnitude_bytes=2
    )
    assert ratio == pytest.approx(7840 / 51200)


def test_equation_15_by_hand():
    r1, r2, r3 = paper_ratios(60, 50, 100, heads=1, dim=128, key_bits=16)
    assert (r1, r2, r3) == (0.5, 0.6, pytest.approx(131 / 128))
    assert paper_ratios(60, 50, 100, 1, 128, key_bits=16, printed=True)[2] == pytest.approx(
        (128 + 32 / 17) / 128
    )
    # over a cache repeated four times; without sharing both ratios agree
    assert paper_ratios(60, 200, 100, heads=4, dim=128)[0] == 0.5
    own = math.prod(paper_ratios(100, 50, 100, 1, 128))
    assert own == pytest.approx(reserve_ratio(100, 50, 100, 1, 128))
    assert math.prod(paper_ratios(60, 50, 100, 1, 128)) < reserve_ratio(60, 50, 100, 1, 128)


# --- the schedule ---------------------------------------------------------------------------------


def test_the_papers_alpha():
    """Table 3: beta = 0.05, alpha = 0.525, where the first layer reaches 1."""
    alpha, over_alpha = Fraction(525, 1000), Fraction(5250001, 10**7)
    assert [layer_ratio(alpha, layer, 32) for layer in (0, 31)] == [1, Fraction(1, 20)]
    assert layer_ratio(over_alpha, 0, 32) == 1
    assert float(layer_ratio(over_alpha, 31, 32)) == pytest.approx(0.05, abs=1e-6)


@pytest.mark.parametrize(
    ("reserve", "num_layers", "expected"),
    [
        # L = 132, W = 32: r_c = (132 r - 32) / 100
        (1.0, 3, [100, 100, 100]),
        (0.5, 3, [63, 34, 5]),  # r_c = 0.34: 2 * 0.34 - 0.05 = 0.63, and 0.05
        (0.5, 1, [34]),
        (0.75, 3, [100, 67, 34]),  # r_c = 0.67: 2 * 0.67 - 1 = 0.34
        (0.275, 3, [4, 4, 4]),  # r_c = 0.043 <= beta
        (0.2, 3, [0, 0, 0]),  # r_c = -0.056
    ],
)
def test_schedule_by_hand(reserve, num_layers, expected):
    kept = [layer_tokens(reserve, 132, 32, layer, num_layers) for layer in range(num_layers)]
    assert kept == expected


def test_other_beta_and_short_rows():
    assert [layer_tokens(0.5, 132, 32, layer, 3, beta=0.2) for layer in range(3)] == [48, 34, 20]
    assert [layer_tokens(0.5, length, 32, 0, 2) for length in (0, 31, 32, 33)] == [0] * 4


@pytest.mark.parametrize("num_layers", [1, 2, 3, 7, 32])
@pytest.mark.parametrize("length", [33, 100, 1000, 4097])
def test_the_schedules_mean(num_layers, length):
    for tenth in range(1, 11):
        reserve = tenth / 10
        mean = context_ratio(reserve, length, 32)
        ratios = [layer_ratio(mean, layer, num_layers) for layer in range(num_layers)]
        assert sum(ratios) / num_layers == max(mean, 0)
        assert ratios == sorted(ratios, reverse=True) and ratios[-1] >= 0 and ratios[0] <= 1
        kept = [32 + layer_tokens(reserve, length, 32, i, num_layers) for i in range(num_layers)]
        wanted = max(Fraction(tenth, 10) * length, 32)
        assert 0 <= wanted - Fraction(sum(kept), num_layers) < 1


# --- eviction -------------------------------------------------------------------------------------


def uniform(length: int, queries: int = 1, kv_heads: int = 1) -> tuple:
    """Queries of zero: every token gets the same.  The value of a token is its position."""
    q = np.zeros((queries, length, 2))
    k = np.ones((kv_heads, length, 2))
    v = np.broadcast_to(np.arange(length, dtype=float)[:, None], k.shape)
    return q, k, v, np.arange(length)


def weighted(weights, query=1.0) -> tuple:
    """One channel of keys log w: with scale 1, p[t, s] is proportional to w[s] ** query."""
    weights = np.atleast_2d(weights)
    q = np.full((len(np.atleast_1d(query)), weights.shape[1], 1), 1.0)
    q *= np.reshape(query, (-1, 1, 1))
    k = np.log(weights)[..., None]
    return q, k, np.ones_like(k), np.arange(weights.shape[1])


def test_scores_by_hand():
    """Equation 2: the token a of 4 has been received by L - a queries."""
    method = LayerBudgetEviction(1.0, 0, 1, 1, observation=2, scale=1.0)
    method.prompt(*weighted([1, 3, 4, 2]))
    p = np.array([[1, 3, 4, 0], [1, 3, 4, 2]]) / np.array([[8], [10]])
    np.testing.assert_allclose(method.scores()[0], p.sum(0) / [4, 3, 2, 1])


def test_age_divides_the_score():
    """Equal attention: the newest of the others have the highest score."""
    method = LayerBudgetEviction(0.5, 0, 1, 1, observation=4)
    out = method.prompt(*uniform(20))
    np.testing.assert_allclose(out[0, :, 0], np.arange(20) / 2)
    assert method.kept == [list(range(10, 20))]
    assert set(method.keys) == {(p, 0) for p in range(10, 20)}
    q, k, v = np.zeros((1, 2)), np.ones((1, 2)), np.full((1, 2), 20.0)
    np.testing.assert_allclose(method.decode(q, k, v, 20), np.mean(range(10, 21)))


def test_a_second_turn_has_its_own_queries_and_ages_by_position():
    method = LayerBudgetEviction(0.5, 0, 1, 1, observation=2, scale=1.0)
    method.prompt(*weighted([16, 1, 1, 16, 1, 1, 2, 4]))
    assert method.kept == [[0, 3, 6, 7]]
    one = np.ones((1, 1, 1))
    method.prompt(one, np.log(8 * one), one, np.array([8]), last=False)
    np.testing.assert_allclose(
        method.scores()[0], np.array([16, 16, 2, 4, 8]) / 46 / [9, 6, 3, 2, 1]
    )


def test_heads_decide_together_or_each_for_itself():
    """One likes what the other does not."""
    tokens = weighted([8, 1, 8, 1, 1, 1, 1, 1, 1, 1], query=[1.0, -1.0])
    options = {"observation": 2, "scale": 1.0}
    alone = LayerBudgetEviction(0.4, 0, 1, 1, **options)
    alone.prompt(*tokens)
    assert alone.kept == [[0, 2, 8, 9], [6, 7, 8, 9]]
    assert alone.weights() == {(0, 0): 1, (2, 0): 1, (6, 0): 1, (7, 0): 1, (8, 0): 2, (9, 0): 2}
    together = LayerBudgetEviction(0.4, 0, 1, 1, unfold=False, **options)
    together.prompt(*tokens)
    assert together.kept == [[2, 7, 8, 9]]
    assert set(together.weights().values()) == {1}


def row(length: int, queries: int = 4, kv_heads: int = 2, dim: int = 8, seed: int = 0) -> tuple:
    """q, k, v and positions; keys and values around few directions."""
    rng = np.random.default_rng(seed)
    q = 2 * rng.normal(size=(queries, length, dim))
    k, v = (clouds(kv_heads * length, dim, s).reshape(kv_heads, length, dim) for s in (seed, 99))
    return q, k, v, np.arange(length)


FREQUENCIES = inverse_frequencies(8)


def rotated(x, positions):
    return rope(x, positions, FREQUENCIES)


def full_attention(q, k, v, rotate=rotated) -> np.ndarray:
    """[Q, T, D] of the whole row."""
    group, positions = len(q) // len(k), np.arange(q.shape[1])
    q, k = rotate(q, positions), rotate(k, positions)
    heads = zip(np.split(q, len(k)), k, v, strict=True)
    outs = [softmax_attention(*head, positions, positions)[0] for head in heads]
    assert all(len(out) == group for out in outs)
    return np.concatenate(outs)


@pytest.mark.parametrize("unfold", [True, False])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("rotate", [None, rotated])
def test_a_reserve_of_one_is_full_attention(unfold, chunks, rotate):
    q, k, v, positions = row(40)
    method = LayerBudgetEviction(1.0, 1, 4, 2, observation=8, unfold=unfold, rope=rotate)
    outs = []
    parts = np.array_split(np.arange(36), chunks)
    for i, part in enumerate(parts):
        tokens = (q[:, part], k[:, part], v[:, part], positions[part])
        outs.append(method.prompt(*tokens, last=i == chunks - 1))
    outs += [method.decode(q[:, t], k[:, t], v[:, t], t)[:, None] for t in range(36, 40)]
    expected = full_attention(q, k, v, rotate or (lambda x, _: x))
    np.testing.assert_allclose(np.concatenate(outs, axis=1), expected, atol=1e-12)


@pytest.mark.parametrize("unfold", [True, False])
def test_chunks_and_padding_change_nothing(unfold):
    q, k, v, positions = row(40)
    options = {"observation": 8, "unfold": unfold, "rope": rotated, "theta_key": 0.9}
    whole, pieces = (SpindleKV(0.5, 1, 4, 2, **options) for _ in range(2))
    whole.prompt(q, k, v, positions)
    order = np.array([*range(20), -1, -1, *range(20, 40), -1])
    for part in np.array_split(order, 4):
        last = part[-1] == -1 and part[-2] == 39
        pieces.prompt(q[:, part], k[:, part], v[:, part], part, last=last)
    assert whole.kept == pieces.kept
    assert whole.key_codes.keys() == pieces.key_codes.keys()
    np.testing.assert_allclose(whole.key_book.entries, pieces.key_book.entries)


def test_a_layers_slots_and_a_second_turn():
    method = LayerBudgetEviction(0.5, 0, 2, 2, observation=4, unfold=False)
    q, k, v, positions = row(40)
    method.prompt(*(x[:, :24] for x in (q, k, v)), positions[:24])
    # r_c = (12 - 4) / 20 = 0.4; layer 0 has 0.75 of 20
    assert [len(kept) for kept in method.kept] == [19, 19]
    method.prompt(*(x[:, :3] for x in (q, k, v)), np.full(3, -1))
    assert [len(kept) for kept in method.kept] == [19, 19]
    method.prompt(*(x[:, 24:] for x in (q, k, v)), positions[24:])
    # of 35 live: r_c = 16 / 36, layer 0 has 2 r_c - 0.05 of 36 = 30.2, and 4
    assert [len(kept) for kept in method.kept] == [34, 34]


# --- the whole method -----------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [0, 3])
@pytest.mark.parametrize("unfold", [True, False])
def test_thresholds_of_one_leave_eviction_alone(unfold, interval):
    q, k, v, positions = row(60)
    shape, options = (0.6, 1, 3, 2), {"observation": 8, "unfold": unfold, "rope": rotated}
    evicts = LayerBudgetEviction(*shape, **options)
    both = SpindleKV(*shape, theta_key=1.0, theta_value=1.0, interval=interval, **options)
    for method in (evicts, both):
        method.prompt(*(x[:, :50] for x in (q, k, v)), positions[:50])
    for t in range(50, 60):
        token = (q[:, t], k[:, t], v[:, t], t)
        np.testing.assert_allclose(both.decode(*token), evicts.decode(*token), atol=1e-12)
    assert both.kept == evicts.kept
    encoded = len(evicts.weights()) - (2 if interval else 0)  # the tenth token waits in both heads
    assert len(both.key_book) == len(both.key_codes) == encoded


@pytest.mark.parametrize("magnitude", [True, False])
@pytest.mark.parametrize("unfold", [True, False])
def test_attention_is_over_what_the_codebook_reads(unfold, magnitude):
    q, k, v, positions = row(48)
    method = SpindleKV(
        0.6, 0, 2, 2, observation=8, unfold=unfold, rope=rotated, magnitude=magnitude,
        theta_key=0.9, theta_value=0.8, capacity=30,
    )  # fmt: skip
    exact = method.prompt(*(x[:, :40] for x in (q, k, v)), positions[:40])
    np.testing.assert_allclose(exact, full_attention(q[:, :40], k[:, :40], v[:, :40]), atol=1e-12)
    for t in range(40, 48):
        out = method.decode(q[:, t], k[:, t], v[:, t], t)
        for i in range(4):
            head, kept = i // 2, method.kept[i if unfold else i // 2]
            keys, values = [], []
            for p in kept:
                entry, norm = method.key_codes[p, head]
                assert norm == pytest.approx(np.linalg.norm(k[head, p]))
                keys.append(method.key_book.entries[entry] * (norm if magnitude else 1))
                entry, norm = method.value_codes[p, head]
                values.append(method.value_book.entries[entry] * (norm if magnitude else 1))
            logits = rotated(np.array(keys), kept) @ rotated(q[i, [t]], [t])[0] / math.sqrt(8)
            p = np.exp(logits - logits.max())
            np.testing.assert_allclose(out[i], p @ np.array(values) / p.sum(), atol=1e-12)
    assert len(method.key_book) < len(method.key_codes) and len(method.value_book) <= 30


def test_vertices_are_in_position_major_order_and_heads_share_a_book():
    """Both heads have the first direction; of the single ones that of position 0 comes first."""
    k = np.array([[[2.0, 0, 0], [0, 0, 3]], [[0, 5.0, 0], [7, 0, 0]]])
    method = SpindleKV(1.0, 0, 1, 2, observation=1)
    method.prompt(np.zeros((2, 2, 3)), k, k, np.arange(2))
    np.testing.assert_array_equal(method.key_book.entries, np.eye(3))
    assert method.key_codes == {(0, 0): (0, 2), (0, 1): (1, 5), (1, 0): (2, 3), (1, 1): (0, 7)}
    method.decode(np.zeros((2, 3)), np.array([[0, 2.0, 0], [-1, 0, 0]]), k[:, 0], 2)
    assert (method.key_codes[2, 0], method.key_codes[2, 1]) == ((1, 2), (3, 1))
    assert (len(method.key_book), len(method.value_book), method.slots) == (4, 3, 6)


def test_tokens_kept_by_more_heads_weigh_more():
    """Equal clouds of two tokens; the second pair is in the window of both query heads."""
    tokens = weighted([8, 8, 1, 1, 1, 1], query=[1.0, -1.0])
    k = np.concatenate([tokens[1], np.zeros((1, 6, 1))], axis=-1)
    q = np.concatenate([tokens[0], np.zeros((2, 6, 1))], axis=-1)
    v = at(0, 1, 40, 41, 80, 81)[None]
    method = SpindleKV(4 / 6, 0, 1, 1, observation=2, scale=1.0, theta_value=TEN)
    method.prompt(q, k, v, tokens[3])
    assert method.kept == [[0, 1, 4, 5], [2, 3, 4, 5]]
    np.testing.assert_allclose(method.value_book.entries, v[0, [4, 0, 2]])


def test_new_tokens_wait_for_the_interval():
    q, k, v, positions = row(47)
    method = SpindleKV(0.5, 0, 2, 2, observation=8, interval=3, theta_key=0.9)
    method.prompt(*(x[:, :40] for x in (q, k, v)), positions[:40])
    for t in range(40, 45):
        method.decode(q[:, t], k[:, t], v[:, t], t)
    waiting = set(method.keys) - set(method.key_codes)
    assert waiting == {(t, head) for t in (43, 44) for head in (0, 1)}
    np.testing.assert_array_equal(method.keys[44, 1], k[1, 44])
    method.decode(q[:, 45], k[:, 45], v[:, 45], 45)
    assert set(method.keys) == set(method.key_codes)
    method.decode(q[:, 46], k[:, 46], v[:, 46], 46)
    assert set(method.keys) - set(method.key_codes) == {(46, 0), (46, 1)}
    assert set(method.key_codes) == set(method.value_codes)


def test_a_further_prompt_encodes_anew():
    q, k, v, positions = row(60)
    method = SpindleKV(0.5, 0, 2, 2, observation=8, capacity=12, theta_key=0.9, interval=4)
    method.prompt(*(x[:, :40] for x in (q, k, v)), positions[:40])
    method.decode(q[:, 40], k[:, 40], v[:, 40], 40)
    method.prompt(*(x[:, 41:] for x in (q, k, v)), positions[41:])
    assert set(method.keys) == set(method.key_codes) == set(method.weights())
    assert len(method.key_book) <= 12
    used = {entry for entry, _ in method.key_codes.values()}
    assert used == set(range(len(method.key_book)))


# --- quantised ------------------------------------------------------------------------------------


def test_int8_by_hand():
    x = np.array([[127.0, -127, 0.5, 1.5, 2.5], [0, 0, 0, 0, 0], [-0.5, 0.25, 0, 0, 0]])
    q, scale = quantise_int8(x)
    np.testing.assert_array_equal(q[:2], [[127, -127, 0, 2, 2], [0] * 5])
    assert q[2].tolist()[0] == -127 and abs(q[2, 1] - 63.5) == 0.5
    np.testing.assert_allclose(scale, [1, 0, 0.5 / 127], rtol=1e-7)
    np.testing.assert_allclose(dequantise_int8(q, scale)[0], [127, -127, 0, 2, 2])


def test_4bit_by_hand():
    x = np.array([[0.0, 15, 7.4, 0.5, -2, 28, 13, 12], [3, 3, 3, 3, -1, 0, 0.5, 0.5]])
    q, lo, scale = quantise_4bit(x, group=4, axis="token")
    np.testing.assert_array_equal(lo, [[0, -2], [3, -1]])
    np.testing.assert_allclose(scale, [[1, 2], [0, 0.1]], rtol=1e-7)
    np.testing.assert_array_equal(q[0], [0, 15, 7, 0, 0, 15, 8, 7])  # 7.5 to even; 7.0
    np.testing.assert_array_equal(q[1], [0, 0, 0, 0, 0, 10, 15, 15])
    np.testing.assert_allclose(dequantise_4bit(q, lo, scale, 4)[0], [0, 15, 7, 0, -2, 28, 14, 12])


def test_4bit_per_channel_is_per_token_of_the_transposed():
    x = np.random.default_rng(0).normal(size=(2, 12, 6))
    by_channel = quantise_4bit(x, group=4, axis="channel")
    by_token = quantise_4bit(x.swapaxes(1, 2), group=4, axis="token")
    assert by_channel[1].shape == (2, 3, 6)
    for a, b in zip(by_channel, by_token, strict=True):
        np.testing.assert_array_equal(a, b.swapaxes(1, 2))
    # a channel of its own size costs the others nothing
    x[:, :, 2] *= 100
    q = quantise_4bit(x, group=4, axis="channel")[0]
    others = [0, 1, 3, 4, 5]
    np.testing.assert_array_equal(q[:, :, others], by_channel[0][:, :, others])


def test_packing():
    q = np.array([[1, 2, 15, 0, 0, 15]], np.uint8)
    np.testing.assert_array_equal(pack(q), [[0x01, 0x02, 0xFF]])
    assert pack(q).dtype == np.uint8
    every = np.array([[low, high] for low in range(16) for high in range(16)], np.uint8)
    np.testing.assert_array_equal(np.sort(pack(every)[:, 0]), np.arange(256))
    np.testing.assert_array_equal(unpack(pack(every)), every)
    with pytest.raises(ValueError, match="even number of channels; given 3"):
        pack(q[:, :3])


@pytest.mark.parametrize(
    ("x", "expected"),
    # bfloat16 has steps of 2 ** -7 from 1 on: 1 + 2 ** -8 lies half-way, and goes to the even 1
    [(1 + 2**-8, 1), (1 + 3 * 2**-8, 1 + 2**-6), (1 + 2**-8 + 2**-20, 1 + 2**-7), (-3.0, -3)],
)
def test_bfloat16(x, expected):
    assert rounded(np.array([x]), "bfloat16").tolist() == [expected]


def samples(dtype: str) -> np.ndarray:
    """[2, 64, 32]: channels of very different sizes and means, in `dtype`."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(2, 64, 32)) * np.exp(rng.normal(size=32)) + 20 * rng.normal(size=32)
    return rounded(x, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_error_bounds(dtype):
    x = samples(dtype)
    q, scale = quantise_int8(x)
    off = np.abs(x - dequantise_int8(q, scale))
    assert (off <= error_bound(scale)[..., None] * (1 + 1e-12)).all()
    assert off.max() > 0.8 * error_bound(scale).max()
    assert np.abs(q).max(axis=-1).min() == 127

    for axis, group in (("token", 16), ("channel", 32), ("channel", 24)):
        q, lo, scale = quantise_4bit(x, group, axis, dtype)
        off = np.abs(x - dequantise_4bit(q, lo, scale, group, axis))
        along = -1 if axis == "token" else -2
        bound = np.take(error_bound(scale), np.arange(x.shape[along]) // group, axis=along)
        assert (off <= bound * (1 + 1e-12)).all()
        assert (off > 0.8 * bound).any() and q.min() == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_excess(dtype):
    """In a wider type than the scales' a group far from zero falls outside the sixteen steps."""
    x = 50 + 0.01 * np.random.default_rng(0).normal(size=(64, 32))
    q, lo, scale = quantise_4bit(x, 32, "token", dtype)
    off = np.abs(x - dequantise_4bit(q, lo, scale, 32)).max(axis=-1, keepdims=True)
    assert (off > error_bound(scale)).any()
    excess = rounding_excess(lo, scale, dtype)
    assert (off <= np.maximum(error_bound(scale), excess) * (1 + 2**-7)).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_attention_on_quantised_tokens(bits):
    rng = np.random.default_rng(5)
    q, k, v = rng.normal(size=(3, 64, 32))
    positions = np.arange(64)
    if bits == 8:
        (qk, ks), (qv, vs) = quantise_int8(k), quantise_int8(v)
        read = dequantise_int8(qk, ks), dequantise_int8(qv, vs)
        errors = [np.broadcast_to(error_bound(s)[:, None], k.shape) for s in (ks, vs)]
    else:
        (qk, klo, ks), (qv, vlo, vs) = quantise_4bit(k, 32, "channel"), quantise_4bit(v, 32)
        read = dequantise_4bit(qk, klo, ks, 32, "channel"), dequantise_4bit(qv, vlo, vs, 32)
        errors = [np.repeat(error_bound(ks), 32, axis=0), np.repeat(error_bound(vs), 32, axis=1)]
    out, p = softmax_attention(q[None], k, v, positions, positions)
    off, _ = softmax_attention(q[None], *read, positions, positions)
    bound = attention_error_bound(q[None], v, p, *errors)
    assert (np.abs(out - off) <= bound).all()
    assert np.abs(out - off).max() > 0
    if bits == 8:
        assert bound.max() < 0.5 and np.abs(out - off).max() < 0.05


@pytest.mark.parametrize(
    ("tokens", "keys", "values"), [(0, 0, 0), (127, 0, 0), (128, 128, 0), (300, 256, 172)]
)
def test_residual_windows(tokens, keys, values):
    assert (quantised_keys(tokens), quantised_values(tokens)) == (keys, values)
