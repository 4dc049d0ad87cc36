"""The kernels that select and fetch: interpreted, lowered for CUDA, and run on a GPU."""

from __future__ import annotations

import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.storage.offload import HOST_MEMORY, memory_kinds, to_host
from pallas_kernels import build_indices, host_rows, page_scores, rank_clusters
from tests.references import cluster_selection as clusters_reference
from tests.references import quest as quest_reference
from tests.support.lowering import KERNEL, lower_for_cuda
from tests.support.tolerances import close

KERNELS = ["interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
HEADS = (2, 2)
# Query heads per KV head, head_dim: padded and not.
SHAPES = [(1, 64), (2, 80), (3, 96), (4, 128), (7, 96), (16, 128), (5, 3)]
STATIC = ("per_query_head", "length", "implementation")
needs_host = pytest.mark.skipif(HOST_MEMORY not in memory_kinds(), reason="no host memory")
selection_module = importlib.import_module("pallas_kernels.recall.cluster_selection")
pages_module = importlib.import_module("pallas_kernels.recall.page_scores")
rows_module = importlib.import_module("pallas_kernels.recall.host_rows")


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles so small that few clusters, pages, places and entries need several."""
    sizes = {"RANKED": 4, "COUNTED": 8, "PLACES": 8, "LOOKED_AT": 4, "SCORED": 8 * 128}
    for name, size in sizes.items():
        monkeypatch.setattr(selection_module, name, size)
    monkeypatch.setattr(pages_module, "TILE_BYTES", 1)
    monkeypatch.setattr(rows_module, "TILE", 1)


def jitted(operation, **options):
    """A new function every time: what is compiled for other tiles must not be used again."""

    def call(*args):
        return operation(*args, **options)

    return jax.jit(call)


def run(operation, *args, **options):
    return jitted(operation, **options)(*args)


def slow_unless(fast, cases) -> list:
    """Each case takes a kernel of its own: the others run with the slow tests."""
    return [pytest.param(*case, marks=[pytest.mark.slow] * (not fast(*case))) for case in cases]


# Clusters: their ranks


CHOICES = {
    "max": {"group_reduce": "max"}, "mean": {"group_reduce": "mean"},
    "each": {"per_query_head": True},
}  # fmt: skip


def expected_order(q, centroids, sizes, per_query_head=False, group_reduce="max"):
    lists = []
    for row, head in np.ndindex(sizes.shape[:2]):
        group = np.asarray(q, np.float64)[row, head]
        for own in group[:, None] if per_query_head else [group]:
            args = np.asarray(centroids, np.float64)[row, head], sizes[row, head].tolist()
            lists.append(clusters_reference.rank_clusters(own, *args, group_reduce))
    return np.reshape(lists, (len(sizes), -1, sizes.shape[2]))


def check_order(q, centroids, sizes, choice, implementation):
    options = CHOICES[choice]
    order = run(rank_clusters, q, centroids, sizes, implementation=implementation, **options)
    assert order.dtype == jnp.int32
    expected = expected_order(q, centroids, sizes, **options)
    np.testing.assert_array_equal(order, expected)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize(
    ("group", "dim", "choice"), [(*shape, each) for shape in SHAPES for each in CHOICES]
)
@pytest.mark.fast_cases("1-64-each-interpret", "2-80-max-interpret", "2-80-mean-interpret")
def test_ranks(group, dim, choice, implementation, small_tiles):
    """Several tiles of centroids; NaN where a cluster is empty."""
    rng = np.random.default_rng(group + dim)
    dtype = "bfloat16" if dim == 80 else "float32"
    q = rng.normal(size=(*HEADS, group, dim)).astype(jnp.dtype(dtype))
    sizes = rng.integers(0, 4, (*HEADS, 37)).astype(np.int32)
    centroids = rng.normal(size=(*HEADS, 37, dim)).astype(np.float32)
    centroids[sizes == 0] = np.nan
    check_order(q, centroids, sizes, choice, implementation)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize(
    "clusters",
    [1, 2, 7, 8, 9, 16, 33],
)
@pytest.mark.fast_cases("33-interpret")
def test_ties_go_to_the_lower_and_empty_clusters_come_last(clusters, implementation, small_tiles):
    """Small whole numbers, zero of either sign among them: most scores are equal."""
    rng = np.random.default_rng(clusters)
    q = rng.integers(-1, 2, (3, 2, 4, 3)).astype(np.float32)
    q[2] = -0.0
    centroids = rng.integers(-1, 2, (3, 2, clusters, 3)).astype(np.float32)
    sizes = rng.integers(0, 3, (3, 2, clusters)).astype(np.int32)
    sizes[1, 0] = 0
    for choice in CHOICES:
        check_order(q, centroids, sizes, choice, implementation)


@pytest.mark.parametrize("implementation", KERNELS)
def test_ranks_with_the_tiles_as_they_are(implementation):
    """More clusters than are compared at a time, many of them equal."""
    rng = np.random.default_rng(5)
    q = rng.integers(-3, 4, (1, 1, 2, 8)).astype(np.float32)
    centroids = rng.integers(-3, 4, (1, 1, 1100, 8)).astype(np.float32)
    sizes = rng.integers(0, 5, (1, 1, 1100)).astype(np.int32)
    check_order(q, centroids, sizes, "max", implementation)


@pytest.mark.parametrize("implementation", KERNELS)
def test_every_cluster_has_a_rank_whatever_the_scores(implementation, small_tiles):
    """A place of the order that nobody writes would name a cluster that does not exist."""
    ranks = jitted(rank_clusters, implementation=implementation)
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        rng = np.random.default_rng(1)
        q = rng.normal(size=(2, 1, 2, 8)).astype(np.float32)
        q[1] = bad
        centroids = rng.normal(size=(2, 1, 21, 8)).astype(np.float32)
        centroids[0, 0, 4:9] = bad
        sizes = rng.integers(0, 3, (2, 1, 21)).astype(np.int32)
        order = np.asarray(ranks(q, centroids, sizes))
        expected = np.broadcast_to(np.arange(21), order.shape)
        np.testing.assert_array_equal(np.sort(order, axis=-1), expected, str(bad))
        empty = np.take_along_axis(sizes, order, axis=-1) == 0
        if np.isnan(bad):
            assert (np.diff(empty.astype(int), axis=-1) >= 0).all(), "what is empty comes last"


# Clusters: the lists of their slots


def check_list(order, sizes, starts, count, length, implementation, lists_of=None):
    lists_of = lists_of or jitted(build_indices, length=length, implementation=implementation)
    index = lists_of(order, sizes, starts, count)
    assert index.dtype == jnp.int32 and index.shape == (*order.shape[:2], length)
    counts = np.broadcast_to(count, order.shape[:2])
    for row, choice in np.ndindex(order.shape[:2]):
        head = choice * sizes.shape[1] // order.shape[1]
        own = (x.tolist() for x in (order[row, choice], sizes[row, head], starts[row, head]))
        expected = clusters_reference.build_indices(*own, int(counts[row, choice]), length)
        assert np.asarray(index)[row, choice].tolist() == expected


def starts_of(sizes, gaps=0):
    return (np.cumsum(sizes + gaps, axis=-1) - sizes).astype(np.int32)


def draw_clusters(heads, lists, clusters, most, seed=0):
    """Order, sizes and starts; a third of the clusters empty, and gaps between them."""
    rng = np.random.default_rng(seed)
    shape = (2, heads, clusters)
    sizes = rng.integers(1, most + 1, shape) * (rng.random(shape) < 0.67)
    order = rng.permuted(np.tile(np.arange(clusters), (2, lists, 1)), axis=-1)
    return order.astype(np.int32), sizes.astype(np.int32), starts_of(sizes, rng.integers(3))


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize(
    ("lists", "clusters", "most", "length"),
    slow_unless(
        lambda lists, clusters, most, length: lists == 6 or length in (1, 61),
        [
            (*shape, length)
            for shape in ((2, 1, 30), (2, 23, 1), (6, 13, 30))
            for length in (1, 7, 8, 61, 200)
        ],
    ),
)
def test_lists(lists, clusters, most, length, implementation, small_tiles):
    """One slot per cluster, and more of them than a program fills places."""
    order, sizes, starts = draw_clusters(2, lists, clusters, most)
    lists_of = jitted(build_indices, length=length, implementation=implementation)
    counts = np.repeat([[0], [length]], lists, axis=1), np.arange(2 * lists).reshape(2, lists) * 29
    for count in counts:
        count = count.astype(np.int32)
        check_list(order, sizes, starts, count, length, implementation, lists_of)


@pytest.mark.parametrize("implementation", KERNELS)
def test_lists_with_the_tiles_as_they_are(implementation):
    order, sizes, starts = draw_clusters(1, 2, 150, 40)
    count = np.array([[700], [9999]], np.int32)
    for length in (128, 1000):
        check_list(order, sizes, starts, count, length, implementation)
    check_list(order, 0 * sizes, starts, count, 130, implementation)


@pytest.mark.parametrize("implementation", KERNELS)
def test_large_slot_numbers(implementation):
    """Starts near the largest int32, in falling order, up to the last slot that has a number."""
    starts = np.array([[[2**31 - 3, 10, 2**30]]], np.int32)
    order, sizes = np.array([[[0, 1, 2]]], np.int32), np.array([[[3, 2, 0]]], np.int32)
    count = np.array([[5]], np.int32)
    check_list(order, sizes, starts, count, 8, implementation)


@st.composite
def selections(draw):
    """One shape, so that one function is compiled; any sizes, orders, counts and gaps."""

    def integers(shape, most):
        size = int(np.prod(shape))
        values = draw(st.lists(st.integers(0, most), min_size=size, max_size=size))
        return np.array(values, np.int32).reshape(shape)

    sizes = integers((1, 2, 9), draw(st.sampled_from((1, 6, 20))))
    orders = draw(st.lists(st.permutations(range(9)), min_size=4, max_size=4))
    starts = starts_of(sizes, integers(sizes.shape, 2))
    return np.array([orders], np.int32), sizes, starts, integers((1, 4), 60)


@pytest.fixture(scope="module")
def lister():
    """The kernel with tiles of 8 places and 4 ranks, compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection_module, "PLACES", 8)
        patch.setattr(selection_module, "LOOKED_AT", 4)
        call = functools.partial(build_indices, length=45, implementation="interpret")
        numbers = jax.ShapeDtypeStruct((1, 2, 9), jnp.int32)
        orders, count = (jax.ShapeDtypeStruct((1, 4, *x), jnp.int32) for x in ((9,), ()))
        yield jax.jit(call).lower(orders, numbers, numbers, count).compile()


@settings(max_examples=150, deadline=None)
@given(selection=selections())
@pytest.mark.slow
def test_any_list(lister, selection):
    order, sizes, starts, count = selection
    index = np.asarray(lister(*selection))[0]
    for choice in range(4):
        own = (
            x.tolist() for x in (order[0, choice], sizes[0, choice // 2], starts[0, choice // 2])
        )
        expected = clusters_reference.build_indices(*own, int(count[0, choice]), 45)
        assert index[choice].tolist() == expected


# Pages


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize(
    ("group", "dim", "dtype"),
    [(*shape, dtype) for shape in SHAPES for dtype in ("float32", "bfloat16", "float16")],
)
@pytest.mark.fast_cases(
    "1-64-float32-interpret",
    "3-96-float32-interpret",
    "5-3-bfloat16-interpret",
    "5-3-float32-interpret",
)
def test_page_scores(group, dim, dtype, implementation, small_tiles):
    """Bounds of either sign, several tiles of pages; queries take the dtype of the bounds."""
    rng = np.random.default_rng(group + dim)
    pages = 1 if dim == 3 else 35
    q = rng.normal(size=(*HEADS, group, dim)).astype(np.float32)
    keys = rng.normal(size=(*HEADS, pages, 3, dim)) + rng.normal(size=(*HEADS, pages, 1, dim))
    low, high = (x.astype(jnp.dtype(dtype)) for x in (keys.min(3), keys.max(3)))
    score = run(page_scores, q, low, high, implementation=implementation)
    assert score.dtype == jnp.float32 and score.shape == (*HEADS, group, pages)
    score = np.asarray(score)
    q, low, high = (x.astype(np.float64) for x in (q.astype(low.dtype), low, high))
    for row, head, g in np.ndindex(*HEADS, group):
        bounds = low[row, head], high[row, head]
        expected = quest_reference.page_scores(q[row, head, g], *bounds)
        close(score[row, head, g], expected)


@pytest.mark.parametrize("implementation", KERNELS)
def test_page_scores_with_the_tiles_as_they_are(implementation):
    """Whole numbers, whose products are the same in whatever order they are added up."""
    rng = np.random.default_rng(0)
    q = rng.integers(-2, 3, (1, 1, 2, 64)).astype(np.float32)
    low = rng.integers(-5, 5, (1, 1, 300, 64)).astype(np.float32)
    high = low + rng.integers(0, 5, low.shape)
    scores = [run(page_scores, q, low, high, implementation=x) for x in (implementation, "xla")]
    np.testing.assert_array_equal(*scores)


# Rows in host memory


def fetch_case(share, lists=4, entries=45, stores=2, slots=50, dim=80, dtype="float32", into=None):
    """Arguments, with NaN in every row of the stores that nobody asked for, and what they give."""
    rng = np.random.default_rng(lists + entries)
    index = rng.integers(0, slots, (2, lists, entries))
    missing = rng.random(index.shape) < share
    index = np.where(missing | (rng.random(index.shape) < 0.5), index, -1)
    per_head, at = lists // 2, np.nonzero(missing)
    wanted = np.zeros((2, 2, slots), bool)
    wanted[at[0], at[1] // per_head, index[at]] = True
    data = np.asarray(rng.normal(size=(stores, 2, 2, slots, dim)), dtype)
    before = np.asarray(rng.normal(size=(stores, *index.shape, dim)), into or dtype)
    expected = before.copy()
    expected[:, *at] = data[:, at[0], at[1] // per_head, index[at]]
    given = tuple(to_host(jnp.asarray(np.where(wanted[..., None], x, np.nan))) for x in data)
    there = tuple(jnp.asarray(x) for x in before)
    index, missing = jnp.asarray(index, jnp.int32), jnp.asarray(missing)
    return (given, there, index, missing), expected


def check_fetched(case, fetch):
    args, expected = case
    found = fetch(*args)
    assert len(found) == len(expected)
    for mine, other, before in zip(found, expected, args[1], strict=True):
        assert mine.dtype == before.dtype
        assert mine.sharding.memory_kind != HOST_MEMORY
        close(mine, other, "exact")
    return found


@needs_host
@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"lists": 2, "stores": 1, "dim": 64},
        {"lists": 6, "dim": 96, "dtype": jnp.bfloat16},
        {"dim": 128, "dtype": jnp.bfloat16, "into": np.float32},
        {"entries": 1, "slots": 1, "stores": 3, "dim": 5},
    ],
    ids=str,
)
@pytest.mark.fast_cases(
    "{'entries': 1, 'slots': 1, 'stores': 3, 'dim': 5}-interpret",
    "{'lists': 2, 'stores': 1, 'dim': 64}-interpret",
)
def test_host_rows(kind, implementation, small_tiles):
    fetch = jitted(host_rows, implementation=implementation)
    for share in (0.0, 0.1, 1.0):
        check_fetched(fetch_case(share, **kind), fetch)


@needs_host
@pytest.mark.parametrize("implementation", KERNELS)
def test_host_rows_with_the_tiles_as_they_are(implementation):
    check_fetched(fetch_case(0.5, entries=70), jitted(host_rows, implementation=implementation))


@needs_host
@pytest.mark.parametrize("implementation", KERNELS)
def test_slots_that_the_store_does_not_have_are_not_fetched(implementation):
    """Memory that is not the store's must not be read, on a GPU least of all."""
    args, expected = fetch_case(1.0)
    index = np.array(args[2])
    index[0, 0, :3] = [-1, 50, 2**31 - 1]
    expected[:, 0, 0, :3] = np.asarray(args[1])[:, 0, 0, :3]
    fetch = jitted(host_rows, implementation=implementation)
    check_fetched(((*args[:2], index, args[3]), expected), fetch)


@needs_host
@pytest.mark.gpu
def test_a_large_store_is_read_where_it_is():
    """A store of 512 MiB, of which 4 MiB are wanted: there is no room made for a copy of it."""
    heads, slots, dim, entries = 8, 2**17, 128, 1024
    rng = np.random.default_rng(0)
    number = np.arange(heads * slots, dtype=np.float32).reshape(1, heads, slots, 1)
    data = np.broadcast_to(number, (1, heads, slots, dim))
    device = jax.devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=HOST_MEMORY)
    store = jax.device_put(np.ascontiguousarray(data), sharding)
    index = rng.integers(0, slots, (1, heads, entries)).astype(np.int32)
    missing = rng.random(index.shape) < 0.5
    rows = jnp.full((*index.shape, dim), -1.0)
    args = (store,), (rows,), jnp.asarray(index), jnp.asarray(missing)
    call = jax.jit(functools.partial(host_rows, implementation="pallas"), donate_argnums=1)
    compiled = call.lower(*args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < store.nbytes // 8
    before = device.memory_stats()["peak_bytes_in_use"]
    (found,) = jax.block_until_ready(compiled(*args))
    assert device.memory_stats()["peak_bytes_in_use"] - before < store.nbytes // 8
    expected = np.where(missing[..., None], np.take_along_axis(data, index[..., None], 2), -1.0)
    np.testing.assert_array_equal(found, expected)


# Lowering


def struct(shape, dtype, memory=None):
    if memory is None:
        return jax.ShapeDtypeStruct(shape, dtype)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=memory)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def lowered(operation, *args, **options) -> str:
    return lower_for_cuda(functools.partial(operation, **options, implementation="pallas"), *args)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("group", "dim"), SHAPES)
def test_ranking_lowers_for_cuda(group, dim, choice):
    q = struct((2, 8, group, dim), jnp.bfloat16)
    centroids, sizes = struct((2, 8, 1641, dim), jnp.float32), struct((2, 8, 1641), jnp.int32)
    text = lowered(rank_clusters, q, centroids, sizes, **CHOICES[choice])
    assert text.count(KERNEL) == 2, "scores, and ranks"
    assert not computed(text), "nothing but the kernels"


@pytest.mark.parametrize(("lists", "length"), [(8, 1024), (32, 999), (8, 1)])
def test_listing_lowers_for_cuda(lists, length):
    order, sizes = struct((2, lists, 1641), jnp.int32), struct((2, 8, 1641), jnp.int32)
    count = struct((2, 1), jnp.int32)
    text = lowered(build_indices, order, sizes, sizes, count, length=length)
    assert text.count(KERNEL) == 1 and not computed(text)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("group", "dim"), SHAPES)
def test_page_scores_lower_for_cuda(group, dim, dtype):
    q, bound = struct((2, 8, group, dim), jnp.float32), struct((2, 8, 2051, dim), dtype)
    text = lowered(page_scores, q, bound, bound)
    assert text.count(KERNEL) == 1 and not computed(text)


@needs_host
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("lists", "dim"), [(8, 64), (8, 80), (32, 128)])
def test_only_the_kernel_touches_the_store(lists, dim, dtype):
    store = struct((2, 8, 4099, dim), dtype, HOST_MEMORY)
    rows, index = struct((2, lists, 1000, dim), dtype), struct((2, lists, 1000), jnp.int32)
    missing = struct((2, lists, 1000), jnp.bool_)
    text = lowered(host_rows, (store, store), (rows, rows), index, missing)
    assert text.count(KERNEL) == 1
    assert text.count('mhlo.memory_kind = "pinned_host"') == 2, "the stores, and nothing else"
    taken = re.findall(rf".*tensor<2x8x4099x{dim}x.*", text)
    others = [line for line in taken if KERNEL not in line and "func.func" not in line]
    assert len(taken) > len(others) == 0, others
    for store, row in ((3, 0), (4, 1)):
        alias = rf"output_tuple_indices = \[{row}\],\s*operand_index = {store}"
        assert re.search(alias, text), "rows are filled in place"


def computed(text: str) -> list[str]:
    """Operations that are neither a kernel nor another view of the same numbers."""
    operations = re.findall(r"(?:stablehlo|chlo)\.(\w+)", text)
    return [x for x in operations if x not in ("custom_call", "reshape", "mesh", "constant")]


# What is refused


def zeros(*shape, dtype=jnp.float32):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: rank_clusters(
                zeros(1, 2, 1, 4), zeros(1, 2, 5, 4), zeros(1, 2, 5), group_reduce="sum"
            ),
            "'mean', 'max'.*got 'sum'",
        ),
        (
            lambda: rank_clusters(zeros(1, 2, 1, 4), zeros(1, 2, 5, 3), zeros(1, 2, 5)),
            r"centroids must have shape \(1, 2, 5, 4\), got \(1, 2, 5, 3\)",
        ),
        (
            lambda: rank_clusters(zeros(1, 2, 1, 4), zeros(1, 2, 5, 4), zeros(1, 1, 5)),
            r"sizes must have shape \(1, 2, 5\), got \(1, 1, 5\)",
        ),
        (lambda: rank_clusters(*[zeros(2, 4)] * 3), r"\[B, H, G, D\], got \(2, 4\)"),
        (
            lambda: build_indices(*[zeros(1, 2, 5)] * 2, zeros(1, 2, 6), zeros(1, 2), 4),
            r"starts must have shape \(1, 2, 5\), got \(1, 2, 6\)",
        ),
        (
            lambda: page_scores(zeros(1, 2, 1, 4), zeros(1, 2, 5, 4), zeros(1, 2, 6, 4)),
            r"high must have shape \(1, 2, 5, 4\), got \(1, 2, 6, 4\)",
        ),
        (
            lambda: page_scores(zeros(1, 2, 4), zeros(1, 2, 5, 4), zeros(1, 2, 5, 4)),
            r"got \(1, 2, 4\)",
        ),
        (
            lambda: host_rows((), (), zeros(1, 2, 3), zeros(1, 2, 3)),
            "at least 1, got 0 and 0",
        ),
        (
            lambda: host_rows(
                (zeros(1, 2, 5, 4),), (zeros(1, 3, 6, 4),), zeros(1, 3, 6), zeros(1, 3, 6)
            ),
            r"K a multiple of 2, got \(1, 3, 6\)",
        ),
        (
            lambda: host_rows(
                (zeros(1, 2, 5, 4),), (zeros(1, 2, 6, 3),), zeros(1, 2, 6), zeros(1, 2, 6)
            ),
            r"rows must have shape \(1, 2, 6, 4\), got \(1, 2, 6, 3\)",
        ),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
