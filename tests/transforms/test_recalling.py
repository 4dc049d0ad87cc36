"""Methods that recall: within a sliding window, and with rows by turns."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.transforms.clusterkv.clusters import Clusters
from tests.support.attending import (
    HEAD_DIM,
    KV_HEADS,
    Tokens,
    decode,
    flushed,
    new_cache,
    prompt,
    right,
)
from tests.support.marks import some_slow
from tests.support.watched import Seen, Watched, found, unseen

LENGTHS, WIDTH, STEPS, WINDOW = (32, 9, 20), 32, 12, 9
CLUSTERS = kvjax.ClusterKV(
    10, tokens_per_cluster=2, sinks=2, interval=3, new_clusters=2, dense_layers=()
)


@pytest.mark.parametrize("per_query_head", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_clusters_outside_the_window_are_passed_over(per_query_head):
    """Every cluster that is listed has a token inside, and no place is left that such one has."""
    transform = Watched(dataclasses.replace(CLUSTERS, per_query_head=per_query_head))
    options, passed_over = {"window": WINDOW}, 0
    tokens, cache = Tokens.random(), new_cache(transform, **options)
    _, cache = prompt(transform, cache, tokens, right([0] * 3, LENGTHS, WIDTH), **options)
    for step in range(STEPS):
        now, clusters = np.array(LENGTHS) + step, found(cache, Clusters)
        _, after = decode(transform, cache, tokens, now, **options)
        cache = flushed(unseen(after), step + 1)
        seen, position = found(after, Seen).positions, np.asarray(after.kv.position)
        for row, head in np.ndindex(3, KV_HEADS):
            sizes, starts = (np.asarray(x)[row, head] for x in (clusters.sizes, clusters.starts))
            ranges = [(0, int(clusters.sinks[row, head]))]
            ranges += [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
            members = [set(position[row, head, slice(*each)].tolist()) for each in ranges]
            first = int(now[row]) - WINDOW + 1
            inside = [each for each in members if any(p >= first for p in each)]
            passed_over += len([each for each in members if each]) - len(inside)
            recent = set(range(LENGTHS[row], int(now[row]) + 1)) - set().union(*members)
            lists = len(seen[row]) // KV_HEADS
            for own_list in np.asarray(seen[row])[head * lists : (head + 1) * lists]:
                listed = set(own_list[own_list >= 0].tolist())
                assert recent <= listed <= recent | set().union(*inside)
                assert len(listed - recent) == min(10, sum(map(len, inside)))
    assert passed_over > 50


PROJECTIONS = np.random.default_rng(0).normal(size=(1, KV_HEADS, HEAD_DIM, 3))
INFINIGEN = kvjax.InfiniGen(4, None, kvjax.kit.InfiniGenCalibration(PROJECTIONS), dense_layers=())
BY_TURNS = {"ClusterKV": CLUSTERS, "Quest": kvjax.Quest(6, page=2, dense_layers=()),
            "InfiniGen": INFINIGEN}  # fmt: skip


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
