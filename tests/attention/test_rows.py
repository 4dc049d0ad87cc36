"""Rows of caches: taken, repeated, permuted and put, of every method in every form of storage."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.attention.layer import layer_caches
from kvjax.registry import METHODS
from kvjax.storage.offload.payload import HOST_MEMORY, memory_kinds
from tests.compose.test_conformance import (
    CASES,
    LENGTHS,
    STEPS,
    WIDTH,
    names,
    standard,
    tokens,
)
from tests.support.attending import (
    HEAD_DIM,
    KV_HEADS,
    SIZE,
    decode,
    decoded,
    flushed,
    new_cache,
    numbers,
    prompt,
    right,
    same_arrays,
)
from tests.support.cases import ARGUMENTS
from tests.support.marks import some_slow

ROOT = Path(__file__).parents[2]
FAST = ("full", "h2o", "clusterkv", "quantize")
every_case = pytest.mark.parametrize("name", names(CASES, *FAST))
take = jax.jit(kvjax.take_rows, donate_argnums=0)
put = jax.jit(kvjax.put_rows, donate_argnums=0)


def copy(caches):
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), caches)


def kinds(caches) -> list:
    """Of each array its shape and its dtype."""
    return [(x.shape, x.dtype) for x in jax.tree.leaves(caches)]


def memories(caches) -> list:
    return [x.sharding.memory_kind for x in jax.tree.leaves(caches)]


def with_rows(name: str) -> list[bool]:
    """Which arrays of an empty cache grow with its batch."""
    make = functools.partial(kvjax.init_cache, CASES[name])
    one, other = (
        kinds(jax.eval_shape(lambda batch=batch: make(**{**SIZE, "batch": batch})))
        for batch in (7, 9)
    )
    return [x != y for x, y in zip(one, other, strict=True)]


@every_case
def test_rows_that_are_taken_have_all_that_they_had(name):
    """Repeated, left out and in another order, by arrays of JAX and by lists, with donation."""
    caches = standard(name).prompt_cache
    permuted = take(copy(caches), jnp.array([2, 0, 1]))
    same_arrays(permuted, kvjax.take_rows(caches, [2, 0, 1]))
    index = [2, 0, 0, 1, 2]
    taken = kvjax.take_rows(caches, index)
    assert memories(taken) == memories(caches)
    plain = jax.tree.leaves(new_cache(CASES[name]))
    if len(plain) == len(jax.tree.leaves(caches)):  # else a prompt leaves frequencies of RoPE
        found = zip(with_rows(name), *map(jax.tree.leaves, (caches, taken)), strict=True)
        for has, old, new in found:
            rows = numbers(old)[index] if has else numbers(old)
            np.testing.assert_array_equal(numbers(new), rows)


@every_case
def test_rows_that_are_taken_go_on_as_before(name):
    index, whole = [2, 0, 0], standard(name)
    taken = take(copy(whole.prompt_cache), jnp.array(index))
    assert memories(taken) == memories(whole.prompt_cache)
    outs, caches = decoded(
        CASES[name], taken, tokens().rows(index), np.array(LENGTHS)[index], STEPS
    )
    for out, expected in zip(outs, whole.outs, strict=True):
        np.testing.assert_array_equal(out, expected[index])
    same_arrays(caches[-1], kvjax.take_rows(whole.caches[-1], index))


@pytest.mark.parametrize("name", names(["snapkv", "spindlekv", "clusterkv_offload"], "snapkv"))
def test_rows_in_the_middle_of_a_prompt_and_in_further_turns(name):
    """A table of budgets without rows would be cut like rows, and a further turn be wrong."""
    transform, index, counts = CASES[name], [2, 0, 0], np.array([6, 3, 2])
    lengths = np.array(LENGTHS)
    half = lengths // 2
    cache = new_cache(transform)
    _, cache = prompt(transform, cache, tokens(), right([0] * 3, half, WIDTH), last=False)
    taken = take(copy(cache), jnp.array(index))
    same_arrays(put(copy(cache), jnp.array([1]), kvjax.take_rows(cache, [0])),
                kvjax.take_rows(cache, [0, 0, 2]))  # fmt: skip
    rest = right(half, lengths - half, WIDTH)
    _, cache = prompt(transform, cache, tokens(), rest)
    _, taken = prompt(transform, taken, tokens().rows(index), rest[index])
    same_arrays(taken, kvjax.take_rows(cache, index))
    more = right(lengths, counts, WIDTH)
    out, cache = prompt(transform, cache, tokens(), more)
    taken_out, taken = prompt(transform, taken, tokens().rows(index), more[index])
    np.testing.assert_array_equal(taken_out, out[np.array(index)])
    same_arrays(taken, kvjax.take_rows(cache, index))


@every_case
def test_a_batch_whose_members_come_and_go(name):
    """Each member has the outputs that it has alone, whichever row it stands in, and with whom."""
    transform, whole = CASES[name], standard(name)
    batch = new_cache(transform)
    interval = kvjax.flush_interval(batch)
    every = 3 if interval is None or interval > STEPS else interval  # so that clocks agree
    # When each of the rows of the standard run comes, to which row, and when it is gone.
    members = {0: (0, 1, 2 * every), 2: (every, 2, STEPS), 1: (2 * every, 1, STEPS)}
    for step in range(STEPS):
        coming = [(row, place) for row, (come, place, _) in members.items() if come == step]
        for row, place in coming:
            one = kvjax.take_rows(whole.prompt_cache, [row])
            batch = put(batch, jnp.array([place]), one)
        here = [
            (row, place, step - come)
            for row, (come, place, gone) in members.items() if come <= step < gone
        ]  # fmt: skip
        now, rows = np.full(3, -1), np.zeros(3, int)
        for row, place, age in here:
            now[place], rows[place] = LENGTHS[row] + age, row
        out, batch = decode(transform, batch, tokens().rows(rows), now)
        batch = flushed(batch, step + 1)
        for row, place, age in here:
            np.testing.assert_array_equal(out[place], whole.outs[age][row], f"{row} at {step}")
    assert not any(part.kv.dropped.any() for part in layer_caches(batch))


def test_other_rows_stay_as_they_are():
    caches = [standard("h2o").prompt_cache, standard("every").prompt_cache]
    ones = kvjax.take_rows(caches, [2, 0])
    done = kvjax.put_rows(caches, [0, 1], ones)
    same_arrays(kvjax.take_rows(done, [0, 1]), ones)
    same_arrays(kvjax.take_rows(done, [2]), kvjax.take_rows(caches, [2]))
    same_arrays(kvjax.put_rows(caches, np.array([1, 2, 0]), kvjax.take_rows(caches, [1, 2, 0])),
                caches)  # fmt: skip


def test_results_have_memory_of_their_own():
    """Who donates rows that were taken can go on with the cache that they come from."""
    cache = standard("clusterkv").prompt_cache
    taken = kvjax.take_rows(cache, [0, 1, 2])
    done = kvjax.put_rows(cache, [0], kvjax.take_rows(cache, [1]))
    places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache.kv)]
    for new in (taken, done):
        assert not set(places) & {x.unsafe_buffer_pointer() for x in jax.tree.leaves(new.kv)}
        jax.tree.map(lambda x: x.delete(), new)
    assert numbers(cache.state[1]).size  # the key of its draws


def test_what_a_flush_has_to_know_comes_with_the_last_prompt():
    """Frequencies of RoPE and logits of sinks, which an empty batch does not have."""
    transform, sinks = CASES["every"], jnp.arange(4.0)
    rope = kvjax.Rope(jnp.ones((3, HEAD_DIM // 2)))
    read = standard("every").prompt_cache
    read = dataclasses.replace(
        read, rope=rope, options=dataclasses.replace(read.options, sinks=sinks)
    )
    empty = new_cache(transform, 4)
    done = kvjax.put_rows(empty, [3, 1], kvjax.take_rows(read, [0, 2]))
    np.testing.assert_array_equal(done.options.sinks, sinks)
    np.testing.assert_array_equal(done.rope.inv_freq.sum(1), [0, 4, 0, 4])
    done = kvjax.put_rows(done, [3], kvjax.take_rows(empty, [0]))  # frees the row
    np.testing.assert_array_equal(done.options.sinks, sinks)
    assert done.kv.length.tolist() == [0, LENGTHS[2], 0, 0]


@pytest.mark.skipif(HOST_MEMORY not in memory_kinds(), reason="no host memory")
def test_rows_in_host_memory():
    """Taken, repeated and put by their numbers, they stay there."""
    quest = kvjax.Quest(12, page=4, dense_layers=())
    empty = kvjax.init_cache(kvjax.chain(quest, kvjax.Offload()), batch=3, **SMALL)
    store = empty.kv.k.store
    rows = np.arange(store.size, dtype=store.dtype).reshape(store.shape)
    placed = jax.device_put(rows, store.sharding)
    keys = dataclasses.replace(empty.kv.k, store=placed)
    cache = dataclasses.replace(empty, kv=empty.kv.replace(k=keys))
    taken = take(cache, jnp.array([2, 0, 0]))
    done = put(copy(taken), jnp.array([1]), kvjax.take_rows(taken, [0]))
    for result, index in ((taken, [2, 0, 0]), (done, [2, 2, 0])):
        assert result.kv.k.store.sharding.memory_kind == HOST_MEMORY
        np.testing.assert_array_equal(result.kv.k.store, rows[index])


SMALL = {"kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "max_prompt": 8, "max_new": 2}


@pytest.mark.parametrize(
    ("index", "error", "words"),
    [
        ([3], ValueError, "below 3"),
        ([-1], ValueError, "below 3"),
        ([], ValueError, "at least one"),
        ([0.5], TypeError, "whole numbers"),
        ([True, False, True], TypeError, "whole numbers"),
        ([[0]], TypeError, "whole numbers"),
        (1, TypeError, "whole numbers"),
    ],
)
def test_what_is_no_index(index, error, words):
    with pytest.raises(error, match=words):
        kvjax.take_rows(new_cache(kvjax.Full()), index)


def test_what_cannot_be_put():
    batch, one = (kvjax.init_cache(kvjax.Full(), batch=rows, **SMALL) for rows in (3, 1))

    def other(transform=None, rows=1, **changes):
        return kvjax.init_cache(transform or kvjax.Full(), batch=rows, **{**SMALL, **changes})

    for new, index, words in (
        (one, [0, 1], "a row for each one"),
        (other(rows=2), [1, 1], "different rows"),
        ([one], [0], "same structure"),
        (other(kvjax.StreamingLLM(8)), [0], "for transform=Full"),
        (other(max_new=3), [0], "for max_length=10, got 11"),
        (other(max_new=3, max_length=10), [0], "for capacity=10, got 11"),
        (other(scale=2.0), [0], "for scale="),
        (other(dtype=jnp.bfloat16), [0], "of one dtype"),
    ):
        with pytest.raises(ValueError, match=words):
            kvjax.put_rows(batch, index, new)
    with pytest.raises(TypeError, match="caches must be those of init_cache"):
        kvjax.take_rows(batch.kv, [0])
    stacked = jax.tree.map(lambda *layers: jnp.stack(layers), batch, batch)
    with pytest.raises(ValueError, match="takes the cache of one layer"):
        kvjax.take_rows(stacked, [0])
    with pytest.raises(ValueError, match="caches of one batch, got \\[1, 3\\]"):
        kvjax.take_rows([batch, one], [0])


ON_A_MESH = """
import jax, jax.numpy as jnp, numpy as np, kvjax
from kvjax.attention.parts import placed

mesh = jax.make_mesh((2, 2), ("data", "tensor"), (jax.sharding.AxisType.Auto,) * 2)
sizes = {"batch": 4, "kv_heads": 2, "head_dim": 8, "max_prompt": 16, "max_new": 4}
clusterkv = kvjax.ClusterKV(8, dense_layers=(), sinks=2, interval=3, new_clusters=2)


def filled(transform, mesh):
    def number(x):
        if not jnp.issubdtype(x.dtype, jnp.number):
            return x
        return jax.device_put(np.arange(x.size).reshape(x.shape).astype(x.dtype), x.sharding)

    return jax.tree.map(number, placed(kvjax.init_cache(transform, mesh=mesh, **sizes)))


def put(cache, index):
    return kvjax.put_rows(cache, index[:2], kvjax.take_rows(cache, [0, 3]))


for transform in (kvjax.Full(), kvjax.Quantize(8), kvjax.chain(clusterkv, kvjax.Offload())):
    for index in ([3, 0, 2, 1], [2, 1, 1]):
        for function in (kvjax.take_rows, jax.jit(kvjax.take_rows), put, jax.jit(put)):
            index = jnp.array(index)
            one, many = (function(filled(transform, x), index) for x in (None, mesh))
            for x, y in zip(*map(jax.tree.leaves, (one, many)), strict=True):
                assert x.sharding.memory_kind == y.sharding.memory_kind
                if jnp.issubdtype(x.dtype, jnp.number):
                    np.testing.assert_array_equal(x, y)
            rows = "data" if many.kv.shape[0] % 2 == 0 else None
            assert tuple(many.kv.position.sharding.spec) == (rows, "tensor")
"""


@pytest.mark.slow
def test_rows_of_a_mesh():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-c", ON_A_MESH], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# Beams


@pytest.fixture(scope="module")
def beams():
    path = ROOT / "examples" / "beam_search.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_beams(name: str) -> kvjax.KVTransform:
    """A method for the two layers of the example."""
    arguments = dict(ARGUMENTS[name])
    if name == "kvzip":
        arguments["room"] = 8  # the example does not repeat its prompt
    if name == "infinigen":
        found = np.random.default_rng(0).normal(size=(2, KV_HEADS, HEAD_DIM, 3))
        arguments["calibration"] = kvjax.kit.InfiniGenCalibration(found)
    return METHODS[name](**arguments)


BEAMS = {"h2o", "kvzip", "clusterkv"}  # others before a release


@pytest.mark.lenient
@pytest.mark.parametrize("name", some_slow(ARGUMENTS, exhaustive={*ARGUMENTS} - BEAMS))
def test_beams_are_rows_that_run_alone(name, beams):
    """Each text has the probability, and at its end the caches, that it has without a search."""
    weights = beams.random_weights()
    asked = jax.random.randint(jax.random.key(1), (1, beams.PROMPT), 0, beams.VOCABULARY)
    texts, scores, caches = beams.search(weights, asked, of_beams(name))
    assert len({tuple(text) for text in texts.tolist()}) == beams.BEAMS
    found, alone = beams.read(weights, asked, of_beams(name))
    every, expected = np.arange(beams.BEAMS), found[0][texts[:, 0]]
    interval = kvjax.flush_interval(alone)
    for number in range(1, beams.NEW):
        at = beams.PROMPT + number - 1
        found, alone = beams.step(weights, every, texts[:, number - 1], at, alone)
        expected = expected + found[every, texts[:, number]]
        if interval is not None and number % interval == 0:
            alone = beams.flush(alone)
    np.testing.assert_array_equal(scores, expected)
    same_arrays(caches, alone)
