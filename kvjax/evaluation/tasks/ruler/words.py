"""RULER's common words and frequent words: lists in which some words appear more often.

Templates and parameters are data of NVIDIA's RULER (Apache-2.0).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from string import ascii_lowercase

import numpy as np

from kvjax.evaluation.tasks.encoder import Encoder

from .draws import distinct, word_list, word_of
from .prompt import LONG, Prompt

_COMMON = 10  # number of words that `cwe` asks for
_LIST = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often."
)
_LIST_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
_LIST_REPLY = " Answer: The top 10 words that appear most often in the list are:"

_ALPHA = 2.0  # exponent of the zeta distribution of `fwe`
_DOTS = "..."  # the most frequent word of `fwe`, which is not asked for
_FREQUENT = 3  # number of words that `fwe` asks for


_Repeats = tuple[int, int]  # occurrences of each common word, and of each other word


def common_words(encoder: Encoder, rng: np.random.Generator, length: int) -> Prompt:
    """Makes a case of `cwe`: ten words appear 30 times in a numbered list, all others 3 times.

    An example with its answer comes first. As in RULER, prompts of less than 4,096 tokens have 6
    and 1 in place of 30 and 3, and a smaller example.
    """
    words = np.array(_all_words())[rng.permutation(len(_all_words()))].tolist()
    if length >= LONG:
        repeats, shown, size = (30, 3), (10, 3), 40
    else:
        repeats, shown, size = (6, 1), (3, 1), 20
    # The list of the prompt has none of the example's words.
    example, words = words[:size], words[size:]
    listed = _shuffled(rng, example[:_COMMON], example[_COMMON:], shown)
    before = (
        f"{_LIST}\n{_numbered(listed)}{_LIST_QUESTION}{_LIST_REPLY} "
        f"{_numbered(example[:_COMMON])}\n{_LIST}"
    )
    body = _NumberedList(encoder, rng, words, repeats)
    return Prompt(before, body, _LIST_QUESTION, _LIST_REPLY, tuple(words[:_COMMON]))


def _all_words() -> list[str]:
    categories = "noun", "adjective", "verb"
    return sorted({word for category in categories for word in word_list(category)})


def _numbered(words: Iterable[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def _shuffled(
    rng: np.random.Generator, common: Sequence[str], rare: Sequence[str], repeats: _Repeats
) -> list[str]:
    words = [*common] * repeats[0] + [*rare] * repeats[1]
    return [words[index] for index in rng.permutation(len(words))]


class _NumberedList:
    """The list of `cwe`: common words, and as many rare words as there is room for.

    Room at the end that is too small for all repeats of a further rare word is filled with rare
    words that appear once. The last one is cut off when the tokens are used up.
    """

    def __init__(
        self, encoder: Encoder, rng: np.random.Generator, words: Sequence[str], repeats: _Repeats
    ) -> None:
        self._encoder, self._rng, self._repeats = encoder, rng, repeats
        self._common, self._rare = words[:_COMMON], words[_COMMON:]
        # The list has at least all common words with their numbers.
        self.least = repeats[0] * sum(map(self._size, self._common))
        self.least += self._numbers(0, repeats[0] * _COMMON)

    def fill(self, room: int) -> list[int]:
        """Returns exactly `room` tokens.

        Raises:
          ValueError: there are not enough words.
        """
        count = self._count_rare(room)
        listed = _shuffled(self._rng, self._common, self._rare[:count], self._repeats)
        tokens: list[int] = []
        for number, word in enumerate(itertools.chain(listed, self._rare[count:]), 1):
            if len(tokens) >= room:
                break
            tokens += [*self._number(number), *self._encoder.next(f" {word}")]
        if len(tokens) < room:
            raise ValueError(
                f"there are not enough words: {room} tokens of them are needed, and a list of all "
                f"{len(self._common) + len(self._rare)} has {len(tokens)}"
            )
        return tokens[:room]

    def _count_rare(self, room: int) -> int:
        """Returns the number of rare words that there is room for, with all their repeats."""
        (common_repeats, rare_repeats), used = self._repeats, self.least
        last = common_repeats * _COMMON
        for count, word in enumerate(self._rare):
            used += rare_repeats * self._size(word) + self._numbers(last, last + rare_repeats)
            last += rare_repeats
            if used > room:
                return count
        return len(self._rare)

    def _size(self, word: str) -> int:
        return len(self._encoder.next(f" {word}"))

    def _number(self, number: int) -> tuple[int, ...]:
        return self._encoder.next(f" {number}." if number > 1 else "\n1.")

    def _numbers(self, start: int, stop: int) -> int:
        """Returns the token count of the numbers `start + 1` to `stop`."""
        return sum(len(self._number(number)) for number in range(start + 1, stop + 1))


def frequent_words(encoder: Encoder, rng: np.random.Generator, length: int) -> Prompt:
    """Makes a case of `fwe`: words of six letters, the k-th with a share of `k^-2 / ζ(2)`.

    The first word is dots, which the question says to ignore; it asks for the next three. The
    number of different words is a fiftieth of the prompt's tokens, and at least five.
    """
    drawn = distinct(rng, word_of(ascii_lowercase, 6))
    words = [_DOTS, *itertools.islice(drawn, max(length // 50, _FREQUENT + 2) - 1)]
    return Prompt(
        "Read the following coded text and track the frequency of each coded word. Find the three "
        "most frequently appeared coded words.",
        _CodedText(encoder, rng, words),
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
        "three most frequently appeared words in the above coded text?",
        " Answer: According to the coded text above, the three most frequently appeared words are:",
        tuple(words[1 : 1 + _FREQUENT]),
    )


class _CodedText:
    """The text of `fwe`. Dots fill the room that is too small for a further text of its words."""

    def __init__(self, encoder: Encoder, rng: np.random.Generator, words: Sequence[str]) -> None:
        self._encoder, self._rng, self._words = encoder, rng, words
        self._sizes = np.array([len(encoder.next(f" {word}")) for word in words])
        shares = np.arange(1, len(words) + 1) ** -_ALPHA
        self._shares = shares / (math.pi**2 / 6)  # ζ(2)
        # In a shorter text, the last word that is asked for might be no more frequent than the next
        # one.
        last, following = self._shares[_FREQUENT : _FREQUENT + 2]
        self._fewest = math.ceil(1 / (last - following))
        self.least = self._tokens(self._fewest)

    def fill(self, room: int) -> list[int]:
        """Returns exactly `room` tokens."""
        # The longest text of its words that fits; its tokens grow with the number of words.
        totals = range(self._fewest, room * 2)
        total = totals[bisect.bisect_right(totals, room, key=self._tokens) - 1]
        spare, dots = room - self._tokens(total), self._encoder.next(f" {_DOTS}")
        words = np.repeat(self._words, self._counts(total)).tolist()
        words += [_DOTS] * (spare // len(dots))
        tokens = [
            token
            for index in self._rng.permutation(len(words))
            for token in self._encoder.next(f" {words[index]}")
        ]
        return [*tokens, *dots[: room - len(tokens)]]

    def _counts(self, total: int) -> np.ndarray:
        """Returns how often each word appears in a text of `total` words."""
        return np.floor(total * self._shares).astype(int)

    def _tokens(self, total: int) -> int:
        return int(self._counts(total) @ self._sizes)
