"""Ranking clusters by a query, and listing the slots of the best."""

from __future__ import annotations

import numpy as np


def rank_clusters(
    q: np.ndarray, centroids: np.ndarray, sizes: list[int], reduce: str = "max"
) -> list[int]:
    """q [G, D] of one KV head and centroids [C, D] -> clusters by q . mu, descending.

    Of G scores the largest counts, or their mean. Ties go to the lower cluster; empty clusters come
    last.
    """
    join = {"max": max, "mean": np.mean}[reduce]
    score = [float(join([query @ centroid for query in q])) for centroid in centroids]
    return sorted(range(len(score)), key=lambda c: (sizes[c] == 0, -score[c] * (sizes[c] > 0), c))


def build_indices(
    order: list[int], sizes: list[int], starts: list[int], count: int, length: int
) -> list[int]:
    """The first `count` slots of the clusters as ordered, padded with -1 to `length`."""
    slots = [starts[c] + i for c in order for i in range(sizes[c])]
    listed = slots[: min(count, length)]
    return listed + [-1] * (length - len(listed))
