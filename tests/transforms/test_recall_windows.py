"""Methods that recall spend no budget on what lies outside a sliding window as a whole."""

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
    attended,
    decode,
    flushed,
    new_cache,
    prompt,
    right,
)
from tests.support.decode_loops import Seen, Watched, found
from tests.support.tolerances import close

LENGTHS, WIDTH, STEPS, WINDOW = (32, 9, 20), 32, 12, 9
CALIBRATION = kvjax.InfiniGenCalibration(
    np.random.default_rng(0).normal(size=(1, KV_HEADS, HEAD_DIM, 3))
)
# A window of 9 tokens lies in 3 pages of 4. InfiniGen has 8 tokens beside the step's own.
ENOUGH_FOR_THE_WINDOW = {
    "quest": kvjax.Quest(12, page=4, dense_layers=()),
    "quest per query head": kvjax.Quest(12, page=4, per_query_head=True, dense_layers=()),
    "infinigen": kvjax.InfiniGen(8, None, CALIBRATION, dense_layers=()),
    "infinigen per query head": kvjax.InfiniGen(
        8, None, CALIBRATION, per_query_head=True, dense_layers=()
    ),
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


@pytest.mark.parametrize("name", ENOUGH_FOR_THE_WINDOW)
@pytest.mark.fast_cases("quest", "infinigen")
def test_a_budget_for_the_window_is_exact(name):
    """Other tokens do not take places in the list, whatever their scores."""
    transform = ENOUGH_FOR_THE_WINDOW[name]
    for before, _, tokens, now, out in steps(transform):
        close(out, attended(transform, before, tokens, now, window=WINDOW))


@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.fast_cases("False")
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


def test_offloaded_lists_are_the_same():
    chained = kvjax.chain(CLUSTERS, kvjax.Offload())
    for one, other in zip(steps(CLUSTERS), steps(chained), strict=True):
        close(one[-1], other[-1], "exact")
