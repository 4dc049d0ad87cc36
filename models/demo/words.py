"""Keys that the model is trained with: pairs of given words, or of words made up for the occasion.

A model that is trained with a few hundred words learns to retrieve by those words. Made-up words of
one to three tokens teach it to compare tokens that it has not met in a key before.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvjax.evaluation.tasks.wording import Wording

_WHOLE = 1 / 3  # share of words that are one token


@dataclass(frozen=True)
class FreeWords:
    """Made-up words.

    Args:
      whole: words that are one token each.
      starts: pieces that words of several tokens start with.
      rests: pieces that they go on with.
      held_out: words that are never made.
    """

    whole: Sequence[str]
    starts: Sequence[str]
    rests: Sequence[str]
    held_out: frozenset[str]

    @staticmethod
    def of(vocabulary: Iterable[str], held_out: Iterable[str]) -> FreeWords:
        """Of a byte-level tokenizer's vocabulary, in which `Ġ` stands for a space."""
        vocabulary, held_out = sorted(vocabulary), frozenset(held_out)

        def matching(pattern: str) -> list[str]:
            found = (re.fullmatch(pattern, token) for token in vocabulary)
            return [match[1] for match in found if match and match[1] not in held_out]

        return FreeWords(
            matching("Ġ([a-z]{3,})"), matching("Ġ([a-z]{1,5})"), matching("([a-z]{1,4})"), held_out
        )

    def word(self, rng: np.random.Generator) -> str:
        """One word, not a held-out one."""
        if rng.random() < _WHOLE:
            return self.whole[rng.integers(len(self.whole))]
        rests = rng.integers(len(self.rests), size=int(rng.integers(1, 3)))
        start = self.starts[rng.integers(len(self.starts))]
        made = start + "".join(self.rests[index] for index in rests)
        return self.word(rng) if made in self.held_out else made

    def keys(self, rng: np.random.Generator, count: int) -> list[str]:
        """Different pairs of words, some of which share a word."""
        first, second = (
            list(dict.fromkeys(self.word(rng) for _ in range(size)))
            for size in _pool_sizes(rng, count)
        )
        if len(first) * len(second) < count:  # a word was made twice
            return self.keys(rng, count)
        return _pairs(rng, first, second, count)

    def wording(self, rng: np.random.Generator) -> Wording:
        """A sentence and a question of words that have nothing to do with each other."""

        def words(least: int, most: int) -> str:
            return "".join(f" {self.word(rng)}" for _ in range(int(rng.integers(least, most + 1))))

        sign = ("", ":", " =")[rng.integers(3)]
        statement = f"{words(1, 4)} {{key}}{words(0, 3)}{sign}".strip()
        return Wording(statement, f"{words(1, 4)} {{key}}?".strip())


def given_keys(
    rng: np.random.Generator, first: Sequence[str], second: Sequence[str], count: int
) -> list[str]:
    """Different pairs of the given words, some of which share a word."""
    sizes = _pool_sizes(rng, count)
    first, second = (
        [words[index] for index in rng.permutation(len(words))[:size]]
        for words, size in zip((first, second), sizes, strict=True)
    )
    return _pairs(rng, first, second, count)


def _pool_sizes(rng: np.random.Generator, count: int) -> tuple[int, int]:
    """How many first and second words make `count` keys.

    Where there are few, keys share words, and only both words together tell which key is meant.
    """
    least, most = math.isqrt(count - 1) + 1, 2 * count
    first, second = rng.integers(least, most + 1, size=2)
    return int(first), int(second)


def _pairs(
    rng: np.random.Generator, first: Sequence[str], second: Sequence[str], count: int
) -> list[str]:
    chosen = rng.choice(len(first) * len(second), count, replace=False)
    places = (divmod(int(index), len(second)) for index in chosen)
    return [f"{first[a]} {second[b]}" for a, b in places]
