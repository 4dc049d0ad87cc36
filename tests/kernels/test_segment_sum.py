"""Sums of segments: by XLA, by the kernel, and what the kernel compiles to."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import segment_merge, segment_sum
from tests.references import segments as reference
from tests.support.lowering import KERNEL, lower_for_cuda
from tests.support.tolerances import close

EVERY = ["xla", "interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
KERNELS = EVERY[1:]


def run(rows, into, places=None, implementation="xla"):
    call = functools.partial(segment_sum, places=places, implementation=implementation)
    return np.asarray(jax.jit(call)(rows, into))


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize(
    ("rows", "places", "rest"),
    [(1, 1, ()), (7, 7, ()), (40, 13, (3,)), (40, 90, (2, 5)), (150, 150, (80,))],
)
def test_sums(rows, places, rest, implementation):
    """More places than rows and fewer; places that get many, one, none; rows that go nowhere."""
    rng = np.random.default_rng(rows)
    into = (rng.random((2, 2, rows)) ** 2 * (places + 2)).astype(np.int32)
    into[1, 0] = places  # none
    into[1, 1] = places - 1  # all
    x = rng.normal(size=(*into.shape, *rest)).astype(np.float32)
    x[into >= places] = np.nan
    found = run(x, into, places, implementation)
    assert found.dtype == np.float32
    for row, head in np.ndindex(2, 2):
        expected = reference.segment_sum(x[row, head], into[row, head], places)
        close(found[row, head], expected, "accumulated")


@pytest.mark.parametrize("implementation", EVERY)
def test_whole_numbers_are_summed_exactly(implementation):
    rng = np.random.default_rng(0)
    into = rng.integers(0, 5, (1, 2, 30)).astype(np.int32)
    x = rng.integers(2**24, 2**25, into.shape).astype(np.int32)
    found = run(x, into, 5, implementation)
    for head in range(2):
        expected = reference.segment_sum(x[0, head], into[0, head], 5)
        np.testing.assert_array_equal(found[0, head], expected)


@pytest.mark.parametrize("implementation", KERNELS)
def test_sums_do_not_depend_on_other_places(implementation):
    """The order of additions is that of the rows: the same segment has the same sum anywhere."""
    rng = np.random.default_rng(1)
    own = rng.normal(size=17).astype(np.float32)
    sums = set()
    for before in (0, 1, 5):
        others = rng.normal(size=before).astype(np.float32)
        rows = np.concatenate((others, own))[None, None]
        into = np.array([[[0] * before + [2] * 17]], np.int32)
        sums.add(float(run(rows, into, 3, implementation)[0, 0, 2]))
    assert len(sums) == 1


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"same B, H and N, got \(1, 1, 3\) and \(1, 1, 2\)"):
        segment_sum(jnp.ones((1, 1, 3)), jnp.zeros((1, 1, 2), jnp.int32))
    with pytest.raises(ValueError, match="implementation must be None or one of"):
        segment_sum(jnp.ones((1, 1, 2)), jnp.zeros((1, 1, 2), jnp.int32), implementation="cuda")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_it_lowers_for_cuda(dim, dtype):
    """One kernel each, and no additions that depend on the order in which they come."""
    rows = jax.ShapeDtypeStruct((2, 8, 4099, dim), dtype)
    into, weights = (jax.ShapeDtypeStruct(rows.shape[:3], x) for x in ("int32", "float32"))
    for operation, args in ((segment_sum, (rows, into)), (segment_merge, (rows, into, weights))):
        text = lower_for_cuda(functools.partial(operation, implementation="pallas"), *args)
        assert text.count(KERNEL) == 1
        scatters = text.split('"stablehlo.scatter"')[1:]
        assert len(scatters) == 2 and not any("stablehlo.add" in x[:900] for x in scatters)
