"""Methods that recall: within a sliding window, with rows by turns, and what a step copies."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.transforms.clusterkv.clusters import Clusters
from kvjax.transforms.infinigen.infinigen import PARTIAL_KEYS
from tests.support.attending import (
    HEAD_DIM,
    KV_HEADS,
    Tokens,
    attended,
    decode,
    flushed,
    new_cache,
    prompt,
    right,
)
from tests.support.decode_loops import Seen, Watched, found
from tests.support.marks import some_slow
from tests.support.tolerances import close

LENGTHS, WIDTH, STEPS, WINDOW = (32, 9, 20), 32, 12, 9
slow = pytest.mark.slow


def infinigen(budget: int, head_dim: int = HEAD_DIM, **fields) -> kvjax.InfiniGen:
    projections = np.random.default_rng(0).normal(size=(1, KV_HEADS, head_dim, 3))
    calibration = kvjax.InfiniGenCalibration(projections)
    return kvjax.InfiniGen(budget, None, calibration, dense_layers=(), **fields)


# A window of 9 tokens lies in 3 pages of 4. InfiniGen has 8 tokens beside the step's own.
ENOUGH_FOR_THE_WINDOW = {
    "quest": kvjax.Quest(12, page=4, dense_layers=()),
    "quest per query head": kvjax.Quest(12, page=4, per_query_head=True, dense_layers=()),
    "infinigen": infinigen(8),
    "infinigen per query head": infinigen(8, per_query_head=True),
}
CLUSTERS = kvjax.ClusterKV(
    10, tokens_per_cluster=2, sinks=2, interval=3, new_clusters=2, dense_layers=()
)


def steps(transform):
    """Of decode steps with a window: the cache before and after, the positions and the output."""
    options = {"window": WINDOW}
    tokens, cache = Tokens.random(), new_cache(transform, **options)
    _, cache = prompt(transform, cache, tokens, right([0] * 3, LENGTHS, WIDTH), **options)
    for step in range(STEPS):
        before, now = cache, np.array(LENGTHS)[:, None] + step
        out, cache = decode(transform, cache, tokens, now, **options)
        yield before, cache, tokens, now, np.asarray(out)
        cache = flushed(cache, step + 1)


@pytest.mark.parametrize("name", some_slow(ENOUGH_FOR_THE_WINDOW, "infinigen"))
def test_a_budget_for_the_window_is_exact(name):
    """Other tokens do not take places in the list, whatever their scores."""
    transform = ENOUGH_FOR_THE_WINDOW[name]
    for before, _, tokens, now, out in steps(transform):
        close(out, attended(transform, before, tokens, now, window=WINDOW))


@pytest.mark.parametrize("per_query_head", [False, pytest.param(True, marks=slow)])
def test_clusters_outside_the_window_are_passed_over(per_query_head):
    """Every cluster that is listed has a token inside, and no place is left that such one has."""
    own = dataclasses.replace(CLUSTERS, per_query_head=per_query_head)
    passed_over = 0
    for before, after, _, now, _ in steps(Watched(own)):
        seen, clusters = found(after, Seen).positions, found(before, Clusters)
        position = np.asarray(after.kv.position)
        for row, head in np.ndindex(3, KV_HEADS):
            sizes, starts = (np.asarray(x)[row, head] for x in (clusters.sizes, clusters.starts))
            ranges = [(0, int(clusters.sinks[row, head]))]
            ranges += [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
            members = [set(position[row, head, slice(*each)].tolist()) for each in ranges]
            first = int(now[row, 0]) - WINDOW + 1
            inside = [each for each in members if any(p >= first for p in each)]
            passed_over += len([each for each in members if each]) - len(inside)
            recent = set(range(LENGTHS[row], int(now[row, 0]) + 1)) - set().union(*members)
            lists = len(seen[row]) // KV_HEADS
            for own_list in np.asarray(seen[row])[head * lists : (head + 1) * lists]:
                listed = set(own_list[own_list >= 0].tolist())
                assert recent <= listed <= recent | set().union(*inside)
                room = min(10, sum(map(len, inside)))
                assert len(listed - recent) == room
    assert passed_over > 50


BY_TURNS = {"ClusterKV": CLUSTERS, "Quest": kvjax.Quest(6, page=2, dense_layers=()),
            "InfiniGen": infinigen(4)}  # fmt: skip


@pytest.mark.parametrize("name", some_slow(BY_TURNS, "Quest"))
def test_max_new_bounds_the_tokens_of_a_row_and_not_the_steps_of_the_batch(name):
    """Two rows take turns: twice as many steps as `max_new`, and no token is lost."""
    transform, tokens = BY_TURNS[name], Tokens.random(rows=2)
    cache = new_cache(transform, 2, max_prompt=20, max_new=12)
    _, cache = prompt(transform, cache, tokens, right([0, 0], (20, 20), 20))
    now = np.array([20, 20])
    for step in range(24):
        going = np.arange(2) == step % 2
        _, cache = decode(transform, cache, tokens, np.where(going, now, -1))
        now, cache = now + going, flushed(cache, step + 1)
    assert (np.asarray(cache.kv.dropped) == 0).all()
    assert np.asarray(cache.kv.live).sum(-1).tolist() == [[32, 32]] * 2


BESIDE = {
    "Quest": (
        kvjax.Quest(12, 4, dense_layers=()),
        lambda cache: [cache.state.low, cache.state.high],
    ),
    "InfiniGen": (infinigen(32, 64), lambda cache: [cache.kv.column(PARTIAL_KEYS)]),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_step_copies_nothing_of_what_stands_beside_keys_and_values(name):
    """Bounds of pages and partial keys are changed in place."""
    transform, beside = BESIDE[name]
    size = {"kv_heads": 2, "query_heads": 4, "head_dim": 64, "max_prompt": 4096, "max_new": 64}
    init = functools.partial(kvjax.init_cache, transform, batch=1, dtype=jnp.float32, **size)
    cache = jax.eval_shape(init)

    def loop(cache, q, k):
        def step(cache, at):
            given = q * jnp.cos(at.astype(jnp.float32)), k, k, jnp.full((1, 1), at, jnp.int32)
            out, cache = kvjax.attend(transform, cache, *given, phase="decode")
            return cache, out

        return jax.lax.scan(step, cache, 4096 + jnp.arange(64, dtype=jnp.int32))

    q, k = (jax.ShapeDtypeStruct((1, heads, 1, 64), jnp.float32) for heads in (4, 2))
    compiled = jax.jit(loop, donate_argnums=0).lower(cache, q, k).compile()
    for array in beside(cache):
        shape = ",".join(map(str, array.shape))
        assert f"f32[{shape}]" in compiled.as_text()
        assert not re.search(rf"f32\[{shape}\]\S* copy\(", compiled.as_text())
    memory, stored = compiled.memory_analysis(), kvjax.nbytes((cache.kv.k, cache.kv.v))
    assert memory.alias_size_in_bytes > stored + kvjax.nbytes(beside(cache))
    assert memory.temp_size_in_bytes < stored / 8
