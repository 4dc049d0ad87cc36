"""A mesh of one device gives what no mesh gives, bit for bit, in the process of the tests.

Calls take the same ways through the code as on many devices, which `test_mesh.py` and
`test_axes.py` have in processes of their own.
"""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

import kvjax
from kvjax import devices
from kvjax.generation.decode_loop import _key
from kvjax.storage.offload.payload import HOST_MEMORY, memory_kinds
from tests.generation.test_context import QUESTIONS, generate, read
from tests.support.attending import numbers, same_arrays
from tests.support.conversations import arrays, conversation

AXES = ("data", "tensor")
AUTOMATIC, EXPLICIT = (
    jax.make_mesh((1, 1), AXES, (kind,) * 2) for kind in (AxisType.Auto, AxisType.Explicit)
)
PROMPT = 16
CALLS = (PROMPT, "prompt", True), (1, "decode", True)
CHUNKS = (10, "prompt", False), (6, "prompt", True), (1, "decode", True)
TOKENS = arrays(2, 2, 4, PROMPT + 1, 8, np.asarray)

run = jax.jit(conversation, static_argnums=(0, 1, 2), static_argnames="mesh")


# KVCrush compares the heads of a layer. SnapKV decides for each head alone, and is flushed here.
@pytest.mark.parametrize(
    ("method", "calls", "mesh"),
    [
        ("kvcrush(streaming_llm)", CHUNKS, AUTOMATIC),
        ("every(snapkv(window=4), steps=1)", CALLS, EXPLICIT),
    ],
    ids=["coupled heads, automatic axes", "heads alone, explicit axes"],
)
def test_a_layer_on_a_mesh_of_one_device(method, calls, mesh):
    """A prompt and a step, with a flush behind it."""
    tx = kvjax.parse(method, 8)
    outs, caches = run(tx, calls, PROMPT, *TOKENS)
    kept = caches[-1].kv.live.sum(-1)
    assert kept.min() >= 8 and kept.max() < PROMPT, "the method takes something away"
    with jax.set_mesh(mesh) if mesh is EXPLICIT else contextlib.nullcontext():
        found, on_mesh = run(tx, calls, PROMPT, *TOKENS, mesh=mesh)
    assert on_mesh[-1].placement.mesh.shape == mesh.shape and caches[-1].placement is None
    for x, y in zip(
        jax.tree.leaves((found, on_mesh)), jax.tree.leaves((outs, caches)), strict=True
    ):
        np.testing.assert_array_equal(numbers(x), numbers(y))


def test_a_document_on_a_mesh_of_one_device():
    """The record of a document is divided as the slots and rows that it is about."""
    tx = kvjax.OwnQueries(budget=6)
    size = {"batch": 2, "kv_heads": 2, "head_dim": 8, "max_prompt": PROMPT, "max_new": 2}

    @jax.jit
    def begun(length):
        caches = [kvjax.init_cache(tx, **size, mesh=mesh) for mesh in (None, AUTOMATIC)]
        return [kvjax.begin_document(cache, length) for cache in caches]

    reading, on_mesh = begun(jnp.array([PROMPT, 9]))
    assert on_mesh.record is not None and on_mesh.document_length.tolist() == [PROMPT, 9]
    for x, y in zip(jax.tree.leaves(on_mesh), jax.tree.leaves(reading), strict=True):
        np.testing.assert_array_equal(numbers(x), numbers(y))


def test_a_cache_of_another_mesh_is_refused():
    rows = jax.make_mesh((1,), ("data",), (AxisType.Explicit,))
    with (
        jax.set_mesh(rows),
        pytest.raises(ValueError, match=r"of \{'data': 1, 'tensor': 1\}, but .* \{'data': 1\}"),
    ):
        run.eval_shape(kvjax.Full(), CALLS[:1], PROMPT, *TOKENS, mesh=AUTOMATIC)


def test_a_context_goes_to_a_mesh_and_back():
    """Nothing of it is lost; a model that lies elsewhere does not take it."""
    context = read("kvcrush")
    there = context.at_rest_on(AUTOMATIC)
    assert there.resting and there.at_rest_on(AUTOMATIC) is there
    assert {x.sharding.mesh for x in jax.tree.leaves(there.held)} == {AUTOMATIC}
    assert there.logits.sharding.mesh == AUTOMATIC
    assert all(cache.kv.pinned.any() for cache in there.held)
    same_arrays(there.at_rest_on(None), context)
    message = r"the model does, .* for a mesh of \{'data': 1, 'tensor': 1\}, .* is on one device"
    with pytest.raises(ValueError, match=message):
        generate(QUESTIONS, there)


def test_arrays_go_to_a_mesh_and_back():
    x, key = np.arange(6.0).reshape(2, 3), jax.random.key(3)
    kinds = {None, HOST_MEMORY} if HOST_MEMORY in memory_kinds() else {None}
    for memory in kinds:
        there = devices.put(x, AUTOMATIC, "data", memory=memory)
        assert there.sharding.spec == PartitionSpec("data")
        assert memory in (None, there.sharding.memory_kind)
        back = devices.on_one_device(there)
        assert isinstance(back.sharding, SingleDeviceSharding)
        assert back.sharding.memory_kind == there.sharding.memory_kind
        np.testing.assert_array_equal(back, x)
    assert isinstance(devices.put(key, AUTOMATIC).sharding, NamedSharding)
    np.testing.assert_array_equal(numbers(devices.put(key, AUTOMATIC)), numbers(key))
    np.testing.assert_array_equal(numbers(_key(5, AUTOMATIC)), numbers(_key(5, None)))
    there = devices.put(x, AUTOMATIC, "data")
    assert devices.mesh_of({"weights": there}) is None, "a mesh of one device counts as none"


def test_heads_of_several_devices():
    """Heads are counted as on a mesh of three devices with two heads each."""
    whole = np.arange(12).reshape(2, 6)  # [B, H]
    parts = whole.reshape(2, 3, 2).swapaxes(0, 1)  # [devices, B, heads of a device]

    def on_device(part):
        gathered = devices.all_heads(part, heads=6)
        return gathered, devices.own_heads(gathered, own=2), devices.head_numbers(2, heads=6)

    gathered, own, head = jax.vmap(on_device, axis_name=devices.TENSOR)(parts)
    np.testing.assert_array_equal(gathered, [whole] * 3)
    np.testing.assert_array_equal(own, parts)
    assert head.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_an_explicit_mesh_is_unset_for_models():
    with jax.set_mesh(EXPLICIT):
        with devices.automatic():
            assert jax.sharding.get_abstract_mesh().empty
        assert jax.sharding.get_mesh() == EXPLICIT


@pytest.mark.parametrize("failed", [True, False])
def test_processes_tell_each_other_of_failures(failed):
    assert devices._any_process(failed, AUTOMATIC) is failed


@pytest.mark.parametrize(
    ("mesh", "error", "message"),
    [
        ("data", TypeError, r"must be a jax\.sharding\.Mesh, got 'data'"),
        (jax.make_mesh((1,), ("model",)), ValueError, r"'data' and 'tensor', .* got \('model',\)"),
    ],
    ids=["no mesh", "other axes"],
)
def test_what_is_no_mesh_of_ours(mesh, error, message):
    with pytest.raises(error, match=message):
        kvjax.init_cache(kvjax.Full(), batch=1, kv_heads=2, head_dim=8, max_prompt=8, max_new=2,
                         mesh=mesh)  # fmt: skip
