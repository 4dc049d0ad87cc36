"""Random draws of RULER's keys, values and words."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterator

import numpy as np

from kvjax.messages import extra_module

Draw = Callable[[np.random.Generator], str]


@functools.cache
def word_list(category: str) -> tuple[str, ...]:
    """Returns the sorted words of the package `wonderwords` of a category.

    Args:
      category: `"noun"`, `"adjective"` or `"verb"`.

    Raises:
      ValueError: the package is not installed; the message says how to install it.
    """
    wonderwords = extra_module("wonderwords", "eval", "RULER's words")
    drawn = wonderwords.RandomWord(enhanced_prefixes=False)
    words = drawn.filter(include_categories=[category])
    # A set has no fixed order, on which draws must not depend.
    return tuple(sorted(set(words)))


def key_of_words(rng: np.random.Generator) -> str:
    """Draws an adjective and a noun, such as `abundant-falcon`."""
    adjectives, nouns = word_list("adjective"), word_list("noun")
    return f"{adjectives[rng.integers(len(adjectives))]}-{nouns[rng.integers(len(nouns))]}"


def number(rng: np.random.Generator) -> str:
    """Draws a number of seven digits."""
    return str(rng.integers(10**6, 10**7))


def uuid4(rng: np.random.Generator) -> str:
    """Draws a random UUID."""
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def word_of(alphabet: str, count: int) -> Draw:
    """Returns a function that draws words of `count` letters."""
    return lambda rng: "".join(rng.choice(list(alphabet), count).tolist())


def distinct(rng: np.random.Generator, draw: Draw) -> Iterator[str]:
    """Yields draws without end, no two of them equal."""
    drawn: set[str] = set()
    while True:
        value = draw(rng)
        if value not in drawn:
            drawn.add(value)
            yield value
