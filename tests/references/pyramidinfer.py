"""PyramidInfer (arXiv 2405.12532): layers that pass on fewer and fewer tokens."""

from __future__ import annotations

import math

import numpy as np

from .attention import softmax_attention
from .budgets import rows_budget
from .slots import best

EPSILON = 1e-9  # what is whole but for rounding is whole


def entering(
    length: int, num_layers: int, newest: float = 0.2, ratio: float = 0.9, context: int = 64
) -> list[int]:
    """Tokens of a prompt of `length` that enter layers 0 … num_layers; the last is what leaves.

    w = 1 + floor(newest * L)       n = tokens that enter - w
    r_l = ratio + (1 - ratio) / 2 * (1 + cos(pi l / N))
    w + floor(n * r_l) enter the next layer where floor(n * r_l) > context, else all
    """
    window = min(1 + int(newest * length), length)
    counts = [length]
    for layer in range(num_layers):
        n = counts[-1] - window
        r = ratio + (1 - ratio) / 2 * (1 + math.cos(math.pi * layer / num_layers))
        passed = math.floor(n * r + EPSILON)
        counts.append(window + (passed if passed > context else n))
    return counts


def layer_shares(budget: int, length: int, num_layers: int) -> list[int]:
    """Slots of all layers for an average of `budget`, adding up to num_layers * budget.

        B + a cos(pi (l + 1/2) / N),  a = min(B, L - B) / 2;  B in every layer where L <= B

    Layers 0 ... l together have the whole part of their sum.
    """
    a = max(min(budget, length - budget), 0) / 2
    slots, total = [], 0.0
    for layer in range(num_layers):
        total += budget + a * math.cos(math.pi * (layer + 0.5) / num_layers)
        slots.append(math.floor(total + EPSILON) - sum(slots))
    return slots


def kept_of_a_block(layer: int, num_layers: int, interval: int = 16) -> int:
    """Generated tokens that stay of `interval`: 0.9 of them, falling by a cosine to 0.1 of that."""
    falling = 0.1 + 0.9 * (1 + math.cos(math.pi * layer / num_layers)) / 2
    return max(math.floor(interval * 0.9 * falling + EPSILON), 1)


class PyramidInfer:
    """One row and one layer: all KV heads keep the same tokens.

    At a prompt's end the layer keeps `count` tokens and names those that go on.  Protected are the
    newest w tokens and the first `sinks`; of the others the best by

        sum over the newest w queries t, i = 0 ... w - 1 of them, of
        (1 + (emphasis - 1) * i / (w - 1)) * mean over all heads of p[t, s]

    While decoding, generated tokens form blocks of `interval` from the prompt's end on.  At a flush
    after w tokens have come after a block, the best `kept` of it stay, by the same sum over those w
    queries.

    budget None: the paper's ratios.  With a budget, w is at most half of the slots that the sinks
    leave, and a flush compresses blocks while more slots than the layer's part are live.

    learned_sinks [Q]: the `sinks` of `softmax_attention`.
    """

    def __init__(
        self,
        budget: int | float | None,
        layer: int,
        num_layers: int,
        kv_heads: int,
        *,
        newest: float = 0.2,
        sinks: int = 4,
        ratio: float = 0.9,
        context: int = 64,
        emphasis: float = 1.2,
        interval: int | None = 16,
        learned_sinks: np.ndarray | None = None,
        **options: float | None,
    ) -> None:
        self.learned_sinks = learned_sinks
        self.budget, self.layer, self.num_layers = budget, layer, num_layers
        self.newest, self.sinks, self.ratio, self.context = newest, sinks, ratio, context
        self.emphasis, self.interval, self.options = emphasis, interval, options
        self.kv_heads = kv_heads
        # position -> (keys [H, D], values [H, D]), in order
        self.tokens: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.passed: list[int] = []
        # (query, what each token got from it), of this prompt and of decode steps
        self.asked: list[tuple[int, dict[int, float]]] = []
        self.history: list[tuple[int, dict[int, float]]] = []
        self.next_block = 0
        self.window, self.slots, _ = self.sizes(0)

    @property
    def length(self) -> int:
        return 1 + max(self.tokens, default=-1)

    @property
    def kept(self) -> list[int]:
        """Positions of the live tokens."""
        return sorted(self.tokens)

    def sizes(self, length: int) -> tuple[int, int, int]:
        """For a prompt of `length` tokens: w, the layer's slots, and how many tokens go on."""
        window = 1 + int(self.newest * length)
        if self.budget is None:
            counts = entering(length, self.num_layers, self.newest, self.ratio, self.context)
            return window, counts[self.layer], counts[self.layer + 1]
        mean = rows_budget(self.budget, length, 2 * (self.sinks + 1))
        slots = layer_shares(mean, length, self.num_layers)[self.layer]
        return max(min(window, (slots - self.sinks + 1) // 2), 1), slots, slots

    def prompt(self, q, k, v, positions, last: bool = True) -> np.ndarray:
        """q [Q, T, D], k and v [H, T, D], positions [T] -> out [Q, T, D].  Evicts if `last`."""
        out, queries = self._attend(q, k, v, positions)
        self.asked += queries
        if last and self.asked:
            self.history, self.asked = self.asked, []
            self.window, self.slots, going = self.sizes(self.length)
            scores = self._scores(self.kept, self.length - self.window)
            kept, self.passed = self._best(scores, self.slots), self._best(scores, going)
            self.tokens = {p: self.tokens[p] for p in kept}
            self.next_block, self.history = self.length, []
        return out

    def decode(self, q, k, v, position: int) -> np.ndarray:
        """q [Q, D], k and v [H, D] of one token -> out [Q, D]."""
        out, queries = self._attend(q[:, None], k[:, None], v[:, None], [position])
        self.history += queries
        return out[:, 0]

    def flush(self, room: int) -> None:
        """What happens to the generated tokens before `room` more decode steps."""
        while self.length - self.window >= self.next_block + self.interval:
            if self.budget is not None and len(self.tokens) <= self.slots:
                break
            self._compress_block(self.next_block, self.next_block + self.interval)

    def _compress_block(self, start: int, end: int) -> None:
        block = [p for p in self.kept if start <= p < end]
        scores = self._scores(block, end)
        keep = kept_of_a_block(self.layer, self.num_layers, self.interval)
        chosen = best(np.array(scores), keep)
        gone = [p for i, p in enumerate(block) if i not in chosen]
        for p in gone:
            del self.tokens[p]
        self.next_block = end

    def _best(self, scores: list[float], count: int) -> list[int]:
        protected = [p for p in self.kept if p < self.sinks or p >= self.length - self.window]
        others = [p for p in self.kept if p not in protected]
        own = np.array([score for p, score in zip(self.kept, scores, strict=True) if p in others])
        chosen = best(own, max(count - len(protected), 0))
        return sorted([*protected, *(others[i] for i in chosen)])

    def _scores(self, tokens: list[int], first: int) -> list[float]:
        """What `tokens` got from the w queries from `first` on, weighted."""
        total = np.zeros(len(tokens))
        for query, received in self.history:
            i = query - first
            if 0 <= i < self.window:
                weight = 1 + (self.emphasis - 1) * i / max(self.window - 1, 1)
                total += weight * np.array([received.get(p, 0.0) for p in tokens])
        return total.tolist()

    def _attend(self, q, k, v, positions) -> tuple[np.ndarray, list]:
        for t, position in enumerate(positions):
            if position >= 0:
                self.tokens[int(position)] = (np.float64(k[:, t]), np.float64(v[:, t]))
        order = self.kept
        if not order:
            return np.zeros(np.shape(q)), []
        group = len(q) // self.kv_heads
        outs, all_probabilities = [], []
        for head in range(self.kv_heads):
            keys = np.array([self.tokens[p][0][head] for p in order])
            values = np.array([self.tokens[p][1][head] for p in order])
            own = slice(head * group, (head + 1) * group)
            sinks = None if self.learned_sinks is None else self.learned_sinks[own]
            out, probabilities = softmax_attention(
                q[own], keys, values, positions, np.array(order), sinks=sinks, **self.options
            )
            outs.append(out)
            all_probabilities.append(probabilities)
        mean = np.concatenate(all_probabilities).mean(0)  # [T, S]
        received = [dict(zip(order, row.tolist(), strict=True)) for row in mean]
        queries = [(int(p), got) for p, got in zip(positions, received, strict=True) if p >= 0]
        return np.concatenate(outs), queries
