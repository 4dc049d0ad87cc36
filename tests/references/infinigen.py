"""InfiniGen (OSDI 2024): a few channels of skewed queries and keys say which tokens matter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .clusterkv import Recalling
from .slots import best, reduce_group


def skew(queries: np.ndarray) -> np.ndarray:
    """A [D, D]: right singular vectors of queries [M, D], as columns, by descending singular value.

    A column's sign is free.
    """
    rows = queries.astype(np.float64)
    # all D of them, also of fewer rows than channels
    return np.linalg.svd(rows, full_matrices=len(rows) < rows.shape[1])[2].T


def partial_channels(
    queries: np.ndarray, keys: np.ndarray, a: np.ndarray, share: float = 0.2
) -> list[int]:
    """Columns of `a` to keep, ascending: the union of the best n of sum |q A| and of sum |k A|.

    n = max(1, int(share * D)), ties to the lower channel.  queries [M1, D], keys [M2, D].
    """
    n = max(1, int(share * len(a)))
    strengths = [np.abs(np.asarray(x, np.float64) @ a).sum(axis=0) for x in (queries, keys)]
    return sorted(set(best(strengths[0], n)) | set(best(strengths[1], n)))


def partial_projections(
    queries: Sequence[np.ndarray], keys: Sequence[np.ndarray], share: float = 0.2
) -> np.ndarray:
    """P [layers, H, D, r] of a sample's rotated queries [Q, T, D] and keys [H, T, D] per layer.

    r is the largest number of channels of any layer and head; others have zero columns at the end.
    """
    layers = [
        [
            _partial_projection(group.reshape(-1, group.shape[-1]), key, share)
            for group, key in zip(q.reshape(len(k), -1, *q.shape[1:]), k, strict=True)
        ]
        for q, k in zip(queries, keys, strict=True)
    ]
    width = max(p.shape[1] for heads in layers for p in heads)
    return np.array(
        [[np.pad(p, [(0, 0), (0, width - p.shape[1])]) for p in heads] for heads in layers]
    )


def _partial_projection(queries: np.ndarray, keys: np.ndarray, share: float) -> np.ndarray:
    a = skew(queries)
    return a[:, partial_channels(queries, keys, a, share)]


def token_count(scores: list[np.ndarray], budget: int | float, alpha: float | None) -> int:
    """How many earlier tokens every head of a row takes; `scores` [S] of each deciding head.

        min(int(mean over heads of #{s: score[s] >= max score - alpha}), limit), at least 1

    limit is the int budget, or max(1, int(f n)) with n the most tokens of any head.  Without alpha
    it is the limit itself.
    """
    longest = max(len(row) for row in scores)
    limit = budget if isinstance(budget, int) else max(1, int(budget * longest))
    if alpha is None:
        return limit
    near = sum(int(np.sum(row >= row.max() - alpha)) for row in scores if len(row))
    return max(1, min(near // len(scores), limit))


class InfiniGen(Recalling):
    """The `token_count` best of the earlier tokens, and the step's own token on top.

        score[s] = 1/G sum_g (q[g] P) . (k[s] P) / sqrt(D)          or of each query head for itself

    projections: P of this layer, [H, D, r].  Equal scores go to the lower position.  With a sliding
    window, the earlier tokens are those inside it.
    """

    def __init__(
        self,
        projections: np.ndarray,
        budget: int | float = 0.2,
        alpha: float | None = None,
        per_query_head: bool = False,
        **options: float | None,
    ) -> None:
        super().__init__(per_query_head, **options)
        self.projections = np.asarray(projections, np.float64)
        self.budget, self.alpha = budget, alpha
        self.predicting_query: np.ndarray | None = None

    def decode(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        position: int,
        predicting_query: np.ndarray | None = None,
    ) -> tuple[np.ndarray, list[list[int]]]:
        """As `Recalling.decode`; `predicting_query` [Q, D] selects in the place of q."""
        self.predicting_query = predicting_query
        return super().decode(q, k, v, position)

    def select(self, q: np.ndarray) -> list[list[int]]:
        """Earlier positions ascending, then the new one."""
        query = q if self.predicting_query is None else self.predicting_query
        deciding = []
        for head, (slots, group) in enumerate(zip(self.heads, self.by_group(query), strict=True)):
            seen = slots.positions >= self.first
            for row in self._scores(head, slots.keys[seen][:-1], group):
                deciding.append((slots.positions[seen].tolist(), row))
        count = token_count([row for _, row in deciding], self.budget, self.alpha)
        return [
            [*(positions[i] for i in best(row, count)), positions[-1]]
            for positions, row in deciding
        ]

    def _scores(self, head: int, keys: np.ndarray, group: np.ndarray) -> np.ndarray:
        """[1, S], or per query head [G, S]."""
        p = self.projections[head]
        scores = (group @ p) @ (keys @ p).T / np.sqrt(group.shape[-1])
        return scores if self.per_query_head else reduce_group(scores, "mean")[None]
