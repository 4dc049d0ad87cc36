"""Masses and values of kept tokens for one KV head (Attention Matching, arXiv 2602.16284)."""

from __future__ import annotations

import numpy as np
from scipy.optimize import nnls


def logits(q: np.ndarray, k: np.ndarray, scale: float, soft_cap: float | None = None) -> np.ndarray:
    """x[n, s] = scale * q[n] . k[s], and soft_cap * tanh(x / soft_cap) where a cap is given."""
    x = scale * np.asarray(q, np.float64) @ np.asarray(k, np.float64).T
    return x if soft_cap is None else soft_cap * np.tanh(x / soft_cap)


def mass_error(
    x: np.ndarray,
    lse: np.ndarray,
    mass: np.ndarray,
    lookups: float,
    fitted: np.ndarray | None = None,
) -> float:
    """Square root of || A B - 1 ||^2 + c || B - 1 ||^2 with A[n, s] = exp(x[n, s] - lse[n]).

    c is `lookups` times the number of queries.  The second term has the slots that are fitted.
    """
    fitted = np.ones(x.shape[1], bool) if fitted is None else fitted
    off = np.exp(x - lse[:, None]) @ mass - 1
    others = lookups * len(x) * np.square(mass[fitted] - 1).sum()
    return float(np.sqrt(np.square(off).sum() + others))


def masses(
    x: np.ndarray,
    lse: np.ndarray,
    lowest: float,
    highest: float,
    lookups: float,
    fitted: np.ndarray | None = None,
) -> np.ndarray:
    """argmin_{B >= 0} || A B - 1 ||^2 + c || B - 1 ||^2, and then between two masses.

    Slots that are not fitted have a mass of 1.  c is `lookups` times the number of queries; rows
    sqrt(c) I under A are the second term.
    """
    fitted = np.ones(x.shape[1], bool) if fitted is None else fitted
    ratio, found = np.exp(x - lse[:, None]), np.ones(x.shape[1])
    root, number = np.sqrt(lookups * len(x)), fitted.sum()
    rows = np.concatenate([ratio[:, fitted], root * np.eye(number)])
    wanted = np.concatenate([1 - ratio[:, ~fitted].sum(1), np.full(number, root)])
    least, _ = nnls(rows, wanted, maxiter=100 * x.shape[1])
    found[fitted] = np.clip(least, lowest, highest)
    return found


def weights(x: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """X[n, s] = B[s] exp(x[n, s]) / sum_r B[r] exp(x[n, r])."""
    shares = mass * np.exp(x - x.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def values(
    x: np.ndarray,
    mass: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lookups: float,
    fitted: np.ndarray | None = None,
) -> np.ndarray:
    """V + argmin_dV || X (V + dV) - Y ||^2 + c || dV ||^2.

    dV is 0 for slots that are not fitted.  c is `lookups` times the number of queries; rows
    sqrt(c) I under X, and zeros under Y, are the second term.
    """
    fitted = np.ones(len(v), bool) if fitted is None else fitted
    share = weights(x, mass)
    error, share, number = out - share @ v, share[:, fitted], fitted.sum()
    rows = np.concatenate([share, np.sqrt(lookups * len(x)) * np.eye(number)])
    wanted = np.concatenate([error, np.zeros((number, v.shape[1]))])
    new = v.copy()
    new[fitted] += np.linalg.lstsq(rows, wanted, rcond=None)[0]
    return new


def choice_error(
    x: np.ndarray, lse: np.ndarray, mass: np.ndarray, v: np.ndarray, out: np.ndarray, w: float
) -> float:
    """sum_n || X V - Y ||^2 + w tanh((log sum_s B[s] exp(x[n, s]) - lse[n]) / 2)^2.

    tanh(d / 2) = (r - 1) / (r + 1) with r = exp(d), the sum over the slots divided by exp(lse).
    """
    ratio = np.exp(x - lse[:, None]) @ mass
    off = (ratio - 1) / (ratio + 1)
    return float(np.square(weights(x, mass) @ v - out).sum() + w * np.square(off).sum())
