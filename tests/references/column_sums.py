"""Column sums of the causal softmax, from the full matrix (H2O's score, arXiv 2306.14048)."""

from __future__ import annotations

import numpy as np

from .attention import softmax_attention


def column_sums(
    q: np.ndarray,
    k: np.ndarray,
    query_positions: np.ndarray,
    key_positions: np.ndarray,
    log_mass: np.ndarray | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> np.ndarray:
    """What each key received in total: sum_t p[g, t, s].

    Arguments as in `softmax_attention`, without values.  Returns [G, S].
    """
    _, probabilities = softmax_attention(
        q, k, k, query_positions, key_positions, log_mass, scale, window, soft_cap
    )
    return probabilities.sum(axis=1)
