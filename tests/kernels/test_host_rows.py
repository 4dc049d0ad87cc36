"""Rows out of host memory: the ones that are missing, all of them, and nothing else."""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.storage.offload.payload import HOST_MEMORY, memory_kinds, to_host
from pallas_kernels import host_rows
from tests.support.implementations import KERNELS, each_way
from tests.support.tolerances import close

pytestmark = pytest.mark.skipif(HOST_MEMORY not in memory_kinds(), reason="no host memory")

module = importlib.import_module("pallas_kernels.recall.host_rows")
ROWS, HEADS, SLOTS = 2, 2, 100


@pytest.fixture
def small_tiles(monkeypatch):
    """One entry at a time, so that few of them need several programs."""
    monkeypatch.setattr(module, "TILE", 1)


def check(
    index, missing, implementation="xla", *, stores=2, slots=SLOTS, dim=4, dtype=np.float32,
    into=np.float32,
):  # fmt: skip
    """Against one row at a time in NumPy, with NaN in every row that nobody asked for."""
    index, missing = np.asarray(index, np.int32), np.asarray(missing, bool)
    rows, lists, length = index.shape
    rng = np.random.default_rng(0)
    wanted = np.zeros((rows, HEADS, slots), bool)
    fetched = list(zip(*np.nonzero(missing & (index >= 0) & (index < slots)), strict=True))
    for at in fetched:
        wanted[at[0], at[1] // (lists // HEADS), index[at]] = True
    given, there, expected = [], [], []
    for _ in range(stores):
        store = rng.normal(size=(rows, HEADS, slots, dim)).astype(dtype)
        before = rng.normal(size=(rows, lists, length, dim)).astype(into)
        after = before.copy()
        for at in fetched:
            after[at] = store[at[0], at[1] // (lists // HEADS), index[at]]
        given.append(to_host(jnp.asarray(np.where(wanted[..., None], store, np.nan))))
        there.append(jnp.asarray(before))
        expected.append(after)
    # A new function every time: what is compiled for other tiles must not be used again.
    fetch = jax.jit(functools.partial(host_rows, implementation=implementation))
    found = fetch(tuple(given), tuple(there), jnp.asarray(index), jnp.asarray(missing))
    assert len(found) == stores
    for mine, other in zip(found, expected, strict=True):
        assert mine.dtype == into and mine.sharding.memory_kind != HOST_MEMORY
        close(mine, other, "exact")


def runs(lengths) -> np.ndarray:
    """Slots in runs of these lengths, with a gap between them."""
    start, out = 0, []
    for length in lengths:
        out += range(start, start + length)
        start = start + length + 3
    return np.array(out)


@pytest.mark.parametrize(
    "lengths",
    [*((n,) for n in (1, 15, 16, 17, 31, 32, 33, 100)), (1, 16, 1), (5, 20, 3, 7), (16, 16, 32)],
)
def test_runs(lengths):
    """Pieces of 16, and the rest of a run, up to the last slot of the store."""
    index = runs(lengths)
    index = np.broadcast_to(index, (ROWS, HEADS, index.size)).copy()
    index[1, 1] += SLOTS - 1 - index[1, 1, -1]
    index[0, 1] = index[0, 1, ::-1]  # nothing follows anything
    check(index, index >= 0)


@pytest.mark.parametrize("lists", [HEADS, 3 * HEADS])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.95, 1.0])
def test_any_entries(lists, share):
    """Runs broken by entries that are there already or are none."""
    rng = np.random.default_rng(int(10 * share) + lists)
    index = np.sort(rng.permuted(np.tile(np.arange(SLOTS), (ROWS, lists, 1)), axis=-1)[..., :80])
    missing = rng.random(index.shape) < share
    index = np.where(missing | (rng.random(index.shape) < 0.5), index, -1)
    check(index, missing)


@pytest.mark.parametrize(
    ("index", "options"),
    [
        (np.arange(1), {}),
        (np.arange(16), {"slots": 16}),
        (np.arange(1), {"slots": 16}),
        (np.tile(np.arange(10), 4), {"slots": 10}),  # a long list over a short store
        ([5] * 10 + [*range(5, 25)] * 2, {}),  # a slot several times
        (runs((20, 2, 17)), {"stores": 1, "dtype": jnp.bfloat16, "into": jnp.bfloat16}),
        (runs((20, 2, 17)), {"stores": 3, "dtype": jnp.bfloat16}),
    ],
)
def test_lists_and_stores_of_other_kinds(index, options):
    index = np.broadcast_to(index, (ROWS, HEADS, len(index)))
    check(index, index % 7 < 6, **options)


KINDS = {
    # name: lists, entries of each, and options of `check`
    "plain": (4, 45, {"slots": 50, "dim": 80}),
    "one store": (2, 45, {"slots": 50, "stores": 1, "dim": 64}),
    "bfloat16": (
        6, 45, {"slots": 50, "dim": 96, "dtype": jnp.bfloat16, "into": jnp.bfloat16}
    ),
    "bfloat16 into float32": (4, 45, {"slots": 50, "dim": 128, "dtype": jnp.bfloat16}),
    "one slot": (4, 1, {"slots": 1, "stores": 3, "dim": 5}),
}  # fmt: skip


def drawn(share, lists, entries, slots):
    """Entries of lists that are missing, there already, or none."""
    rng = np.random.default_rng(lists)
    index = rng.integers(0, slots, (2, lists, entries))
    missing = rng.random(index.shape) < share
    return np.where(missing | (rng.random(index.shape) < 0.5), index, -1), missing


@pytest.mark.parametrize(
    ("lists", "entries", "options", "implementation"),
    each_way(KINDS, fast=["one slot", "one store"], xla=False),
)
def test_by_the_kernel(lists, entries, options, implementation, small_tiles):
    for share in (0.0, 0.1, 1.0):
        check(*drawn(share, lists, entries, options["slots"]), implementation, **options)


@pytest.mark.parametrize("implementation", KERNELS)
def test_slots_that_the_store_does_not_have_are_not_fetched(implementation):
    """Memory that is not the store's must not be read, on a GPU least of all. Tiles as they are."""
    index, missing = drawn(1.0, 4, 70, 50)
    index[0, 0, :3] = [-1, 50, 2**31 - 1]
    check(index, missing, implementation, slots=50, dim=80)


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
