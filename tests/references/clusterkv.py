"""ClusterKV (arXiv 2412.03213): clusters of keys come back when a query asks for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .attention import softmax_attention
from .budgets import rows_budget
from .slots import Slots


class Recalling:
    """One row of H KV heads that keeps every token; decoding attends to a choice of them.

    A subclass chooses (`select`), and makes its index when a prompt is complete (`index`) and after
    every decode step (`update`).  The deciding heads are the KV heads, or with `per_query_head` the
    query heads.  Options are those of `softmax_attention`.
    """

    def __init__(self, per_query_head: bool = False, **options: Any) -> None:
        self.per_query_head = per_query_head
        self.options = options
        self.heads: list[Slots] = []
        self.prompt_length = 0  # 1 + the newest position when the last prompt was complete
        self.stale = True  # whether the index is not of all tokens of the prompt

    def index(self) -> None:
        """Called when a prompt is complete that brought tokens, and before the first step."""

    def update(self) -> None:
        """Called at the end of a decode step."""

    def select(self, q: np.ndarray) -> list[list[int]]:
        """q [Q, D] of the newest token -> the positions to attend to, for every deciding head."""
        raise NotImplementedError

    def prompt(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray, last: bool = True
    ) -> np.ndarray:
        """q [Q, T, D], k and v [H, T, D], positions [T] (-1 = padding) -> out [Q, T, D]."""
        self._append(k, v, positions)
        groups = zip(self.heads, self.by_group(q), strict=True)
        out = np.concatenate([slots.attend(group, positions)[0] for slots, group in groups])
        self.stale |= bool(np.any(np.asarray(positions) >= 0))
        if last and self.stale:
            self.prompt_length = max(slots.length for slots in self.heads)
            self.index()
            self.stale = False
        return out

    def decode(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int
    ) -> tuple[np.ndarray, list[list[int]]]:
        """q [Q, D], k and v [H, D] of one token -> out [Q, D], the selected positions."""
        self._append(k[:, None], v[:, None], [position])
        selected = self.select(q)
        out = self.attend_selected(q, position, selected)
        self.update()
        return out, selected

    @property
    def first(self) -> int:
        """The first position that the newest token's query sees; not below 0 without a window."""
        window = self.options.get("window")
        return 0 if window is None else max(slots.length for slots in self.heads) - window

    def by_group(self, x: np.ndarray) -> np.ndarray:
        """[Q, ...] -> [H, G, ...]."""
        return np.reshape(x, (len(self.heads), -1, *np.shape(x)[1:]))

    def attend_selected(
        self, q: np.ndarray, position: int, selected: list[list[int]]
    ) -> np.ndarray:
        """q [Q, D] over the selected tokens alone: the softmax is over the restriction."""
        out = []
        for i, (chosen, queries) in enumerate(
            zip(selected, np.split(q, len(selected)), strict=True)
        ):
            head = i * len(self.heads) // len(selected)
            out.append(self._restricted(queries, head, position, chosen))
        return np.concatenate(out)

    def _restricted(
        self, queries: np.ndarray, head: int, position: int, chosen: list[int]
    ) -> np.ndarray:
        """The queries [N, D] of one list, over its tokens of one KV head."""
        tokens = {token.position: token for token in self.heads[head].tokens}
        seen = [(t.key, t.value, t.position, t.log_mass) for p in chosen for t in [tokens[p]]]
        keys, values, positions, log_mass = zip(*seen, strict=True)
        out, _ = softmax_attention(
            queries[:, None], np.array(keys), np.array(values), [position], positions, log_mass,
            **self.options,
        )  # fmt: skip
        return out[:, 0]

    def _append(self, k: np.ndarray, v: np.ndarray, positions: np.ndarray) -> None:
        if not self.heads:
            self.heads = [Slots(**self.options) for _ in k]
        for slots, keys, values in zip(self.heads, k, v, strict=True):
            slots.append(keys, values, positions, 1)


def similarity(keys: np.ndarray, centroids: np.ndarray, metric: str) -> np.ndarray:
    """[N, C], the higher the nearer: cosine (0 where either is zero), -|k - c|^2, or k . c."""
    if metric == "l2":
        return -np.sum((keys[:, None] - centroids[None]) ** 2, axis=-1)
    # not a matrix product, whose sums of equal columns need not be equal
    products = np.sum(keys[:, None] * centroids[None], axis=-1)
    if metric == "inner_product":
        return products
    if metric != "cosine":
        raise ValueError(f"cosine, l2 or inner_product; given {metric}")
    lengths = np.linalg.norm(keys, axis=-1)[:, None] * np.linalg.norm(centroids, axis=-1)
    return np.where(lengths > 0, products / np.where(lengths > 0, lengths, 1.0), 0.0)


def kmeans(
    keys: np.ndarray, centroids: np.ndarray, metric: str = "cosine", iterations: int = 20
) -> tuple[np.ndarray, np.ndarray]:
    """keys [N, D] from initial centroids [C, D] -> labels [N], centroids [C, D].

    A round assigns every key to its most similar centroid, ties to the lower one, and moves every
    centroid to the mean of its keys; without keys it stays.  Ends when no label has changed, or
    after `iterations` rounds.  The labels are of one more assignment, to the final centroids.
    """
    keys, centroids = np.array(keys, np.float64), np.array(centroids, np.float64)

    def assign() -> np.ndarray:
        return np.argmax(similarity(keys, centroids, metric), axis=1)

    before = None
    for _ in range(iterations):
        labels = assign()
        if before is not None and np.array_equal(labels, before):
            break
        for c in set(labels.tolist()):
            centroids[c] = keys[labels == c].mean(axis=0)
        before = labels
    return assign(), centroids


def tokens_per_cluster(length: int, budget: int) -> int:
    """Returns the size of as many clusters as slots: 8 to 24, at most a twelfth of the slots."""
    return max(min(math.floor(length / max(budget, 1) + 0.5), budget // 12, 24), 8)


def rounded(count: int, size: float) -> int:
    """How many clusters of `size` tokens so many tokens are: rounded, halves up, at least 1."""
    return max(math.floor(count / size + 0.5), 1)


def cluster_counts(
    n: int, size: float, sinks: int = 16, clusters: int | None = None, chunk: float = math.inf
) -> list[int]:
    """Clusters in every chunk of `chunk` of a prompt's n live tokens.

    A chunk's tokens, sinks included, are rounded to clusters of `size`; at most as many as it has
    tokens that aren't sinks.  With `clusters` there is one chunk, with as many of them.
    """
    if clusters is not None:
        return [min(max(clusters, 1), n - sinks)] if n > sinks else []
    counts = []
    while n > 0:
        live = min(chunk, n)
        counts.append(min(rounded(live, size), max(live - sinks, 0)))
        n, sinks = n - live, max(sinks - live, 0)  # pyright: ignore[reportAssignmentType]  # whole, as n and each chunk are
    return counts


@dataclass
class Cluster:
    """A centroid [D], and the positions of its tokens, increasing (none: an empty cluster)."""

    centroid: np.ndarray
    members: list[int]


def take_clusters(scores: np.ndarray, members: list[list[int]], room: int) -> list[int]:
    """Whole clusters by descending score [C], ties to the lower one, until `room` tokens.

    The last one is trimmed to its first members.
    """
    taken: list[int] = []
    for c in np.argsort(-np.asarray(scores), kind="stable"):
        taken += members[c][: room - len(taken)]
    return taken


@dataclass
class HeadIndex:
    """What one KV head knows: positions of sinks, clusters in the order of their numbers."""

    sinks: list[int]
    clusters: list[Cluster]
    unclustered: list[int]


class ClusterKV(Recalling):
    """Sinks, the best clusters of the others within the budget, and what isn't clustered yet.

        score[c] = max_g q[g] . mu[c]          or 1/G sum_g, or of each query head for itself

    Of a prompt's live tokens the first `sinks` are set aside.  The others are clustered chunk by
    chunk, `chunk` live tokens at a time (sinks count), into `cluster_counts` clusters of
    `tokens_per_cluster` tokens, or of what follows from the budget; those of a chunk are numbered
    after those of the one before.  The tokens of `interval` decode steps are clustered among
    themselves at the end of the last of them, into min(new_clusters, tokens), or as many as follow
    from the size of clusters, numbered after the others, or where there are `most_clusters` already
    join the last one, whose centroid becomes

        (size centroid + sum of their keys) / (size + tokens)

    Of a further prompt, what is in no cluster yet is clustered among itself, into as many clusters
    as it has tokens over `size`, rounded, numbered after the others.  Where that is more than a
    chunk, or there would be more than `most_clusters`, or sinks were missing, or `clusters` is
    given, everything is clustered anew.  With a sliding window, sinks and clusters all of
    whose tokens lie outside it are passed over.

    draw(head, positions, count) returns the positions whose keys the clusters start from.
    """

    def __init__(
        self,
        budget: int | float,
        draw: Callable[[int, list[int], int], list[int]],
        tokens_per_cluster: float | None = None,
        sinks: int = 16,
        interval: int = 320,
        new_clusters: int | None = None,
        iterations: int = 5,
        chunk: float | None = 1024,
        clusters: int | None = None,
        metric: str = "cosine",
        per_query_head: bool = False,
        group_reduce: str = "max",
        most_clusters: float = math.inf,
        **options: float | None,
    ) -> None:
        super().__init__(per_query_head, **options)
        self.budget, self.draw, self.most_clusters = budget, draw, most_clusters
        self.tokens_per_cluster, self.sinks, self.clusters = tokens_per_cluster, sinks, clusters
        self.interval, self.new_clusters = interval, new_clusters
        self.iterations, self.metric = iterations, metric
        self.chunk = math.inf if chunk is None or clusters is not None else chunk
        self.reduce = {"max": np.max, "mean": np.mean}[group_reduce]
        self.indices: list[HeadIndex] = []

    @property
    def limit(self) -> int:
        """B: sinks and selected clustered tokens together."""
        return rows_budget(self.budget, self.prompt_length, self.sinks + 1)

    @property
    def size(self) -> float:
        """Tokens of a cluster."""
        if self.tokens_per_cluster is None:
            return tokens_per_cluster(self.prompt_length, self.limit)
        return self.tokens_per_cluster

    def index(self) -> None:
        """Clusters everything live, or after a further prompt what is new."""
        before, self.indices = self.indices, []
        for head, slots in enumerate(self.heads):
            positions = slots.positions.tolist()
            if before and self._grow(head, before[head], positions):
                self.indices.append(before[head])
                continue
            options = self.size, self.sinks, self.clusters, self.chunk
            clusters, at = [], 0
            for count in cluster_counts(len(slots), *options):
                own = positions[at : min(at + self.chunk, len(positions))]
                clusters += self._cluster(head, own[max(self.sinks - at, 0) :], count)
                at += len(own)
            self.indices.append(HeadIndex(positions[: self.sinks], clusters, []))

    def _grow(self, head: int, index: HeadIndex, positions: list[int]) -> bool:
        """Clusters what is in no cluster yet; False if everything must be clustered."""
        clustered = {*index.sinks, *(p for cluster in index.clusters for p in cluster.members)}
        new = [p for p in positions if p not in clustered]
        count = min(rounded(len(new), self.size), len(new))
        complete = len(index.sinks) == min(len(positions), self.sinks) and self.clusters is None
        if (
            not complete
            or len(new) > self.chunk
            or len(index.clusters) + count > self.most_clusters
        ):
            return False
        index.clusters += self._cluster(head, new, count)
        index.unclustered = []
        return True

    def decode(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int
    ) -> tuple[np.ndarray, list[list[int]]]:
        """As `Recalling.decode`; the token itself is not clustered yet."""
        for index in self.indices:
            index.unclustered.append(int(position))
        return super().decode(q, k, v, position)

    def update(self) -> None:
        """Clusters the generated tokens when there are `interval` of them."""
        self.make_room(1)

    def make_room(self, steps: int) -> None:
        """Clusters the generated tokens if there are more than `interval` after `steps` more."""
        for head, index in enumerate(self.indices):
            if len(index.unclustered) + steps <= self.interval or not index.unclustered:
                continue
            room = self.most_clusters - len(index.clusters)
            new = rounded(len(index.unclustered), self.size)
            new = new if self.new_clusters is None else self.new_clusters
            count = min(new, len(index.unclustered), room)
            if count:
                index.clusters += self._cluster(head, index.unclustered, count)
            else:
                self._join(head, index.clusters[-1], index.unclustered)
            index.unclustered = []

    def _join(self, head: int, cluster: Cluster, positions: list[int]) -> None:
        keys = [token.key for token in self.heads[head].tokens if token.position in positions]
        size = len(cluster.members)
        total = size * cluster.centroid + np.sum(keys, axis=0)
        cluster.centroid = total / (size + len(keys))
        cluster.members = cluster.members + positions

    def select(self, q: np.ndarray) -> list[list[int]]:
        """The lists: sinks, ranked clusters, unclustered tokens."""
        selected = []
        for index, group in zip(self.indices, self.by_group(q), strict=True):
            scores = np.array([group @ cluster.centroid for cluster in index.clusters])  # [C, G]
            scores = scores.reshape(len(index.clusters), len(group)).T
            if not self.per_query_head:
                scores = self.reduce(scores, axis=0, keepdims=True)
            members = [self._seen(cluster.members) for cluster in index.clusters]
            sinks = self._seen(index.sinks)
            selected += [
                [*sinks, *take_clusters(row, members, self.limit - len(sinks)), *index.unclustered]
                for row in scores
            ]
        return selected

    def _seen(self, positions: list[int]) -> list[int]:
        """All of them, or none where all lie outside the window."""
        return positions if any(p >= self.first for p in positions) else []

    def _cluster(self, head: int, positions: list[int], count: int) -> list[Cluster]:
        if count == 0:
            return []
        keys = {token.position: token.key for token in self.heads[head].tokens}
        first = [keys[int(p)] for p in self.draw(head, list(positions), count)]
        labels, centroids = kmeans(
            [keys[p] for p in positions], first, self.metric, self.iterations
        )
        return [
            Cluster(mu, [p for p, label in zip(positions, labels, strict=True) if label == c])
            for c, mu in enumerate(centroids)
        ]
