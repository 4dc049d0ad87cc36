"""Upper bounds of a query's products with the keys of a page."""

from __future__ import annotations

import numpy as np


def page_scores(q: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """q [D] and bounds [P, D] -> sum_c max(q_c low_c, q_c high_c) for each page."""
    return np.array([np.maximum(q * a, q * b).sum() for a, b in zip(low, high, strict=True)])
