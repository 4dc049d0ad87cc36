"""Selection of the slots of the clusters with the highest scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.transforms.clusterkv.clusters import Clusters
from pallas_kernels import build_indices, rank_clusters
from pallas_kernels.base.dispatch import on_one_cpu
from pallas_kernels.base.rows import take_slots

GroupReduce = Literal["max", "mean"]
# Name of the function that holds the condition, by which checks of compiled steps know it.
RANK_AGAIN = "rank_again"


class Ranking(NamedTuple):
    """Options of `pallas_kernels.rank_clusters`."""

    per_query_head: bool
    group_reduce: GroupReduce
    implementation: str | None = None


def recalled_slots(
    query: Float[Array, "B H G D"], clusters: Clusters, length: int, likely: int, ranking: Ranking
) -> Int[Array, "B K N"]:
    """Lists the sinks and the slots of the clusters with the highest `q · μ`, up to the budget.

    On a CPU, ranking and listing all clusters takes about as long as reading the slots of the best
    ones. Therefore only the `likely` best are ranked and listed there; all of them are in a step in
    which these have fewer slots than the budget. The result is the same.

    Args:
      query: rotated queries, grouped under their KV head.
      clusters: index of each KV head, with the row's budget.
      length: N, slots of a list (static); shorter lists end with -1.
      likely: number of clusters that fill a list in most steps (static).
      ranking: makes a list for each KV head, K = H, or for each query head.
    """
    num_clusters = clusters.sizes.shape[2]

    def ranked(most: int) -> Int[Array, "B K M"]:
        return rank_clusters(
            query, clusters.centroids, clusters.sizes, most=most, **ranking._asdict()
        )

    def listed(order: Int[Array, "B K M"]) -> Int[Array, "B K N"]:
        sinks_first = jnp.pad(order + 1, ((0, 0), (0, 0), (1, 0)))
        return build_indices(
            sinks_first, *clusters.with_sinks(), clusters.budget[:, None], length=length,
            implementation=ranking.implementation,
        )  # fmt: skip

    def of_all() -> Int[Array, "B K N"]:
        return listed(ranked(num_clusters))

    if likely >= num_clusters or not on_one_cpu(ranking.implementation, clusters.centroids):
        return of_all()
    return _of_best_if_enough(ranked(likely), listed, of_all, clusters)


def _of_best_if_enough(
    best: Int[Array, "B K L"],
    listed: Callable[[Int[Array, "B K L"]], Int[Array, "B K N"]],
    of_all: Callable[[], Int[Array, "B K N"]],
    clusters: Clusters,
) -> Int[Array, "B K N"]:
    """Lists the best clusters, or all of them if the best have fewer slots than the budget."""
    sizes = take_slots(clusters.sizes, best)
    wanted = clusters.budget[:, None] - clusters.sinks
    wanted = jnp.repeat(wanted, best.shape[1] // wanted.shape[1], axis=1)
    # Empty clusters are ranked last: if the last of the best is empty, no other has slots.
    full = (sizes.sum(-1, dtype=jnp.int32) >= wanted) | (sizes[..., -1] == 0)

    def rank_again() -> Int[Array, "B K N"]:
        return jax.lax.cond(full.all(), lambda: listed(best), of_all)

    return jax.jit(rank_again)()
