"""Decode and gather attention by XLA and by kernels, against float64, and which is chosen."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, use_abstract_mesh

import kvjax
from pallas_kernels import Mask, Queries, Seen, decode_attention, gather_attention
from pallas_kernels.attention import call as call_module
from pallas_kernels.base import dispatch
from tests.support.attending import attend, new_cache
from tests.support.attention_cases import SLOTS, Case, Shape, check, run, use_small_tiles
from tests.support.implementations import EVERY, each_way
from tests.support.tolerances import close


@pytest.fixture
def small_tiles(monkeypatch):
    use_small_tiles(monkeypatch)


SHAPES = [
    Shape(group=1),
    Shape(group=1, dim=8, slots=1),
    Shape(group=2, dim=80, dtype="bfloat16"),
    Shape(group=4, dim=128, dtype="bfloat16", options={"window": 9, "soft_cap": 1.7}),
    Shape(group=7, dim=96, dtype="float16", options={"soft_cap": 0.9}),
    Shape(group=16, dim=128),
    Shape(group=16, dim=8, tokens=5, dtype="bfloat16"),  # more query rows than one program takes
]


@pytest.mark.parametrize(
    ("shape", "implementation"),
    each_way({str(shape): (shape,) for shape in SHAPES}, fast=["G16 D128 T1 float32"]),
)
def test_decode(shape, implementation, small_tiles):
    case = Case(shape)
    actual = run(decode_attention, case.args, **case.options, implementation=implementation)
    check(case, actual, case.expected())


@pytest.mark.parametrize("implementation", EVERY)
def test_decode_with_lengths_and_without_probabilities(implementation, small_tiles):
    case = Case(Shape(group=2))
    options = {**case.options, "implementation": implementation, "probabilities": False}
    out, lse, p = run(decode_attention, ending(case, case.used), **options)
    assert p is None
    # More than there are slots: none of those is live either.
    beyond = np.full((2, 2), SLOTS + 20, np.int32)
    again, _, _ = run(decode_attention, ending(case, beyond), **options)
    close(again, out, "exact")
    expected = case.expected()
    close(out, expected[0])
    close(lse, expected[1])


def ending(case, end):
    """Arguments of a case whose slots are known to end somewhere."""
    return *case.args[:3], case.seen._replace(end=end)


def test_lengths_are_where_reading_ends(small_tiles):
    """Two slots more in every head would be seen by anybody who looked there."""
    case = Case(Shape(group=1))
    fewer = np.maximum(np.asarray(case.used) - 2, 0)
    options = {**case.options, "implementation": "interpret", "probabilities": False}
    out, _, _ = run(decode_attention, ending(case, fewer), **options)
    case.bias = np.where(np.arange(SLOTS) < fewer[..., None], case.bias, -np.inf)
    close(out, case.expected()[0])


@pytest.mark.parametrize(
    ("options", "row", "expected"),
    [({}, 0, [2, 8]), ({"window": 3}, 0, [3, 5]), ({}, 1, [8, 0]), ({"window": 3}, 1, [8, 0])],
    ids=str,
)
def test_reading_begins_and_ends_with_what_is_seen(options, row, expected):
    """Row 0 has a query at 7 and padding, which must not widen the window; row 1 padding alone."""
    position = np.array([[[-1, 8, 4, 7, 5, 2, 3, 0]]] * 2)
    query = np.array([[7, -1], [-1, -1]])
    bias = np.zeros((2, 1, 8), np.float32)
    read = jax.jit(call_module._range, static_argnums=2)
    found = map(np.asarray, read(Seen(bias, position), query, options.get("window")))
    assert [int(x[row, 0]) for x in found] == expected


@pytest.mark.parametrize(
    ("shape", "per_query_head", "implementation"),
    each_way({
        "one list for all": (Shape(group=2, dim=80), False),
        "a list for each": (Shape(group=3, dim=96, dtype="bfloat16", options={"window": 20}), True),
    }),
)  # fmt: skip
def test_gather(shape, per_query_head, implementation, small_tiles):
    case, rng = Case(shape), np.random.default_rng(5)
    lists = 2 * (shape.group if per_query_head else 1)
    index = rng.integers(-1, SLOTS, size=(2, lists, 37))
    index[0, 0, 20:], index[0, -1] = -1, -1
    q = np.asarray(case.q).reshape(2, lists, -1, *case.q.shape[3:])
    seen = case.seen._replace(index=jnp.asarray(index, jnp.int32))
    args = (Queries(q, case.query), case.k, case.v, seen)
    actual = run(gather_attention, args, **case.options, implementation=implementation)
    check(case, actual, case.expected(index))


# --- what is chosen -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "chosen"),
    [(None, "xla"), ((7, 5), "xla"), ((8, 0), "pallas"), ((9, 0), "pallas")],
)
def test_none_takes_the_kernel_where_it_can_run(monkeypatch, capability, chosen):
    monkeypatch.setattr(dispatch, "gpu_capability", lambda: capability)
    assert dispatch.choose_implementation(None) == chosen
    assert dispatch.choose_implementation("xla") == "xla"
    assert dispatch.choose_implementation("interpret") == "interpret"
    if capability == (7, 5):
        with pytest.raises(ValueError, match=r"8\.0 or newer, got 7\.5"):
            dispatch.choose_implementation("pallas")
    else:
        assert dispatch.choose_implementation("pallas") == "pallas"


@pytest.mark.parametrize(
    ("dtype", "slots", "fits"),
    [("int8", 2**21, False), ("int8", 2**21 - 1, True), ("int8", 2**22 + 1, True),
     ("uint8", 2**22, False), ("bfloat16", 2**21, True), ("bfloat16", 2**24, True)],
)  # fmt: skip
def test_bytes_that_32_bits_with_a_sign_cannot_count(monkeypatch, dtype, slots, fits):
    monkeypatch.setattr(dispatch, "gpu_capability", lambda: (9, 0))
    shape = 1, 8, slots, 128
    assert chosen_for(None, shape, dtype) == ("pallas" if fits else "xla")
    assert chosen_for("interpret", shape, dtype) == "interpret"
    if fits:
        assert chosen_for("pallas", shape, dtype) == "pallas"
    else:
        with pytest.raises(ValueError, match=r"2 to 4 GiB .* got shape \(1, 8, \d+, 128\)"):
            chosen_for("pallas", shape, dtype)


def chosen_for(implementation, shape, dtype="float32"):
    """What is chosen where an operation is traced with an array that need not be there."""
    found = []

    def operation(x):
        found.append(dispatch.choose_implementation(implementation, None, x))

    jax.jit(operation).trace(jax.ShapeDtypeStruct(shape, dtype))
    return found[0]


@pytest.mark.parametrize(
    "version", ["PJRT C API\ncuda 13000", "cuda 12090", "PJRT C API\nrocm 60000"]
)
def test_only_a_cuda_gpu_has_a_capability(monkeypatch, version):
    client = SimpleNamespace(platform_version=version)
    device = SimpleNamespace(platform="gpu", client=client, compute_capability="8.9", core_count=58)
    monkeypatch.setattr(dispatch, "default_device", lambda: device)
    assert dispatch.gpu_capability() == ((8, 9) if "cuda" in version else None)


@pytest.mark.gpu
def test_a_gpu_is_found_and_its_kernels_are_taken():
    assert dispatch.gpu_capability() >= dispatch.OLDEST_GPU
    assert dispatch.choose_implementation(None, jnp.zeros(3)) == "pallas"


@pytest.mark.parametrize(
    ("size", "kind", "chosen"),
    [(1, "Auto", "pallas"), (2, "Auto", "xla"), (2, "Explicit", "xla"), (2, "Manual", "pallas")],
)
def test_arrays_of_several_devices_are_left_to_xla(monkeypatch, size, kind, chosen):
    monkeypatch.setattr(dispatch, "gpu_capability", lambda: (9, 0))
    mesh = AbstractMesh((size,), ("x",), axis_types=(getattr(AxisType, kind),))
    with use_abstract_mesh(mesh):
        assert chosen_for(None, (2,)) == chosen


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the kernel runs there")
def test_a_named_kernel_does_not_fall_back():
    case = Case(Shape())
    with pytest.raises(ValueError, match="interpret"):
        jax.block_until_ready(decode_attention(*case.args, Mask(1.0), implementation="pallas"))


@pytest.mark.parametrize("phase", ["prompt", "decode"])
def test_attend_hands_the_implementation_down(phase):
    q, kv = (np.ones((3, heads, 1, 8), np.float32) for heads in (4, 2))
    with pytest.raises(ValueError, match=r"'xla'.*'nonsense'"):
        attend(
            new_cache(kvjax.Full()), q, kv, kv, np.zeros((3, 1), np.int32),
            phase=phase, implementation="nonsense",
        )  # fmt: skip
