"""What RULER's keys, values and words are drawn from."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterator

import numpy as np

Draw = Callable[[np.random.Generator], str]


@functools.cache
def word_list(category: str) -> tuple[str, ...]:
    """The words of the package `wonderwords`: `"noun"`, `"adjective"` or `"verb"`, sorted.

    Raises:
      ValueError: the package is not installed; says how it is.
    """
    try:
        from wonderwords import RandomWord  # Imported here: it belongs to an extra.
    except ImportError as error:
        raise ValueError(
            "RULER's words need the package wonderwords, which is not installed: "
            "pip install 'kvjax[eval]'"
        ) from error
    words = RandomWord(enhanced_prefixes=False).filter(include_categories=[category])
    return tuple(sorted(set(words)))


def key_of_words(rng: np.random.Generator) -> str:
    """An adjective and a noun, `abundant-falcon`."""
    adjectives, nouns = word_list("adjective"), word_list("noun")
    return f"{adjectives[rng.integers(len(adjectives))]}-{nouns[rng.integers(len(nouns))]}"


def number(rng: np.random.Generator) -> str:
    """Seven digits."""
    return str(rng.integers(10**6, 10**7))


def uuid4(rng: np.random.Generator) -> str:
    """A random UUID."""
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def word_of(alphabet: str, count: int) -> Draw:
    """Draws words of `count` letters."""
    return lambda rng: "".join(rng.choice(list(alphabet), count).tolist())


def distinct(rng: np.random.Generator, draw: Draw) -> Iterator[str]:
    """Draws without end, no two of them equal."""
    seen: set[str] = set()
    while True:
        value = draw(rng)
        if value not in seen:
            seen.add(value)
            yield value
