"""KVCrush (arXiv 2503.00022): representatives of the tokens that a method evicts.

One row with all its heads, from what the method has decided: the paper's steps, one function each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .packed_bits import hamming
from .slots import best, reduce_group


class Head(NamedTuple):
    """What the base has decided for one KV head.

    positions [N]: of the tokens before it evicted.  scores [G, N]; accumulated attention where it
    has none.  always [N]: which tokens it keeps whatever these scores.  kept: positions that it
    keeps.
    """

    positions: list[int]
    scores: np.ndarray
    always: np.ndarray
    kept: list[int]


class Crushed(NamedTuple):
    """Bits [unit * Q] and distance of every unit, the anchor, and for each head what is kept.

    kept, representatives: positions per KV head.
    """

    bits: dict[int, np.ndarray]
    anchor: np.ndarray
    distance: dict[int, int]
    kept: list[list[int]]
    representatives: list[list[int]]


def crush(
    heads: list[Head],
    count: int,
    kind: str | np.ndarray = "mean",
    uniform: Callable[[int, int], float] | None = None,
    unit: int = 1,
    reduce: str | None = None,
) -> Crushed:
    """One row.  count: R in tokens.  kind: the anchor, or its bits.

    uniform: (KV head, unit) -> [0, 1); None picks the middle.  reduce: how the base's scores of a
    group become one; None: it has none, and evicts single tokens.
    """
    group = len(heads[0].scores)
    bits: dict[int, np.ndarray] = {}
    for h, head in enumerate(heads):
        own = head_bits(head.scores, head.always, len(head.kept))
        for position, token in zip(head.positions, own.T, strict=True):
            vector = bits.setdefault(position, np.zeros(group * len(heads), bool))
            vector[h * group : (h + 1) * group] = token
    joined = join(bits, unit)
    point = anchor(kind, joined)
    distance = {u: int(hamming(vector, point)) for u, vector in joined.items()}
    all_kept, chosen = [], []
    for h, head in enumerate(heads):
        whole = unit > 1 and reduce is not None and len(head.kept) < len(head.positions)
        kept = whole_units(head, unit, reduce) if whole else sorted(head.kept)
        evicted = [p for p in head.positions if p not in kept]
        units = {p // unit: distance[p // unit] for p in evicted}
        draw = None if uniform is None else (lambda u, h=h: uniform(h, u))
        picked = {pick(bucket, draw) for bucket in buckets(units, count // unit)}
        all_kept.append(kept)
        chosen.append(sorted(p for p in evicted if p // unit in picked))
    return Crushed(joined, point, distance, all_kept, chosen)


def whole_units(head: Head, unit: int, reduce: str) -> list[int]:
    """Instead of single tokens the base keeps what it always keeps, and whole units of the rest.

    The best floor(m / unit) units by the sum of their tokens' scores, m being how many of the rest
    it kept.
    """
    rest = {p: i for i, p in enumerate(head.positions) if not head.always[i]}
    units = sorted({p // unit for p in rest})
    members = {u: [i for p, i in rest.items() if p // unit == u] for u in units}
    total = np.array([head.scores[:, members[u]].sum(axis=1) for u in units]).T
    room = (len(head.kept) - int(head.always.sum())) // unit
    chosen = {units[i] for i in best(reduce_group(total, reduce), room)}
    return sorted(
        p
        for p, always in zip(head.positions, head.always, strict=True)
        if always or p // unit in chosen
    )


def head_bits(scores: np.ndarray, always: np.ndarray, count: int) -> np.ndarray:
    """[G, N] scores of N tokens by position, [N] -> bits [G, N].

    bit[g, s] = 1 iff query head g alone would retain s: `count` tokens, the ones that are always
    kept and then the others with its highest scores (ties to the lower position).
    """
    bits = np.broadcast_to(always, scores.shape).copy()
    others = np.flatnonzero(~always)
    for own, score in zip(bits, scores, strict=True):
        own[others[best(score[others], count - int(always.sum()))]] = True
    return bits


def join(bits: dict[int, np.ndarray], unit: int) -> dict[int, np.ndarray]:
    """Bits [Q] by position -> bits [unit * Q] by unit: the tokens' own one after the other.

    Unit u has the positions unit * u ... unit * (u + 1) - 1; a token that is not there has zeros.
    """
    none = np.zeros_like(next(iter(bits.values())))
    numbers = sorted({position // unit for position in bits})
    return {
        u: np.concatenate([bits.get(unit * u + offset, none) for offset in range(unit)])
        for u in numbers
    }


def anchor(kind: str | np.ndarray, joined: dict[int, np.ndarray]) -> np.ndarray:
    """[unit * Q].  An array is the anchor itself (the random one)."""
    if not isinstance(kind, str):
        return kind
    vectors = np.array(list(joined.values()))
    count = vectors.sum(axis=0)
    if kind == "mean":
        return count > len(vectors) / 2
    if kind == "median":
        return count > np.sort(count)[(len(count) - 1) // 2]
    return np.arange(vectors.shape[1]) % 2 == 1  # 0101...


def buckets(distance: dict[int, int], count: int) -> list[list[int]]:
    """Evicted units, ordered by distance and then by position, in `count` buckets.

    Bucket i has the ranks floor(i n / R) ... floor((i + 1) n / R) - 1; fewer than R units are a
    bucket each.
    """
    order = sorted(distance, key=lambda unit: (distance[unit], unit))
    n, r = len(order), min(count, len(order))
    return [order[i * n // r : (i + 1) * n // r] for i in range(r)]


def pick(bucket: list[int], uniform: Callable[[int], float] | None) -> int:
    """The lower median, or the unit at floor(u * size), u drawn for the bucket's first unit."""
    if uniform is None:
        return bucket[(len(bucket) - 1) // 2]
    return bucket[min(int(uniform(bucket[0]) * len(bucket)), len(bucket) - 1)]


def kmeans(keys: np.ndarray, count: int, rounds: int = 20) -> list[int]:
    """Indices of the tokens of keys [N, D], by position, that are nearest to `count` centroids.

    Lloyd's algorithm from the lower medians of `count` equal runs; ties to the lower cluster and
    the lower position; an empty cluster keeps its centroid, and the tokens farthest from their own
    centroid take the places that empty clusters leave.
    """
    n, r = len(keys), min(count, len(keys))
    if r == 0:
        return []
    runs = [range(i * n // r, (i + 1) * n // r) for i in range(r)]
    centroids = np.array([keys[run[(len(run) - 1) // 2]] for run in runs])
    for _ in range(rounds):
        label = ((keys[:, None] - centroids) ** 2).sum(-1).argmin(1)
        for i in range(r):
            if (label == i).any():
                centroids[i] = keys[label == i].mean(0)
    label = ((keys[:, None] - centroids) ** 2).sum(-1).argmin(1)
    apart = ((keys - centroids[label]) ** 2).sum(-1)
    chosen = []
    for i in range(r):
        members = np.flatnonzero(label == i)
        if len(members):
            chosen.append(int(members[apart[members] <= apart[members].min() * (1 + 1e-4)][0]))
    others = [i for i in np.argsort(-apart, kind="stable").tolist() if i not in chosen]
    return sorted(chosen + others[: r - len(chosen)])
