"""How a budget is shared among the heads of a model, from the scores of some texts."""

from __future__ import annotations

import math

import numpy as np


def shares(
    scores: list[np.ndarray],
    budget: float,
    steps: int = 64,
    smallest: float = 1e-3,
    safeguard: float = 0.2,
) -> np.ndarray:
    """Share of its tokens that each head keeps, `[N, H]`, of scores `[N, H, S]` of each text.

    It is `safeguard · budget + (1 - safeguard) · p[h]`, with p[h] as follows.

    The thresholds t[0] >= t[1] >= ... are the scores that have the ranks c[k] · (all scores), from
    the highest down, with c growing evenly in its logarithm from `smallest` to 1; the last one is
    -inf. At a threshold, head h keeps `a[h, k]`, the share of its scores above t[k], averaged over
    the texts. The budget lies between the means A[k - 1] and A[k] of all heads, of which A[-1] = 0
    is that of no token at all. Then p[h] is

        a[h, k - 1] + (budget - A[k - 1]) / (A[k] - A[k - 1]) · (a[h, k] - a[h, k - 1]).
    """
    ranked = sorted((float(s) for text in scores for s in text.ravel()), reverse=True)
    levels = [smallest ** (1 - k / (steps - 1)) for k in range(steps - 1)]
    thresholds = [ranked[math.floor(level * len(ranked) + 1e-9)] for level in levels] + [-math.inf]
    layers, heads, _ = scores[0].shape
    below, mean_below = np.zeros((layers, heads)), 0.0
    for threshold in thresholds:
        above = np.zeros((layers, heads))
        for text in scores:
            for n, h in np.ndindex(layers, heads):
                count = sum(float(s) > threshold for s in text[n, h])
                above[n, h] += count / text.shape[2] / len(scores)
        mean = above.mean()
        if mean >= budget:
            shares_of_profile = below + (budget - mean_below) / (mean - mean_below) * (
                above - below
            )
            return safeguard * budget + (1 - safeguard) * shares_of_profile
        below, mean_below = above, mean
    raise AssertionError("all scores are above -inf")
