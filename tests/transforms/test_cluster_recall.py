"""The slots that ClusterKV recalls, by ranking all clusters or some of them first."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.transforms.clusterkv.clusters import Clusters
from kvjax.transforms.clusterkv.recalled import Ranking, recalled_slots
from tests.references import cluster_selection as reference

ROWS, HEADS, GROUP, DIM, CLUSTERS, BUDGETS = 3, 2, 3, 8, 40, (20, 60, 7)


def some_clusters(rng) -> Clusters:
    """Whole numbers, so that scores are exact; a row with few clusters, a head with none."""
    sizes = rng.integers(1, 7, (ROWS, HEADS, CLUSTERS)).astype(np.int32)
    sizes[1, :, 5:] = 0
    sizes[2, 0] = 0
    sinks = rng.integers(0, 5, (ROWS, HEADS)).astype(np.int32)
    starts = sinks[..., None] + sizes.cumsum(-1) - sizes
    centroids = rng.integers(-3, 4, (ROWS, HEADS, CLUSTERS, DIM)).astype(np.float32)
    per_row = np.array(BUDGETS, np.int32), np.full(ROWS, 4, np.int32)
    arrays = centroids, sizes, starts.astype(np.int32), (sizes > 0).sum(-1, dtype=np.int32)
    return Clusters(*map(jnp.asarray, (*arrays, sinks, *per_row)))


def expected_slots(query, clusters: Clusters, row: int, head: int, length: int) -> list[int]:
    """Of a KV head, by the reference: the sinks, then the clusters as ranked."""
    sizes, starts = clusters.sizes[row, head].tolist(), clusters.starts[row, head].tolist()
    centroids = np.asarray(clusters.centroids[row, head], np.float64)
    order = reference.rank_clusters(np.asarray(query, np.float64), centroids, sizes)
    order = [0, *(cluster + 1 for cluster in order)]
    sizes, starts = [int(clusters.sinks[row, head]), *sizes], [0, *starts]
    return reference.build_indices(order, sizes, starts, BUDGETS[row], length)


@pytest.mark.parametrize("likely", [1, 3, 16, CLUSTERS])
@pytest.mark.parametrize("per_query_head", [False, True])
def test_slots_are_those_of_a_whole_ranking(likely, per_query_head):
    """Whether the first clusters fill the lists, as with 16 of them, or do not."""
    rng = np.random.default_rng(0)
    clusters = some_clusters(rng)
    query = rng.integers(-3, 4, (ROWS, HEADS, GROUP, DIM)).astype(np.float32)
    call = jax.jit(recalled_slots, static_argnums=(2, 3, 4))
    got = np.asarray(call(query, clusters, 64, likely, Ranking(per_query_head, "max")))
    assert got.shape == (ROWS, HEADS * (GROUP if per_query_head else 1), 64)
    lists = got.reshape(ROWS, HEADS, -1, 64)
    for row, head, choice in np.ndindex(lists.shape[:3]):
        own = query[row, head, choice : choice + 1] if per_query_head else query[row, head]
        expected = expected_slots(own, clusters, row, head, 64)
        assert lists[row, head, choice].tolist() == expected
