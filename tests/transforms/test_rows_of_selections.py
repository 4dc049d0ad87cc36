"""Rows of methods that select do not depend on each other, nor on when other rows get tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.storage.offload import HOST_MEMORY, Resident, memory_kinds
from kvjax.testing import OWN_CONDITIONS, control_flow
from kvjax.transforms.infinigen.infinigen import InfiniGen
from kvjax.transforms.infinigen.projections import InfiniGenCalibration
from tests.support.attending import Tokens, decode, new_cache, prompt, right
from tests.support.decode_loops import Seen, Watched, found, unseen
from tests.support.tolerances import close

INTERVAL, LENGTHS, TURN = 6, (20, 13), 5
KV_HEADS, DIM = 2, 8

projections = np.random.default_rng(0).normal(size=(1, KV_HEADS, DIM, 3)).astype(np.float32)
METHODS = {
    "ClusterKV": kvjax.ClusterKV(
        8, tokens_per_cluster=4, sinks=2, interval=INTERVAL, new_clusters=2, dense_layers=()
    ),
    "Quest": kvjax.Quest(6, page=2, dense_layers=()),
    "InfiniGen": InfiniGen(4, calibration=InfiniGenCalibration(projections), dense_layers=()),
}
flush = jax.jit(kvjax.flush, static_argnums=1)
needs_host = pytest.mark.skipif(HOST_MEMORY not in memory_kinds(), reason="no host memory")


def of_row_one(cache) -> list[np.ndarray]:
    """All that the cache holds of row 1, apart from what free slots hold."""
    kv = cache.kv
    live = np.asarray(kv.live)[1]
    held = [np.asarray(x.read())[1][live] for x in (kv.k, kv.v)]
    held += [np.asarray(x)[1] for x in (kv.position, kv.log_mass, kv.used, kv.dropped, kv.length)]
    held += [np.asarray(column.values)[1][live] for column in kv.columns.values()]
    state = jax.tree.leaves(
        unseen(cache).state, is_leaf=lambda x: isinstance(x, Resident)
    )  # what is resident is no part of a result
    arrays = [x for x in state if not isinstance(x, Resident)]
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in arrays]
    own = [x for x, key in zip(arrays, keys, strict=True) if not key and len(x) == len(LENGTHS)]
    return held + [np.asarray(x)[1] for x in own]


def steps(transform, cache, tokens, now, going, count):
    """Steps of the rows that are `going`, with a flush after every INTERVAL of the batch."""
    outs, lists = [], []
    for _ in range(count):
        out, cache = decode(transform, cache, tokens, np.where(going, now, -1))
        outs.append(np.asarray(out)[1])
        lists.append(np.asarray(found(cache, Seen).positions)[1])
        now = now + going
    return cache, now, outs, lists


@pytest.mark.parametrize("event", ["a turn", "steps"])
@pytest.mark.parametrize(
    "offload", [False, pytest.param(True, marks=needs_host)], ids=["alone", "offloaded"]
)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.fast_cases("ClusterKV-alone-steps", "InfiniGen-alone-steps")
def test_a_turn_or_steps_of_row_0_leave_row_1_as_it_is(name, offload, event):
    tail = (kvjax.Offload(interval=INTERVAL),) if offload else ()
    transform = kvjax.chain(Watched(METHODS[name]), *tail)
    tokens, both, first = Tokens.random(rows=2), np.array([True, True]), np.array([True, False])
    ends = []
    for happens in (True, False):
        cache = new_cache(transform, 2, max_prompt=32, max_new=24)
        _, cache = prompt(transform, cache, tokens, right([0, 0], LENGTHS, 20))
        cache, now, *_ = steps(transform, cache, tokens, np.array(LENGTHS), both, 4)
        before = of_row_one(cache)
        if happens and event == "a turn":
            _, cache = prompt(transform, cache, tokens, right(now, (TURN, 0), TURN))
            now = now + TURN * first
        elif happens:
            cache, now, *_ = steps(transform, cache, tokens, now, first, 2)
        for own, other in zip(of_row_one(cache), before, strict=True):
            close(own, other, "exact")
        cache = flush(cache, INTERVAL)
        cache, now, outs, lists = steps(transform, cache, tokens, now, both, INTERVAL)
        cache = flush(cache, INTERVAL)
        cache, now, more, further = steps(transform, cache, tokens, now, both, 3)
        assert (np.asarray(cache.kv.dropped) == 0).all()
        ends.append((of_row_one(cache), outs + more, lists + further))
    for own, other in zip(*ends, strict=True):
        for x, y in zip(own, other, strict=True):
            close(x, y, "exact")


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.fast_cases("Quest")
def test_max_new_bounds_the_tokens_of_a_row_and_not_the_steps_of_the_batch(name):
    """Two rows take turns: twice as many steps as `max_new`, and no token is lost."""
    transform, tokens = METHODS[name], Tokens.random(rows=2)
    cache = new_cache(transform, 2, max_prompt=20, max_new=12)
    _, cache = prompt(transform, cache, tokens, right([0, 0], (20, 20), 20))
    now = np.array([20, 20])
    for step in range(24):
        going = np.arange(2) == step % 2
        _, cache = decode(transform, cache, tokens, np.where(going, now, -1))
        now = now + going
        if (step + 1) % INTERVAL == 0:
            cache = flush(cache, INTERVAL)
    assert (np.asarray(cache.kv.dropped) == 0).all()
    assert np.asarray(cache.kv.live).sum(-1).tolist() == [[32, 32]] * 2


@pytest.mark.parametrize("name", METHODS)
def test_a_step_has_no_loop_and_no_condition(name):
    transform = METHODS[name]
    cache = new_cache(transform, 2)
    q, k, v, positions = Tokens.random(rows=2).at(np.array([[0], [0]]))

    def step(cache):
        return kvjax.attend(transform, cache, q, k, v, positions, phase="decode")

    found = control_flow(jax.make_jaxpr(step)(cache).jaxpr, lambda name: name in OWN_CONDITIONS)
    assert set(found) <= {"scan"}


@pytest.mark.parametrize("name", METHODS)
def test_layers_of_one_kind_are_equal(name):
    layers = kvjax.bind(METHODS[name], 1) * 2
    assert layers[0] == layers[1] == METHODS[name]
