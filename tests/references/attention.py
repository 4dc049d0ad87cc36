"""Attention of one group of query heads over one KV head."""

from __future__ import annotations

import numpy as np


def softmax_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    query_positions: np.ndarray,
    key_positions: np.ndarray,
    log_mass: np.ndarray | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax attention with weighted keys.

        x[t, s] = scale * q[t] . k[s]          (scale: D**-0.5 by default)
        x       = soft_cap * tanh(x / soft_cap)            where a soft cap is given
        p[t, s] = m[s] * exp(x[t, s]) / (e + sum_s' m[s'] * exp(x[t, s']))    with m = exp(log_mass)
        out[t]  = sum_s p[t, s] * v[s]

    e is 0, or exp(sinks[g]) for the query heads g of the group: a column without a key or a value.

    Key s is visible to query t iff 0 <= key_position <= query_position, log_mass > -inf and, with
    a sliding window, key_position > query_position - window.  A query that sees nothing (padding,
    whose position is -1, for one) gets zeros.

    q: [G, T, D]; k: [S, D]; v: [S, Dv]; query_positions: [T]; key_positions, log_mass: [S];
    sinks: [G].
    Returns out [G, T, Dv] and the probabilities [G, T, S].
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    rows = np.asarray(query_positions)[:, None]
    columns = np.asarray(key_positions)[None, :]
    bias = np.zeros(len(k)) if log_mass is None else np.asarray(log_mass, np.float64)
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    visible = (columns >= 0) & (columns <= rows) & (bias > -np.inf)[None, :]
    if window is not None:
        visible &= columns > rows - window

    logits = scale * np.einsum("gtd,sd->gts", q, k)
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    logits = np.where(visible, logits + np.where(bias > -np.inf, bias, 0.0), -np.inf)

    column = np.full((len(q), 1, 1), -np.inf)
    if sinks is not None:
        column = np.asarray(sinks, np.float64)[:, None, None]
    highest = np.maximum(np.max(logits, axis=-1, keepdims=True, initial=-np.inf), column)
    highest = np.where(np.isfinite(highest), highest, 0.0)
    weights = np.exp(logits - highest)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(column - highest)
    probabilities = weights / np.where(total > 0, total, 1.0)
    return np.einsum("gts,sd->gtd", probabilities, v), probabilities
