"""The references of the recall methods, on cases small enough to compute by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.references.attention import softmax_attention
from tests.references.clusterkv import (
    ClusterKV,
    cluster_counts,
    kmeans,
    take_clusters,
    tokens_per_cluster,
)
from tests.references.infinigen import (
    InfiniGen,
    partial_channels,
    partial_projections,
    skew,
    token_count,
)
from tests.references.quest import Quest, page_bounds, page_budget, page_scores

MEAN = {"scale": 0.0}
"""Attention with equal weights: an output is the mean of the values of the selected tokens."""


def values(positions, heads=1, dim=2) -> np.ndarray:
    """Each token's value is its position: [H, T, D]."""
    return np.broadcast_to(np.array(positions, float)[:, None], (heads, len(positions), dim))


def read(method, keys, last=True, start=0) -> None:
    """A prompt with these keys [H, T, D], at the positions from `start`."""
    keys = np.array(keys, float)
    heads, length, dim = keys.shape
    positions = np.arange(start, start + length)
    method.prompt(np.zeros(keys.shape), keys, values(positions, heads, dim), positions, last)


def step(method, position, q, k, **more) -> list[list[int]]:
    """Decodes one token with q [Q, D] and k [H, D]; the output must be that of its selection."""
    q, k = np.array(q, float), np.array(k, float)
    v = values([position], *k.shape)[:, 0]
    out, selected = method.decode(q, k, v, position, **more)
    if method.options == MEAN:
        means = np.repeat([np.mean(chosen) for chosen in selected], len(q) // len(selected))
        np.testing.assert_allclose(out, np.repeat(means[:, None], q.shape[1], axis=1))
    return selected


def random_tokens(length, query_heads=4, kv_heads=2, dim=6, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(query_heads, length, dim))
    k, v = rng.normal(size=(2, kv_heads, length, dim))
    return q, k, v


def spread(head, positions, count) -> list[int]:
    """A draw: every few positions."""
    return [positions[i * len(positions) // count] for i in range(count)]


# --- k-means --------------------------------------------------------------------------------------


def test_kmeans_by_hand():
    keys = [[1, 0], [0, 2], [3, 1], [1, 4]]
    labels, centroids = kmeans(keys, [[1, 0], [0, 2]])
    assert labels.tolist() == [0, 1, 0, 1]
    np.testing.assert_allclose(centroids, [[2, 0.5], [0.5, 3]])  # means of the keys as they are


@pytest.mark.parametrize(
    ("iterations", "labels", "centroids"),
    [
        (0, [0, 1, 1, 1], [0, 1]),
        (1, [0, 0, 0, 1], [0, 13 / 3]),  # the labels are to the moved centroids
        (2, [0, 0, 0, 1], [1, 10]),
        (20, [0, 0, 0, 1], [1, 10]),
    ],
)
def test_kmeans_rounds(iterations, labels, centroids):
    got = kmeans([[0], [1], [2], [10]], [[0], [1]], "l2", iterations)
    assert got[0].tolist() == labels
    np.testing.assert_allclose(got[1][:, 0], centroids)


@pytest.mark.parametrize(
    ("metric", "labels"), [("cosine", [1, 0]), ("l2", [0, 0]), ("inner_product", [1, 1])]
)
def test_kmeans_metrics(metric, labels):
    keys, centroids = [[2, 1], [9, 0]], [[1, 0], [10, 10]]
    assert kmeans(keys, centroids, metric, 0)[0].tolist() == labels


def test_kmeans_unknown_metric():
    with pytest.raises(ValueError, match="given manhattan"):
        kmeans([[1]], [[1]], "manhattan")


@pytest.mark.parametrize("metric", ["cosine", "l2", "inner_product"])
def test_kmeans_empty_clusters_keep_their_centroid_and_ties_go_down(metric):
    labels, centroids = kmeans([[2, 0], [2, 0], [0, 3]], [[2, 0], [2, 0], [0, 3]], metric)
    assert labels.tolist() == [0, 0, 2]
    np.testing.assert_array_equal(centroids, [[2, 0], [2, 0], [0, 3]])


def test_kmeans_zeros_have_cosine_zero():
    labels, centroids = kmeans([[0, 0], [-1, 0], [1, 0]], [[1, 0], [0, 0]], iterations=0)
    assert labels.tolist() == [0, 1, 0]
    np.testing.assert_array_equal(centroids, [[1, 0], [0, 0]])
    # the cluster's keys cancel each other out: its centroid, now zero, is no worse than opposed
    labels, centroids = kmeans([[1, 0], [-1, 0], [0, -1]], [[0, 1], [0, -1]], iterations=1)
    assert labels.tolist() == [0, 0, 1]
    np.testing.assert_array_equal(centroids, [[0, 0], [0, -1]])


def test_kmeans_ends_where_every_key_is_nearest_to_its_own_mean():
    keys = random_tokens(60, kv_heads=1)[1][0]
    labels, centroids = kmeans(keys, keys[:5], "l2", 200)
    for key, label in zip(keys, labels, strict=True):
        assert np.argmin([np.sum((key - mu) ** 2) for mu in centroids]) == label
    for c, mu in enumerate(centroids):
        np.testing.assert_allclose(mu, keys[labels == c].mean(axis=0))


# --- ClusterKV ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "options", "expected"),
    [
        (0, {}, []),
        (16, {}, [0]),
        (17, {}, [1]),
        (119, {}, [1]),
        (120, {}, [2]),  # 1.5, halves up
        (32768, {}, [410]),
        (20, {"size": 1}, [4]),
        (20, {"clusters": 3}, [3]),
        (20, {"clusters": 400}, [4]),
        (16, {"clusters": 3}, []),
        (5, {"size": 2, "sinks": 0}, [3]),
        (240, {"chunk": 120}, [2, 2]),
        (241, {"chunk": 120}, [2, 2, 1]),
        (25, {"chunk": 10, "size": 2}, [0, 4, 3]),  # of the sinks, ten and six
        (25, {"chunk": 10, "clusters": 3}, [3]),
    ],
)
def test_cluster_counts(n, options, expected):
    assert cluster_counts(n, **{"size": 80, **options}) == expected


@pytest.mark.parametrize(
    ("length", "budget", "expected"),
    [
        (0, 17, 8),
        (1000, 100, 8),  # 10 would be two more than a twelfth
        (1000, 200, 8),  # 5
        (2000, 200, 10),
        (2100, 200, 11),  # 10.5
        (32768, 1024, 32),
        (131072, 1024, 85),  # a twelfth
    ],
)
def test_tokens_per_cluster(length, budget, expected):
    assert tokens_per_cluster(length, budget) == expected


# Figure 8: k0 and k5 are in cluster 2, k1 in cluster 0, k2, k3 and k4 in cluster 1.
FIGURE_8 = [[1], [2, 3, 4], [0, 5]]


@pytest.mark.parametrize(
    ("scores", "room", "expected"),
    [
        ([2, 1, 3], 3, [0, 5, 1]),  # the figure: its budget is the second prefix sum
        ([1, 2, 3], 3, [0, 5, 2]),  # trimmed to the lowest positions
        ([1, 2, 3], 4, [0, 5, 2, 3]),
        ([3, 2, 1], 1, [1]),
        ([2, 2, 2], 2, [1, 2]),
        ([0, -0.0, 2], 3, [0, 5, 1]),
        ([1, 3, 2], 2, [2, 3]),
        ([1, 3, 2], 0, []),
        ([1, 3, 2], 9, [2, 3, 4, 0, 5, 1]),
    ],
)
def test_take_clusters(scores, room, expected):
    assert take_clusters(scores, FIGURE_8, room) == expected


def test_an_empty_cluster_takes_nothing():
    assert take_clusters([9, 1], [[], [3, 4]], 1) == [3]


X, Y, Z = np.eye(3)
FIGURE_8_KEYS = [X, 3 * Z, 2 * X, Y, Y, 2 * Y, Z]  # a sink, then the figure's keys at 1 to 6


def figure_8(budget, draws=None, **options):
    """Starts the figure's clusters from positions 2, 3 and 6; generated ones as `draws` says."""
    draws = {0: [2, 3, 6], **(draws or {})}
    calls = iter(range(9))

    def draw(head, positions, count):
        chosen = draws[next(calls)]
        assert head == 0
        assert len(chosen) == count
        assert set(chosen) <= set(positions)
        return chosen

    method = ClusterKV(budget, draw, sinks=1, clusters=3, **options, **MEAN)
    read(method, [FIGURE_8_KEYS])
    return method


@pytest.mark.parametrize(
    ("q", "budget", "expected"),
    [
        # centroids are 2X, 4/3 Y and 2 Z
        ([2, 1, 3], 4, [0, 1, 6, 2, 7]),
        ([1, 2, 3], 4, [0, 1, 6, 3, 7]),
        ([1, 2, 3], 5, [0, 1, 6, 3, 4, 7]),
        ([2, 2.9, 1], 3, [0, 2, 3, 7]),  # 4, 3.87, 2: a dot product with the mean, not a cosine
        ([2, 3.1, 1], 3, [0, 3, 4, 7]),
        ([-2, -3.1, -1], 4, [0, 1, 6, 2, 7]),
        ([1, 0, 1], 4, [0, 2, 1, 6, 7]),  # a tie
        ([1, 2, 3], 7, [0, 1, 6, 3, 4, 5, 2, 7]),
        ([1, 2, 3], 100, [0, 1, 6, 3, 4, 5, 2, 7]),
    ],
)
def test_clusterkv_selection_by_hand(q, budget, expected):
    assert step(figure_8(budget), 7, [q], [X]) == [expected]


def test_clusterkv_clusters_generated_tokens_every_interval():
    # cluster 3 starts from the key at 8, cluster 4 from that at 7
    method = figure_8(5, {1: [8, 7], 2: [12, 11]}, interval=4, new_clusters=2)
    keys = [4 * X, 9 * Y, X, Y, 20 * Y, Z, Z, Z, X]
    q = [0, 1, 0]  # scores of clusters 0 to 2: 0, 4/3, 0
    selected = [step(method, 7 + i, [q], [key])[0] for i, key in enumerate(keys)]
    old = [0, 3, 4, 5, 2]
    assert selected[:4] == [[*old, 7], [*old, 7, 8], [*old, 7, 8, 9], [*old, 7, 8, 9, 10]]
    # clusters 3 (8, 10: mean 5 Y) and 4 (7, 9: mean 2.5 X) are there now, and count as budget
    new = [0, 8, 10, 3, 4]
    assert selected[4:8] == [[*new, *range(11, 12 + i)] for i in range(4)]
    # cluster 5 started from Z, the key at 12, and cluster 6 from that at 11: 20 Y
    assert selected[8] == [0, 11, 8, 10, 3, 15]
    assert step(method, 16, [[0, 0, 1]], [X]) == [[0, 1, 6, 12, 13, 15, 16]]  # 2 Z before Z


def test_clusterkv_of_an_interval_of_one_and_fewer_tokens_than_clusters():
    method = figure_8(3, {1: [7], 2: [8], 3: [9]}, interval=1)
    assert step(method, 7, [X + Z], [5 * X]) == [[0, 2, 1, 7]]
    assert step(method, 8, [X], [X]) == [[0, 7, 2, 8]]
    assert step(method, 9, [X], [X]) == [[0, 7, 2, 9]]


def test_clusterkv_further_prompt_clusters_everything_anew():
    method = figure_8(4, {1: [7, 9, 5]}, interval=5)
    assert step(method, 7, [X], [-X]) == [[0, 2, 3, 4, 7]]
    read(method, [[X, -2 * X]], start=8)
    # from -X, -2X and Y: first Z and -X are together, cluster 1 is empty; its centroid stays, and
    # is nearer to -X than their mean, (-3/4, 0, 1)
    assert [c.members for c in method.indices[0].clusters] == [[1, 6], [7, 9], [2, 3, 4, 5, 8]]
    assert step(method, 10, [-X], [Y]) == [[0, 7, 9, 1, 10]]


def test_clusterkv_empty_clusters_are_never_selected():
    method = ClusterKV(3, lambda *_: [3, 2, 1], sinks=1, clusters=3, **MEAN)
    read(method, [[X, 2 * Y, 2 * Y, 2 * Y]])
    assert [cluster.members for cluster in method.indices[0].clusters] == [[1, 2, 3], [], []]
    assert step(method, 4, [Y], [Z]) == [[0, 1, 2, 4]]


@pytest.mark.parametrize(("reduce", "expected"), [("max", [0, 2, 7]), ("mean", [0, 3, 7])])
def test_clusterkv_largest_or_mean_of_a_group(reduce, expected):
    """Scores of the clusters along X and Y: 8 and 4 of one query, -4 and 4 of the other."""
    method = ClusterKV(2, lambda *_: [2, 3, 6], sinks=1, clusters=3, group_reduce=reduce, **MEAN)
    read(method, [FIGURE_8_KEYS])
    assert step(method, 7, [[4, 3, 0], [-2, 3, 0]], [X]) == [expected]


def test_clusterkv_group_or_each_query_head():
    q = [[0, 0, 4], [3, 0, 0], [0, 2, 0], [0, 4, 0]]  # group 0's sums: 6, 0, 8
    keys = [FIGURE_8_KEYS, FIGURE_8_KEYS]

    def draw(head, positions, count):
        return [[2, 3, 6], [6, 2, 3]][head]

    for per_query_head, expected in (
        (False, [[0, 1, 6, 7], [0, 3, 4, 7]]),
        (True, [[0, 1, 6, 7], [0, 2, 3, 7], [0, 3, 4, 7], [0, 3, 4, 7]]),
    ):
        method = ClusterKV(3, draw, sinks=1, clusters=3, per_query_head=per_query_head, **MEAN)
        read(method, keys)
        assert step(method, 7, q, [X, X]) == expected


@pytest.mark.parametrize(
    ("length", "share", "sinks", "listed"),
    [
        (10, 0.5, 2, 5),
        (11, 0.5, 2, 5),
        (10, 0.1, 2, 3),  # the smallest: a token beside the sinks
        (10, 1.0, 2, 10),
        (3, 0.1, 2, 3),
        (2, 0.1, 2, 2),
        (1, 0.1, 2, 1),
    ],
)
def test_clusterkv_float_budget_is_of_the_prompt(length, share, sinks, listed):
    method = ClusterKV(share, spread, sinks=sinks, clusters=2, interval=3, **MEAN)
    _, k, _ = random_tokens(length + 7, kv_heads=1)
    read(method, k[:, :length])
    for i in range(7):
        (selected,) = step(method, length + i, k[:, length + i], k[:, length + i])
        # what is clustered every 3 steps comes out of the same budget
        unclustered = [length + j for j in range(i - i % 3, i + 1)]
        assert len(selected) == listed + len(unclustered)
        assert selected[listed:] == unclustered
        assert len(set(selected)) == len(selected)


def test_clusterkv_short_rows_have_no_clusters():
    method = ClusterKV(5, spread, sinks=4, interval=2, new_clusters=1, **MEAN)
    read(method, [[X, Y, Z]])
    assert method.indices[0].clusters == []
    assert [step(method, p, [X], [p * X])[0] for p in (3, 4, 5, 6, 7)] == [
        [0, 1, 2, 3],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5, 6],
        [0, 1, 2, 5, 6, 7],  # two slots beside the three sinks: the better cluster
    ]


def test_clusterkv_lists_are_whole_clusters_but_one():
    q, k, v = random_tokens(120)
    method = ClusterKV(40, spread, tokens_per_cluster=10, sinks=5, interval=16, new_clusters=3)
    method.prompt(q[:, :60], k[:, :60], v[:, :60], np.arange(60))
    assert [len(index.clusters) for index in method.indices] == [6, 6]
    for t in range(60, 120):
        before = [[set(c.members) for c in index.clusters] for index in method.indices]
        mu = [[c.centroid for c in index.clusters] for index in method.indices]
        pending = (t - 60) % 16 + 1
        _, selected = method.decode(q[:, t], k[:, t], v[:, t], t)
        for head, chosen in enumerate(selected):
            assert len(chosen) == 40 + pending
            assert chosen[:5] == [0, 1, 2, 3, 4]
            taken = set(chosen[5:40])
            partly = [c for c in before[head] if c & taken and not c <= taken]
            assert len(partly) <= 1
            best = (np.array(mu[head]) @ q[2 * head : 2 * head + 2, t].T).max(axis=1)
            scores = [best[[p in c for c in before[head]]].item() for p in chosen[5:40]]
            assert sorted(scores, reverse=True) == scores
    assert [len(index.clusters) for index in method.indices] == [6 + 9, 6 + 9]


# --- Quest ----------------------------------------------------------------------------------------


def test_pages_by_hand():
    keys = np.array([[1, 5], [-2, 3], [0, 0], [4, -1], [7, 7]], float)
    lowest, highest = page_bounds(keys, 2)
    np.testing.assert_array_equal(lowest, [[-2, 3], [0, -1], [7, 7]])
    np.testing.assert_array_equal(highest, [[1, 5], [4, 0], [7, 7]])
    # 1 and -2 times: max(-2, 1) + max(-6, -10), max(0, 4) + max(2, 0), 7 - 14
    np.testing.assert_array_equal(page_scores(np.array([1, -2]), lowest, highest), [-5, 6, -7])


def test_a_pages_score_is_a_bound():
    q, k, _ = random_tokens(50, query_heads=1, kv_heads=1)
    scores = page_scores(q[0, 0], *page_bounds(k[0], 8))
    assert len(scores) == 7
    for s, key in enumerate(k[0]):
        assert scores[s // 8] >= q[0, 0] @ key


@pytest.mark.parametrize(
    ("budget", "length", "pages"),
    [
        (48, 10, 3),
        (1024, 10, 64),
        (0.5, 1000, 31),  # 500 / 16
        (0.1, 1000, 6),
        (0.1, 100, 3),
        (1.0, 100, 6),
        (0.5, 20, 3),
        (0.5, 0, 3),
    ],
)
def test_page_budget(budget, length, pages):
    assert page_budget(budget, length) == pages


def quest_keys(levels) -> np.ndarray:
    """Pages of two tokens, the first of them with this key in one of two channels."""
    return np.array([key for level in levels for key in (level, [-50, -50])], float)[None]


def test_quest_always_takes_the_first_page():
    """By the bounds the pages of 4 and of 6 come before it."""
    keys = quest_keys([[1, 0], [2, 0], [8, 0], [9, 0], [1, 0]])[:, :9]
    for first_page, expected in ((True, [0, 1, 6, 7, 8, 9]), (False, [4, 5, 6, 7, 8, 9])):
        method = Quest(6, page=2, first_page=first_page, **MEAN)
        read(method, keys)
        assert step(method, 9, [[1, 0]], [[-50, -50]]) == [expected]


def test_quest_by_hand():
    method = Quest(6, page=2, first_page=False, **MEAN)
    read(method, quest_keys([[1, 0], [3, 0], [0, 9], [3, 0], [2, 0]])[:, :9])
    # the last page has position 8 and takes the new 9: it is always there
    assert step(method, 9, [[1, 0]], [[-70, -70]]) == [[2, 3, 6, 7, 8, 9]]
    # the new 10 is a page of its own; of two equal pages the lower one
    assert step(method, 10, [[0, 1]], [[0, 0]]) == [[0, 1, 4, 5, 10]]
    assert step(method, 11, [[0, 1]], [[0, 8]]) == [[0, 1, 4, 5, 10, 11]]
    # the page of 10 and 11 is an old one now; what came later is in its bounds
    assert step(method, 12, [[0, 1]], [[0, 0]]) == [[4, 5, 10, 11, 12]]
    # a negative channel is bounded by the smallest key: 70 of page 4, 50 of the others
    assert step(method, 13, [[-1, 0]], [[0, 0]]) == [[0, 1, 8, 9, 12, 13]]


def test_quest_group_maximum_or_each_query_head():
    levels = [[9, 0], [7, 7], [0, 5], [0, 9.5], [1, 1]]
    q = [[1, 0], [0, 1], [0, 0.1], [2, 0]]
    # maxima of group 0: 9, 7, 5, 9.5; of group 1: 18, 14, 0.5, 0.95
    for per_query_head, expected in (
        (False, [[0, 1, 6, 7, 8, 9], [0, 1, 2, 3, 8, 9]]),
        (
            True,
            [[0, 1, 2, 3, 8, 9], [2, 3, 6, 7, 8, 9], [2, 3, 6, 7, 8, 9], [0, 1, 2, 3, 8, 9]],
        ),
    ):
        method = Quest(6, 2, per_query_head, first_page=False, **MEAN)
        read(method, np.repeat(quest_keys(levels)[:, :9], 2, axis=0))
        assert step(method, 9, q, [[-50, -50]] * 2) == expected


@pytest.mark.parametrize("length", [1, 2, 5, 6, 7, 14])
def test_quest_float_budget_and_short_rows(length):
    method = Quest(0.6, page=2, **MEAN)
    q, k, _ = random_tokens(length + 9, 2, 1)
    read(method, k[:, :length])
    pages = {14: 4}.get(length, 3)  # floor(8.4) / 2
    for t in range(length, length + 9):
        (selected,) = step(method, t, q[:, t], k[:, t])
        assert selected == sorted(selected)
        assert selected[-1] == t
        there = math.ceil((t + 1) / 2)
        assert len({p // 2 for p in selected}) == min(pages, there)
        assert len(selected) == 2 * min(pages, there) - (t + 1) % 2


# --- InfiniGen ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [3, 40])
def test_skew_is_orthogonal_and_finds_the_strongest_direction(rows):
    q, _, _ = random_tokens(rows, 1, 1, dim=8)
    direction = np.ones(8) / 8**0.5
    q = q[0] + 20 * direction
    a = skew(q)
    np.testing.assert_allclose(a.T @ a, np.eye(8), atol=1e-12)
    assert abs(a[:, 0] @ direction) > 0.99
    strengths = np.linalg.norm(q @ a, axis=0)
    assert np.all(np.diff(strengths) <= 1e-9)


def test_partial_channels_by_hand():
    q = np.array([[1, -9, 0, 4, 0], [1, 9, 0, -4, 0]], float)  # sums of magnitudes 2, 18, 0, 8, 0
    k = np.array([[-3, 0, 3, 0, 1]], float)
    assert partial_channels(q, k, np.eye(5), 0.2) == [0, 1]
    assert partial_channels(q, k, np.eye(5), 0.39) == [0, 1]  # int(1.95)
    assert partial_channels(q, k, np.eye(5), 0.4) == [0, 1, 2, 3]
    assert partial_channels(q, k, np.eye(5), 0.1) == [0, 1]  # at least one each
    assert partial_channels(q, -q, np.eye(5), 0.4) == [1, 3]
    assert partial_channels(q, k, np.eye(5)[:, ::-1], 0.2) == [2, 3]  # equal: the lower channel
    assert partial_channels(q, k, np.eye(5), 1.0) == [0, 1, 2, 3, 4]


def test_partial_projections_by_hand():
    e = np.eye(5)
    # head 0: both queries of the group along channel 1, keys along 3; head 1: all along channel 4
    q = np.stack([[9 * e[1]], [-9 * e[1]], [e[4]], [e[4]]])
    k = np.stack([[5 * e[3]], [2 * e[4]]])
    p = partial_projections([q, q], [k, k])
    assert p.shape == (2, 2, 5, 2)
    for layer in p:
        np.testing.assert_allclose(np.abs(layer[0]), e[:, [1, 3]], atol=1e-12)
        np.testing.assert_allclose(np.abs(layer[1]), e[:, [4]] * [1, 0], atol=1e-12)


def test_projections_of_all_channels_score_as_attention_does():
    q, k, _ = random_tokens(30)
    (p,) = partial_projections([q], [k], share=1.0)
    method = InfiniGen(p, 4, None)
    read(method, k[:, :29])
    selected = step(method, 29, q[:, 29], k[:, 29])
    for head, chosen in enumerate(selected):
        scores = k[head, :29] @ q[2 * head : 2 * head + 2, 29].sum(axis=0)
        assert chosen == [*sorted(np.argsort(-scores)[:4]), 29]


@pytest.mark.parametrize("per_query_head", [False, True])
def test_signs_of_the_columns_change_nothing(per_query_head):
    q, k, _ = random_tokens(60, dim=10)
    (p,) = partial_projections([q], [k])
    assert p.shape[-1] in (2, 3, 4)
    signs = np.array([[1, -1, -1, 1], [-1, 1, -1, -1]])[:, None, : p.shape[-1]]
    lists = []
    for projections in (p, p * signs):
        method = InfiniGen(projections, 0.5, 1.0, per_query_head)
        read(method, k[:, :40])
        lists.append([step(method, t, q[:, t], k[:, t]) for t in range(40, 60)])
    assert lists[0] == lists[1]


ROWS = [np.array([5, 4, 3, 0, 0, 0, 0, 0, 0, 0.0]), np.array([1, 1, 1, 1, 1, 0, 0, -9, -9, -9.0])]


@pytest.mark.parametrize(
    ("alpha", "budget", "count"),
    [
        (0.5, 0.9, 3),  # 1 and 5
        (0.0, 0.9, 3),
        (1.0, 0.9, 4),  # 2 and 7: int(4.5)
        (1.0, 4, 4),
        (1.0, 3, 3),
        (1.0, 0.3, 3),
        (1.0, 0.39, 3),
        (1.0, 0.05, 1),
        (9.9, 1.0, 8),  # 10 and 7: int(8.5)
        (None, 0.2, 2),
        (None, 7, 7),
        (None, 99, 99),
    ],
)
def test_token_count_by_hand(alpha, budget, count):
    assert token_count(ROWS, budget, alpha) == count


def test_token_count_of_unequal_heads_and_of_none():
    assert token_count([ROWS[0], np.array([1.0, 1, 1])], 0.5, 0.0) == 2  # 1 and 3; 0.5 of 10
    assert token_count([ROWS[0], np.array([1.0, 1, 1])], 0.5, None) == 5
    assert token_count([np.array([2.0, 0]), np.array([])], 1.0, 0.0) == 1  # int(0.5), at least 1
    assert token_count([np.array([])] * 2, 0.2, 5.0) == 1


FIRST = np.broadcast_to(np.eye(4)[:, :1], (2, 4, 1))
"""Projections of two heads: the first of four channels alone."""


def first_channel(scores, rest=100.0) -> np.ndarray:
    """Keys [H, T, 4] whose score, of the query (2, ...), is this; other channels mustn't count."""
    scores = np.array(scores, float)
    return np.concatenate([scores[..., None], np.full((*scores.shape, 3), rest)], axis=-1)


def test_infinigen_by_hand():
    scores = [[0, 5, 4, 3, 0, 5, 0, 0, 0, 0], [1, 0, 1, 1, 1, 1, -9, -9, 0, -9]]
    q = np.repeat([[2.0, 0, 0, 7]], 4, axis=0)  # over sqrt(4): the score is the first channel
    for alpha, budget, expected in (
        (0.0, 0.9, [[1, 2, 5], [0, 2, 3]]),  # 2 and 5
        (1.0, 0.9, [[0, 1, 2, 3, 5], [0, 2, 3, 4, 5]]),  # 3 and 7
        (1.0, 0.2, [[1, 5], [0, 2]]),
        (None, 1, [[1], [0]]),
        (None, 99, [range(10), range(10)]),
    ):
        method = InfiniGen(FIRST, budget, alpha, **MEAN)
        read(method, first_channel(scores))
        selected = step(method, 10, q, first_channel([[9], [9]])[:, 0])
        assert selected == [[*chosen, 10] for chosen in expected]


def test_infinigen_predicts_by_another_query_and_attends_by_its_own():
    scores = [[1, 2, 3, 4], [1, 2, 3, 4]]
    keys = first_channel(scores, rest=0.5)
    own, other = np.full((2, 4), 1.0), np.full((2, 4), -1.0)
    plain, predicted = (InfiniGen(FIRST, 1, None) for _ in range(2))
    for method in (plain, predicted):
        read(method, keys)
    new = first_channel([[0.3], [0.3]])[:, 0]
    assert step(plain, 4, own, new) == [[3, 4], [3, 4]]
    v = values([4], 2, 4)[:, 0]
    out, selected = predicted.decode(own, new, v, 4, predicting_query=other)
    assert selected == [[0, 4], [0, 4]]
    p = np.exp([keys[0, 0].sum() / 2, new[0].sum() / 2])
    np.testing.assert_allclose(out, np.full((2, 4), 4 * p[1] / p.sum()))
    # the next step without one: its own query again, and the generated token is an earlier one
    assert step(predicted, 5, other, new) == [[4, 5], [4, 5]]


def test_infinigen_group_mean_or_each_query_head():
    keys = np.zeros((1, 6, 4))
    keys[0, :, 0], keys[0, :, 1] = [8, 0, 0, 0, 5, 0], [0, 9, 0, 0, 6, 7]
    p = np.eye(4)[None, :, :2]
    q = [[2, 0, 0, 0], [0, 2, 0, 0]]
    # means 4, 4.5, 0, 0, 5.5, 3.5; heads 8, 0, 0, 0, 5, 0 and 0, 9, 0, 0, 6, 7
    for per_query_head, alpha, expected in (
        (False, 1.0, [[1, 4, 6]]),
        (False, 1.5, [[0, 1, 4, 6]]),
        (True, 1.0, [[0, 6], [1, 6]]),
        (True, 2.0, [[0, 6], [1, 6]]),  # 1 and 2: int(1.5)
        (True, 3.0, [[0, 4, 6], [1, 5, 6]]),  # 2 and 3
    ):
        method = InfiniGen(p, 1.0, alpha, per_query_head, **MEAN)
        read(method, keys)
        assert step(method, 6, q, [[0, 0, 0, 0]]) == expected


def test_infinigen_share_grows_with_the_row():
    method = InfiniGen(FIRST[:1], 0.25, None, **MEAN)
    read(method, first_channel([[1]]))
    counts = [
        len(step(method, t, np.ones((1, 4)), first_channel([[t]])[:, 0])[0]) - 1
        for t in range(1, 17)
    ]
    assert counts == [1] * 7 + [2] * 4 + [3] * 4 + [4]


# --- all of them ----------------------------------------------------------------------------------


def build(name, budget, dim=6, kv_heads=2, per_query_head=False, **options):
    """A method with small settings."""
    if name == "clusterkv":
        return ClusterKV(budget, spread, 5, 4, 7, 3, per_query_head=per_query_head, **options)
    if name == "quest":
        return Quest(budget, 4, per_query_head, **options)
    p = np.broadcast_to(np.eye(dim)[:, :2], (kv_heads, dim, 2))
    return InfiniGen(p, budget, None, per_query_head, **options)


@pytest.mark.parametrize("options", [{}, {"scale": 0.3, "window": 20, "soft_cap": 2.0}])
@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("name", ["clusterkv", "quest", "infinigen"])
def test_a_budget_for_everything_is_full_attention(name, per_query_head, options):
    q, k, v = random_tokens(60)
    positions = np.concatenate([[-1, -1], np.arange(30), [-1], np.arange(30, 40)])
    columns = np.maximum(positions, 0)  # padding carries some token's numbers
    method = build(name, 1000, per_query_head=per_query_head, **options)
    full = np.concatenate(
        [
            softmax_attention(group, k[h], v[h], np.arange(60), np.arange(60), **options)[0]
            for h, group in enumerate(q.reshape(2, 2, 60, 6))
        ]
    )
    outs = []
    for part, last in ((slice(0, 20), False), (slice(20, None), True)):
        tokens = columns[part]
        outs.append(method.prompt(q[:, tokens], k[:, tokens], v[:, tokens], positions[part], last))
    out = np.concatenate(outs, axis=1)
    np.testing.assert_array_equal(out[:, positions < 0], 0)
    np.testing.assert_allclose(out[:, positions >= 0], full[:, :40], atol=1e-12)
    for t in range(40, 60):
        out, selected = method.decode(q[:, t], k[:, t], v[:, t], t)
        assert len(selected) == (4 if per_query_head else 2)
        first = max(t + 1 - options.get("window", 60), 0)
        for chosen in selected:
            assert set(range(first, t + 1)) <= set(chosen) <= set(range(t + 1))
            assert len(chosen) == t + 1 or first > 0
        np.testing.assert_allclose(out, full[:, t], atol=1e-12)


@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize(("name", "budget"), [("clusterkv", 9), ("quest", 12), ("infinigen", 7)])
def test_attention_is_over_the_selection_alone(name, budget, per_query_head):
    q, k, v = random_tokens(50)
    method = build(name, budget, per_query_head=per_query_head)
    method.prompt(q[:, :40], k[:, :40], v[:, :40], np.arange(40))
    for t in range(40, 50):
        out, selected = method.decode(q[:, t], k[:, t], v[:, t], t)
        for i in range(4):
            chosen = selected[i if per_query_head else i // 2]
            assert len(chosen) < 20
            weights = np.exp(k[i // 2, chosen] @ q[i, t] / 6**0.5)
            expected = weights @ v[i // 2, chosen] / weights.sum()
            np.testing.assert_allclose(out[i], expected, atol=1e-12)


def test_mass_of_selected_tokens_counts():
    method = build("clusterkv", 5, **MEAN)
    read(method, [[X, Y, Z]])
    method.heads[0].tokens[2].log_mass = math.log(4)
    out, selected = method.decode(X[None], X[None], values([3], dim=3)[:, 0], 3)
    assert selected == [[0, 1, 2, 3]]
    np.testing.assert_allclose(out, np.full((1, 3), (0 + 1 + 4 * 2 + 3) / 7))
