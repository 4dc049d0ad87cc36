"""Sums of what goes into the same place."""

from __future__ import annotations

import numpy as np


def segment_sum(rows: np.ndarray, into: np.ndarray, places: int) -> np.ndarray:
    """out[p] = sum of the rows[n] with into[n] == p; numbers from `places` on go nowhere.

    rows: [N, ...]; into: [N].  Returns [places, ...].
    """
    out = np.zeros((places, *rows.shape[1:]), np.float64)
    for n, place in enumerate(into):
        if place < places:
            out[place] += rows[n]
    return out
