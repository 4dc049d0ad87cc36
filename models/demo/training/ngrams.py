"""Models that count words: the baselines of the bundled model's perplexity."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

_DISCOUNT = 0.75  # the usual one


class KneserNey:
    """An interpolated Kneser-Ney model of order n over token ids.

    p_n(w | h) = max(c(h w) − d, 0) / c(h) + d · N(h ·) / c(h) · p_{n−1}(w | h'), with the discount
    d = 0.75, N(h ·) the number of different tokens seen after h, and h' the history without its
    oldest token. Below the highest order c(h w) is the number of different tokens seen before h w.
    The end of the recursion is the uniform distribution. Order 1 with counts is a unigram model.

    Args:
      tokens: the training text.
      order: n, at least 1.
      vocab_size: of the uniform distribution.
    """

    def __init__(self, tokens: Sequence[int], order: int, vocab_size: int) -> None:
        self.order, self.vocab_size = order, vocab_size
        tokens = list(tokens)
        grams = Counter(zip(*(tokens[i:] for i in range(order)), strict=False))
        self._levels = []
        for _ in range(order):
            totals: dict[tuple, int] = defaultdict(int)
            kinds: dict[tuple, int] = defaultdict(int)
            for gram, count in grams.items():
                totals[gram[:-1]] += count
                kinds[gram[:-1]] += 1
            self._levels.append((grams, totals, kinds))
            grams = Counter(gram[1:] for gram in grams)  # how many different tokens came before
        self._levels.reverse()

    def probability(self, history: tuple[int, ...], token: int) -> float:
        """p(token | history); of the history at most the last n − 1 tokens count."""
        chance = 1.0 / self.vocab_size
        for length, (grams, totals, kinds) in enumerate(self._levels):
            context = history[len(history) - length :] if length else ()
            total = totals.get(context, 0)
            if len(context) < length or not total:
                break
            own = max(grams.get((*context, token), 0) - _DISCOUNT, 0.0)
            chance = (own + _DISCOUNT * kinds[context] * chance) / total
        return chance

    def nll(self, tokens: Sequence[int]) -> Float[np.ndarray, " N"]:
        """Nats of every token of a text."""
        tokens = tuple(tokens)
        start = [max(i - self.order + 1, 0) for i in range(len(tokens))]
        chances = [self.probability(tokens[a:i], tokens[i]) for i, a in enumerate(start)]
        return -np.log(chances)
