"""Rows out of host memory: the ones that are missing, all of them, and nothing else."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.storage.offload import HOST_MEMORY, memory_kinds, to_host
from pallas_kernels import host_rows
from tests.support.tolerances import close

pytestmark = pytest.mark.skipif(HOST_MEMORY not in memory_kinds(), reason="no host memory")

fetch = jax.jit(host_rows, static_argnames="implementation")
ROWS, HEADS, SLOTS, DIM = 2, 2, 100, 4


def check(index, missing, stores=2, slots=SLOTS, dtype=np.float32, into=np.float32):
    """Against one row at a time in NumPy, with NaN in every row that nobody asked for."""
    index, missing = np.asarray(index, np.int32), np.asarray(missing, bool)
    rows, lists, length = index.shape
    rng = np.random.default_rng(0)
    wanted = np.zeros((rows, HEADS, slots), bool)
    for at in zip(*np.nonzero(missing), strict=True):
        wanted[at[0], at[1] // (lists // HEADS), index[at]] = True
    given, there, expected = [], [], []
    for _ in range(stores):
        store = rng.normal(size=(rows, HEADS, slots, DIM)).astype(dtype)
        before = rng.normal(size=(rows, lists, length, DIM)).astype(into)
        after = before.copy()
        for at in zip(*np.nonzero(missing), strict=True):
            after[at] = store[at[0], at[1] // (lists // HEADS), index[at]]
        given.append(to_host(jnp.asarray(np.where(wanted[..., None], store, np.nan))))
        there.append(jnp.asarray(before))
        expected.append(after)
    found = fetch(tuple(given), tuple(there), jnp.asarray(index), jnp.asarray(missing))
    assert len(found) == stores
    for mine, other in zip(found, expected, strict=True):
        assert mine.dtype == into
        close(mine, other, "exact")


def runs(lengths, gap=True) -> np.ndarray:
    """Slots in runs of these lengths; with a gap between them, or one before the other."""
    start, out = 0, []
    for number, length in enumerate(lengths):
        out += range(start, start + length)
        start = start + length + 3 if gap else (70 - start if number % 2 else 40)
    return np.array(out)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 64, 100])
def test_one_run(length):
    """Pieces of 16, and what is left over, up to the last slot of the store."""
    index = np.full((ROWS, HEADS, 100), -1)
    index[:, :, :length] = np.arange(length)
    index[1, 1, :length] = np.arange(100 - length, 100)
    check(index, index >= 0)


@pytest.mark.parametrize("lengths", [(1, 16, 1), (15, 16, 17), (5, 20, 3, 7), (16, 16, 32)])
def test_several_runs(lengths):
    index = runs(lengths)
    index = np.broadcast_to(index, (ROWS, HEADS, index.size)).copy()
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


@pytest.mark.parametrize("length", [1, 3, 15, 16])
@pytest.mark.fast_cases("1")
def test_short_lists_and_short_stores(length):
    index = np.broadcast_to(np.arange(length), (ROWS, HEADS, length))
    check(index, index >= 0)
    check(index, index >= 0, slots=length)
    check(index[..., :1], index[..., :1] >= 0, slots=length)


def test_a_long_list_over_a_short_store():
    index = np.tile(np.arange(10), 4)
    check(np.broadcast_to(index, (ROWS, HEADS, 40)), np.ones((ROWS, HEADS, 40), bool), slots=10)


@pytest.mark.parametrize("stores", [1, 3])
def test_any_number_of_stores(stores):
    index = np.broadcast_to(runs((20, 2, 17)), (ROWS, HEADS, 39))
    check(index, index % 7 > 0, stores=stores)


def test_the_same_slot_twice():
    index = np.broadcast_to([5] * 10 + [*range(5, 25)] * 2, (ROWS, HEADS, 50))
    check(index, np.ones(index.shape, bool))


@pytest.mark.parametrize(
    ("dtype", "into"), [(jnp.bfloat16, jnp.bfloat16), (jnp.bfloat16, jnp.float32)]
)
def test_dtypes(dtype, into):
    index = np.broadcast_to(runs((20, 2, 17)), (ROWS, HEADS, 39))
    check(index, index % 5 > 0, dtype=dtype, into=into)


def moved(jaxpr) -> list[int]:
    """Numbers that each `device_put` brings, in whatever loop."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "device_put":
            found += [x.aval.size for x in equation.invars]
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            found += moved(inner) if hasattr(inner, "eqns") else []
    return found


def test_only_pieces_cross():
    """16 rows at a time and one at a time, of each store."""
    store = to_host(jnp.zeros((ROWS, HEADS, SLOTS, DIM)))
    rows = jnp.zeros((ROWS, HEADS, 40, DIM))
    index = jnp.zeros((ROWS, HEADS, 40), jnp.int32)
    traced = jax.make_jaxpr(
        lambda s, r, i: host_rows((s, s), (r, r), i, i >= 0, implementation="xla")
    )(store, rows, index)
    assert sorted(moved(traced.jaxpr)) == [DIM, DIM, 16 * DIM, 16 * DIM]


def test_pieces_are_as_few_as_can_be(monkeypatch):
    """A run of 40 slots is 2 long pieces and 8 short ones, wherever it begins."""
    counted = []
    module = sys.modules["pallas_kernels.recall.host_rows"]  # the package's name is the function's
    original = module._fetch

    def count(stores, rows, index, jobs, size):
        counted.append((size, int(jobs.sum())))
        return original(stores, rows, index, jobs, size)

    monkeypatch.setattr(module, "_fetch", count)
    index = np.concatenate((np.array([90, 3]), np.arange(7, 47), np.array([60, 61])))[None, None]
    store = to_host(jnp.zeros((1, 1, SLOTS, DIM)))
    rows = jnp.zeros((1, 1, index.size, DIM))
    index, missing = jnp.asarray(index, jnp.int32), jnp.ones(index.shape, bool)
    host_rows((store,), (rows,), index, missing, implementation="xla")
    assert counted == [(16, 2), (1, 2 + 8 + 2)]


def test_inside_a_loop():
    rng = np.random.default_rng(1)
    data = rng.normal(size=(ROWS, HEADS, SLOTS, DIM)).astype(np.float32)
    index = rng.integers(SLOTS, size=(5, ROWS, HEADS, 20)).astype(np.int32)

    @jax.jit
    def loop(store, index):
        def step(store, index):
            rows = jnp.zeros((*index.shape, DIM))
            return store, host_rows((store,), (rows,), index, index >= 0)[0]

        return jax.lax.scan(step, store, index)

    store, rows = loop(to_host(jnp.asarray(data)), jnp.asarray(index))
    assert store.sharding.memory_kind == HOST_MEMORY
    assert rows.sharding.memory_kind != HOST_MEMORY
    expected = np.take_along_axis(data[None], index[..., None], axis=3)
    close(rows, expected, "exact")


def test_refused():
    store = to_host(jnp.zeros((1, 1, 4, 2)))
    rows, index = jnp.zeros((1, 1, 2, 2)), jnp.zeros((1, 1, 2), jnp.int32)
    with pytest.raises(ValueError, match="got 'cuda'"):
        host_rows((store,), (rows,), index, index >= 0, implementation="cuda")
