"""Largest probability that each key receives, from the full matrix (KVzip, arXiv 2505.23416)."""

from __future__ import annotations

import numpy as np


def column_maxima(
    q: np.ndarray,
    k: np.ndarray,
    lse: np.ndarray,
    query_positions: np.ndarray,
    key_positions: np.ndarray,
    log_mass: np.ndarray | None = None,
    scale: float = 1.0,
    window: int | None = None,
    soft_cap: float | None = None,
) -> np.ndarray:
    """What each key received at most: max_t exp(x[t, s] + log_mass[s] - lse[t]).

    x is the scaled and capped product, and t goes over the queries that see key s:
    0 <= key_position <= query_position, log_mass > -inf and, with a window, key_position >
    query_position - window.  A key that no query sees has 0.

    q: [G, T, D]; k: [S, D]; lse: [G, T]; query_positions: [T]; key_positions, log_mass: [S].
    Returns [G, S].
    """
    q, k, lse = (np.asarray(x, np.float64) for x in (q, k, lse))
    mass = np.zeros(len(k)) if log_mass is None else np.asarray(log_mass, np.float64)
    maxima = np.zeros((len(q), len(k)))
    for g, t, s in np.ndindex(*q.shape[:2], len(k)):
        at, place = query_positions[t], key_positions[s]
        if not 0 <= place <= at or mass[s] == -np.inf:
            continue
        if window is not None and place <= at - window:
            continue
        logit = scale * (q[g, t] @ k[s])
        if soft_cap is not None:
            logit = soft_cap * np.tanh(logit / soft_cap)
        maxima[g, s] = max(maxima[g, s], np.exp(logit + mass[s] - lse[g, t]))
    return maxima
