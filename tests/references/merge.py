"""Merging slots into one another."""

from __future__ import annotations

import numpy as np


def merge(
    keys: np.ndarray,
    values: np.ndarray,
    log_mass: np.ndarray,
    positions: np.ndarray,
    into: np.ndarray,
    weights: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Every slot i is merged into slot into[i]; a slot with into[i] == i takes in the others.

    With M the live members of a target t (itself among them) and w the weights, which default to
    the masses m = exp(log_mass):

        k[t] = sum_M w k / sum_M w        v[t] = sum_M w v / sum_M w
        log_mass[t] = log(sum_M m)        the position stays the target's

    The merged-away slots become free: log_mass -inf, position -1, zeros.  Free slots stay free.
    keys, values: [S, D]; log_mass, positions, into, weights: [S].
    Returns keys, values, log_mass, positions in the same slots.
    """
    keys, values = np.asarray(keys, np.float64), np.asarray(values, np.float64)
    log_mass, into = np.asarray(log_mass, np.float64), np.asarray(into)
    mass = np.exp(log_mass)
    weights = mass if weights is None else np.asarray(weights, np.float64)
    if np.any(into[into] != into):
        raise ValueError("a target of a merge must not itself be merged into another slot")

    new_keys, new_values = np.zeros_like(keys), np.zeros_like(values)
    new_log_mass, new_positions = np.full_like(log_mass, -np.inf), np.full(len(keys), -1)
    for target in range(len(keys)):
        members = [i for i in range(len(keys)) if into[i] == target and mass[i] > 0]
        if not members:
            continue
        w = weights[members] / weights[members].sum()
        new_keys[target] = w @ keys[members]
        new_values[target] = w @ values[members]
        new_log_mass[target] = np.log(mass[members].sum())
        new_positions[target] = positions[target]
    return new_keys, new_values, new_log_mass, new_positions
