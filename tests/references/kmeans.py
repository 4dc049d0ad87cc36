"""k-means over the keys of one KV head: Lloyd's algorithm under three similarities."""

from __future__ import annotations

import numpy as np


def similarity(key: np.ndarray, centroid: np.ndarray, metric: str) -> float:
    """k . mu / (|k| |mu|), 0 where either is zero; -|k - mu|^2; or k . mu."""
    if metric == "l2":
        return -float(((key - centroid) ** 2).sum())
    dot = float(key @ centroid)
    if metric == "inner_product":
        return dot
    lengths = np.linalg.norm(key) * np.linalg.norm(centroid)
    return float(dot / lengths) if lengths else 0.0


def assign(keys: np.ndarray, centroids: np.ndarray, metric: str) -> tuple[list[int], float]:
    """The most similar centroid of every key, the lower of equals.

    Also the least gap between a key's best similarity and a worse one (those that differ by less
    than 1e-12 are equal): whether rounding could have chosen another.
    """
    labels, margin = [], np.inf
    for key in keys:
        similar = np.array([similarity(key, centroid, metric) for centroid in centroids])
        equal = similar >= similar.max() - 1e-12
        labels.append(int(np.flatnonzero(equal)[0]))
        margin = min([margin, *(similar.max() - similar[~equal])])
    return labels, float(margin)


def kmeans(
    keys: np.ndarray, centroids: np.ndarray, metric: str = "cosine", rounds: int = 20
) -> tuple[list[int], np.ndarray, float]:
    """keys [N, D] and initial centroids [C, D] -> labels, final centroids, margin.

    A round assigns every key and moves every centroid to the mean of its keys; an empty cluster
    keeps its own. It ends after `rounds` of them, or when no label changes. The labels are those of
    one more assignment. The margin is the least of all assignments.
    """
    centroids = np.array(centroids, np.float64)
    before, margin = None, np.inf
    for _ in range(rounds):
        labels, gap = assign(keys, centroids, metric)
        margin = min(margin, gap)
        if labels == before:
            break
        for c in set(labels):
            centroids[c] = keys[[i for i, label in enumerate(labels) if label == c]].mean(0)
        before = labels
    labels, gap = assign(keys, centroids, metric)
    return labels, centroids, min(margin, gap)
