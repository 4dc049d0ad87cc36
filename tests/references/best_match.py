"""The best partner of each row of one array among rows of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

EQUAL = 1e-12  # similarities that differ by less are equal


def best_match(
    a: np.ndarray,
    b: np.ndarray,
    chunks: Sequence[tuple[Sequence[int], Sequence[int]]],
    similarity: Callable[[np.ndarray, np.ndarray], float],
) -> tuple[np.ndarray, np.ndarray, float]:
    """a [M, D] and b [N, D] -> best similarity [M], its row of b [M], margin.

    Each chunk names rows of a and the rows of b that they may choose among. The lowest row of
    equals wins. Rows of a that no chunk names, or whose chunk has no row of b, have -inf and row 0.
    The margin is the least gap between a best similarity and a worse one.
    """
    best, match, margin = np.full(len(a), -np.inf), np.zeros(len(a), int), np.inf
    for rows, others in chunks:
        for row in rows:
            found = [(similarity(a[row], b[other]), -other) for other in others]
            if not found:
                continue
            best[row] = max(found)[0]
            equal = [-other for value, other in found if value > best[row] - EQUAL]
            match[row] = min(equal)
            worse = [best[row] - value for value, _ in found if value <= best[row] - EQUAL]
            margin = min([margin, *worse])
    return best, match, margin
