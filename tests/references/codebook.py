"""SpindleKV's codebook (equations 8 to 15): many vectors point at the directions of few.

Plain loops over an N x N matrix of cosines, all in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


def directions(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[N, D] -> unit vectors [N, D] and Euclidean norms [N].  A zero vector has no direction: 0."""
    vectors = np.asarray(vectors, np.float64)
    norms = np.sqrt(np.sum(vectors**2, axis=-1))
    return vectors / np.where(norms > 0, norms, 1.0)[:, None], norms


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[N, D] and [M, D] -> [N, M], between -1 and 1; 0 where either is zero.

    Clipped, since the cosine of a vector with itself may come out above 1: nothing is > theta = 1.
    """
    a, b = directions(a)[0], directions(b)[0]
    # not a matrix product, whose sums of equal columns need not be equal
    products = [np.sum(b * row, axis=-1) for row in a]
    return np.clip(np.reshape(products, (len(a), len(b))), -1.0, 1.0)


@dataclass
class Cover:
    """Which vertices became entries (in the order of the entries), and who points at which.

    centers: vertices.  index: [N], the entry of every vertex; 0 for a zero vector.  covered: [N],
    False where a vertex is more than theta away from its entry, and for zero vectors.
    """

    centers: list[int]
    index: np.ndarray
    covered: np.ndarray
    overflow: int


def greedy_cover(
    vectors: np.ndarray,
    theta: float,
    weights: np.ndarray | None = None,
    capacity: int | None = None,
) -> Cover:
    """Covers vectors [N, D] with as few of their directions as greed finds.

        G[a, b] = cos(a, b) > theta  or  a = b                               (equation 9)
        s[a] = sum of weights[b] over the uncovered b with G[a, b]           (equation 10)
        entry = the uncovered a with the largest s[a], the lowest on ties    (equation 11)
        all uncovered b with G[entry, b] point at it and are covered         (equations 12, 13)

    until nothing is left.  With `capacity` entries made, every vertex still uncovered points at the
    entry with the highest cosine, the lowest on ties, and is counted in `overflow` (once, whatever
    its weight).  Zero vectors are not vertices.
    """
    vectors = np.asarray(vectors, np.float64)
    count = len(vectors)
    weights = np.ones(count) if weights is None else np.asarray(weights, np.float64)
    cosine = cosines(vectors, vectors)
    adjacent = (cosine > theta) | np.eye(count, dtype=bool)
    uncovered = directions(vectors)[1] > 0
    index, centers = np.zeros(count, int), []

    covered = np.zeros(count, bool)
    while uncovered.any() and (capacity is None or len(centers) < capacity):
        gains = (adjacent & uncovered) @ weights
        center = int(np.argmax(np.where(uncovered, gains, -np.inf)))
        members = adjacent[center] & uncovered
        index[members] = len(centers)
        covered |= members
        uncovered &= ~members
        centers.append(center)

    left = np.flatnonzero(uncovered)
    if len(left):
        index[left] = np.argmax(cosine[left][:, centers], axis=1)
    return Cover(centers, index, covered, len(left))


class Codebook:
    """One book: its entries, and how many vectors found none near enough.

    theta: the threshold of cosines.  capacity: the most entries, None for any number.  magnitude:
    entries are unit vectors and a vector is read as entry * its norm; False: entries are the
    vectors that they came from, and are read as they are (the paper's "w/o. reconstruct").
    """

    def __init__(self, theta: float, capacity: int | None = None, magnitude: bool = True) -> None:
        self.theta, self.capacity, self.magnitude = theta, capacity, magnitude
        self.entries = np.zeros((0, 0))  # [E, D]
        self.overflow = 0

    def __len__(self) -> int:
        return len(self.entries)

    def encode(
        self, vectors: np.ndarray, weights: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """A new book for vectors [N, D] -> index [N], norms [N].  See `greedy_cover`."""
        cover = greedy_cover(vectors, self.theta, weights, self.capacity)
        unit, norms = directions(vectors)
        stored = unit if self.magnitude else np.asarray(vectors, np.float64)
        self.entries, self.overflow = stored[cover.centers], cover.overflow
        return cover.index, norms

    def grow(
        self, kept: np.ndarray, vectors: np.ndarray, weights: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A further prompt: entries `kept` [K] are referred to still, vectors [N, D] are new.

        Other entries are given up.  A vector takes the kept entry with the highest cosine if that
        is > theta; the rest is covered by entries behind those, as far as there is room.  What then
        has none points at the nearest and is overflow.

        -> what `kept` has become [K], index [N], norms [N].
        """
        used = np.unique(kept)
        self.entries = self.entries[used] if len(self) else np.zeros((0, vectors.shape[1]))
        unit, norms = directions(vectors)
        stored = unit if self.magnitude else np.asarray(vectors, np.float64)
        cosine = cosines(unit, self.entries)
        index = np.argmax(cosine, axis=1) if len(used) else np.zeros(len(unit), int)
        rest = np.flatnonzero(~(cosine > self.theta).any(1))
        cover = greedy_cover(vectors[rest], self.theta, weights[rest], self.capacity)
        room = len(rest) if self.capacity is None else self.capacity - len(used)
        centers = cover.centers[:room]
        self.entries = np.concatenate([self.entries, stored[rest][centers]])
        index[rest] = len(used) + cover.index
        far = rest[~cover.covered | (cover.index >= len(centers))]
        if len(far):
            index[far] = np.argmax(cosines(unit[far], self.entries), axis=1)
        self.overflow = len(far) + (self.overflow if len(used) else 0)
        return np.searchsorted(used, kept), index, norms

    def append(self, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One vector of [N, D] after another -> index [N], norms [N].

        A vector points at the entry with the highest cosine (the lowest on ties) if that is >
        theta.  Else it becomes an entry, or without room still points there and is overflow.
        """
        unit, norms = directions(vectors)
        stored = unit if self.magnitude else np.asarray(vectors, np.float64)
        if not len(self):
            self.entries = np.zeros((0, unit.shape[1]))
        pairs = zip(unit, stored, strict=True)
        return np.array([self._append_one(*pair) for pair in pairs], int), norms

    def _append_one(self, unit: np.ndarray, stored: np.ndarray) -> int:
        if not unit.any():
            return 0
        if len(self):
            cosine = cosines(unit[None], self.entries)[0]
            nearest = int(np.argmax(cosine))
            if cosine[nearest] > self.theta:
                return nearest
            if self.capacity is not None and len(self) >= self.capacity:
                self.overflow += 1
                return nearest
        self.entries = np.concatenate([self.entries, stored[None]])
        return len(self) - 1

    def read(self, index: np.ndarray, norms: np.ndarray) -> np.ndarray:
        """index, norms [N] -> [N, D]: C[index] * norm (equation 14), or C[index]."""
        if not len(self):  # every vector was zero
            return np.zeros((len(index), self.entries.shape[1]))
        read = self.entries[np.asarray(index)]
        return read * np.asarray(norms, np.float64)[:, None] if self.magnitude else read


def reserve_ratio(
    entries: int,
    kept: int,
    tokens: int,
    kv_heads: int,
    dim: int,
    *,
    vector_bytes: int = 4,
    index_bytes: int = 4,
    magnitude_bytes: int = 4,
) -> float:
    """Bytes of one layer's books, indices and magnitudes over those of its full cache.

        (entries * D * vector_bytes + 2 * kept * (index_bytes + magnitude_bytes))
        / (2 * tokens * H * D * vector_bytes)

    entries: of K's book and of V's together; their capacities where storage is meant.  kept: slots,
    each with one key and one value; with unfolded heads those of all query heads.  The full cache
    is not repeated: H are the KV heads in any case.  vector_bytes: of one number of a vector.
    magnitude_bytes: 0 without magnitudes.
    """
    stored = entries * dim * vector_bytes + 2 * kept * (index_bytes + magnitude_bytes)
    return stored / (2 * tokens * kv_heads * dim * vector_bytes)


def paper_ratios(
    entries: int,
    kept: int,
    tokens: int,
    heads: int,
    dim: int,
    *,
    int_bits: int = 32,
    key_bits: int = 32,
    printed: bool = False,
) -> tuple[float, float, float]:
    """r1, r2, r3 of equation 15; their product is the layer's ratio as the paper reports it.

        r1 = kept / (tokens * heads)         r2 = entries / (2 * kept)
        r3 = (D + int_bits / key_bits + 1) / D

    entries, kept: as in `reserve_ratio`.  heads: KV heads, or query heads where heads are unfolded
    ("h_g = h if a repeat operation is conducted"): the product is then over a repeated cache.
    `printed`: int_bits / (key_bits + 1), as the equation is set; the text counts an index and a
    magnitude for each vector, which is the other one.

    The product is entries / (2 * tokens * heads) * r3: it counts an index and a magnitude for
    every entry, and none for the kept vectors that share one.
    """
    extra = int_bits / (key_bits + 1) if printed else int_bits / key_bits + 1
    return kept / (tokens * heads), entries / (2 * kept), (dim + extra) / dim
