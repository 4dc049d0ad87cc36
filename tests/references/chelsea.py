"""Chelsea: online clustering of the KV cache by chunked soft matching (arXiv 2506.11418)."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from .slots import Slots, Token


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """a . b / (|a| |b|), 0 where either is zero."""
    lengths = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / lengths) if lengths else 0.0


def soft_matching(keys: np.ndarray, chunk: int) -> list[tuple[float, int, int]]:
    """Edges (similarity, a, b) of keys [N, D], in the order of a.

    Within each chunk, tokens at even offsets are set A, at odd offsets set B.  Every a gets an edge
    to its most similar b, the lowest of equals; without any b there is no edge.
    """
    edges = []
    for start in range(0, len(keys), chunk):
        stop = min(start + chunk, len(keys))
        for a in range(start, stop, 2):
            if others := range(start + 1, stop, 2):
                similar = [cosine(keys[a], keys[b]) for b in others]
                best = int(np.argmax(similar))
                edges.append((similar[best], a, others[best]))
    return edges


def unmatched_share(
    keys: np.ndarray, threshold: float, chunk: int, sinks: int, recent: int
) -> float:
    """Appendix B: the share of set A that is left without an edge, of keys [N, D].

    Edges of a similarity that is not above the threshold are pruned; sinks and recent tokens are
    set aside first.
    """
    edges = soft_matching(keys[sinks : len(keys) - recent], chunk)
    return float(np.mean([similarity <= threshold for similarity, _, _ in edges]))


def merge_clusters(tokens: list[Token], edges: list[tuple[float, int, int]]) -> list[Token]:
    """Every b and the a's whose edges lead to it become one token, the others stay.

        k = sum m_i k_i / sum m_i      v = sum m_i v_i / sum m_i      m = sum m_i

    The position is that of b.
    """
    members = {i: [i] for i in range(len(tokens))}
    for _, a, b in edges:
        members[b].append(a)
        del members[a]
    merged = []
    for i, cluster in sorted(members.items()):
        if len(cluster) == 1:
            merged.append(tokens[i])
            continue
        mass = np.exp([tokens[j].log_mass for j in cluster])
        key = mass @ np.array([tokens[j].key for j in cluster]) / mass.sum()
        value = mass @ np.array([tokens[j].value for j in cluster]) / mass.sum()
        score = sum(tokens[j].score for j in cluster)
        merged.append(Token(tokens[i].position, key, value, score, float(np.log(mass.sum()))))
    return merged


class Chelsea:
    """Holds at most B + interval tokens, and merges down to B.

    At the prompt's end if more than B are live; while decoding at a flush after which the tokens
    until the next one would come to more than B + interval.  Protected
    are the tokens at positions below `sinks` and the newest `recent` positions.  The others, in the
    order of their positions, go through passes of chunked soft matching.  Pass i merges the
    floor(r_i |A|) most similar edges (at least one, at most half of the tokens, and no more than
    the budget needs), ties to the lower a:

        r_i = max(ratio_0 - decay * min(i, steps), floor)

    with i counted from the first pass of all.  A float budget is
    B = max(floor(f (L + max_new)), m), with L the tokens at the prompt's end and
    m = sinks + recent + 1.
    """

    def __init__(
        self,
        budget: int | float,
        chunk: int = 256,
        sinks: int = 16,
        recent: int = 64,
        interval: int = 128,
        ratio_0: float = 1.0,
        decay: float = 0.0,
        steps: int = 0,
        floor: float = 0.0,
        max_new: int = 0,
        **options: float | None,
    ) -> None:
        self.budget, self.chunk, self.sinks, self.recent = budget, chunk, sinks, recent
        self.interval, self.max_new = interval, max_new
        self.schedule = ratio_0, decay, steps, floor
        self.passes = 0
        self.compressions = 0
        self.margin = math.inf  # the closest that any choice came to another one
        self.slots = Slots(**options)
        self.limit = self.slots_for(0)

    @property
    def kept(self) -> list[int]:
        """Positions of the live tokens."""
        return self.slots.positions.tolist()

    def slots_for(self, length: int) -> int:
        """B for a prompt of `length` tokens."""
        if isinstance(self.budget, int):
            return self.budget
        share = math.floor(self.budget * (length + self.max_new))
        return max(share, self.sinks + self.recent + 1)

    def prompt(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray, last: bool = True
    ) -> np.ndarray:
        """q [G, T, D], k and v [T, D], positions [T] -> out [G, T, D].  Compresses if `last`."""
        self.slots.append(k, v, positions, len(q))
        out, _ = self.slots.attend(q, positions)
        if self.slots.ends_prompt(positions, last):
            self.limit = self.slots_for(self.slots.length)
            self._compress()
        return out

    def decode(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int) -> np.ndarray:
        """q [G, D], k and v [D] of one token -> out [G, D]."""
        self.slots.append(k[None], v[None], [position], len(q))
        return self.slots.attend(q[:, None], [position])[0][:, 0]

    def flush(self, room: int) -> None:
        """What happens before `room` more decode steps, for which there must be slots."""
        if len(self.slots) + room > self.limit + self.interval:
            self._compress()

    def _compress(self) -> None:
        self.compressions += len(self.slots) > self.limit
        while len(self.slots) > self.limit:
            self._pass(len(self.slots) - self.limit)

    def _pass(self, need: int) -> None:
        oldest_recent = self.slots.length - self.recent
        tokens = self.slots.tokens
        first = [t for t in tokens if t.position < self.sinks and t.position < oldest_recent]
        newest = [t for t in tokens if t.position >= oldest_recent]
        middle = [t for t in tokens if self.sinks <= t.position < oldest_recent]
        keys = np.array([t.key for t in middle])
        edges = soft_matching(keys, self.chunk)
        ratio_0, decay, floor = (Fraction(str(self.schedule[i])) for i in (0, 1, 3))
        share = max(ratio_0 - decay * min(self.passes, self.schedule[2]), floor)
        count = min(need, len(middle) // 2, max(1, math.floor(share * len(edges))))
        ranked = sorted(edges, key=lambda edge: (-edge[0], edge[1]))
        self._watch(keys, edges, ranked, count)
        self.slots.tokens = [*first, *merge_clusters(middle, ranked[:count]), *newest]
        self.passes += 1

    def _watch(self, keys, edges, ranked, count) -> None:
        """How far every choice was from another one; equal similarities don't count."""
        gaps = []
        if count < len(ranked):
            gaps.append(ranked[count - 1][0] - ranked[count][0])
        kept = {a for _, a, _ in ranked[:count]}
        for best, a, b in edges:
            start = a - a % self.chunk
            others = range(start + 1, min(start + self.chunk, len(keys)), 2)
            if a in kept:
                gaps += [best - cosine(keys[a], keys[other]) for other in others if other != b]
        self.margin = min([self.margin, *(gap for gap in gaps if gap > 0)])
