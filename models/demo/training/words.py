"""Keys for training: pairs of words from a list, or of made-up words.

A model that is trained with a few hundred words learns to retrieve by those words only. Made-up
words of one to three tokens teach it to compare tokens that are new to it in a key.
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
      whole: words of one token each.
      starts: first pieces of words of several tokens.
      rests: further pieces of such words.
      held_out: words that are never made.
    """

    whole: Sequence[str]
    starts: Sequence[str]
    rests: Sequence[str]
    held_out: frozenset[str]

    @staticmethod
    def of(vocabulary: Iterable[str], held_out: Iterable[str]) -> FreeWords:
        """Makes words of a byte-level tokenizer's vocabulary, in which `Ġ` means a space."""
        vocabulary, held_out = sorted(vocabulary), frozenset(held_out)

        def matching(pattern: str) -> list[str]:
            matches = (re.fullmatch(pattern, token) for token in vocabulary)
            return [match[1] for match in matches if match and match[1] not in held_out]

        return FreeWords(
            matching("Ġ([a-z]{3,})"), matching("Ġ([a-z]{1,5})"), matching("([a-z]{1,4})"), held_out
        )

    def word(self, rng: np.random.Generator) -> str:
        """Makes a word that is not held out."""
        if rng.random() < _WHOLE:
            return self.whole[int(rng.integers(len(self.whole)))]
        rests = rng.integers(len(self.rests), size=int(rng.integers(1, 3)))
        start = self.starts[int(rng.integers(len(self.starts)))]
        word = start + "".join(self.rests[int(index)] for index in rests)
        return self.word(rng) if word in self.held_out else word

    def keys(self, rng: np.random.Generator, count: int) -> list[str]:
        """Makes different pairs of words, some of which share a word."""
        first, second = (
            list(dict.fromkeys(self.word(rng) for _ in range(size)))
            for size in _pool_sizes(rng, count)
        )
        if len(first) * len(second) < count:  # a word was made twice
            return self.keys(rng, count)
        return _pairs(rng, first, second, count)

    def wording(self, rng: np.random.Generator) -> Wording:
        """Makes a sentence and a question of unrelated words."""

        def words(least: int, most: int) -> str:
            return "".join(f" {self.word(rng)}" for _ in range(int(rng.integers(least, most + 1))))

        sign = ("", ":", " =")[rng.integers(3)]
        statement = f"{words(1, 4)} {{key}}{words(0, 3)}{sign}".strip()
        return Wording(statement, f"{words(1, 4)} {{key}}?".strip())


def given_keys(
    rng: np.random.Generator, first: Sequence[str], second: Sequence[str], count: int
) -> list[str]:
    """Makes different pairs of the given words, some of which share a word."""
    sizes = _pool_sizes(rng, count)
    firsts, seconds = (
        [words[int(index)] for index in rng.permutation(len(words))[:size]]
        for words, size in zip((first, second), sizes, strict=True)
    )
    return _pairs(rng, firsts, seconds, count)


def _pool_sizes(rng: np.random.Generator, count: int) -> tuple[int, int]:
    """Draws how many first and second words make `count` keys.

    If there are few, keys share words, and only both words together identify a key.
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
