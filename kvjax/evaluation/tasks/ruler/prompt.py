"""How a prompt of RULER is put together from texts, so that it has an exact number of tokens."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

LONG = 4096
"""Tokens from which on examples and lists have RULER's full sizes."""

_NEAR = 100  # most tokens between a wanted place and the end of a sentence that is taken instead


class Encoder:
    """Tokens of texts that follow each other in one prompt.

    Special tokens that are spelled out in a text are read as text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._other = self.first("a")
        self.next = functools.cache(self._next)

    def first(self, text: str) -> tuple[int, ...]:
        """Of the text that a prompt begins with."""
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        return tuple(encoded.input_ids)

    def _next(self, text: str) -> tuple[int, ...]:
        """Of a text that begins with white space and follows another one.

        Some tokenizers put a space before every text that they are given. None is put before this
        one, except by tokenizers that join white space to the word before it.
        """
        both, other = self.first("a" + text), self._other
        return both[len(other) :] if both[: len(other)] == other else self.first(text)


class Body(Protocol):
    """The part of a context that is made as long as a prompt needs.

    Attributes:
      least: tokens that it cannot do without.
    """

    least: int

    def fill(self, room: int) -> list[int]:
        """Exactly `room` tokens, at least `least`."""
        ...


class Prompt(NamedTuple):
    """One case as text, except for its body.

    Args:
      before: the instruction, after an example where the task has one.
      body: what follows.
      question, reply: the question, and how the answer begins.
      answers: what a right answer names.
      depth: share of the filler before what is asked for.
    """

    before: str
    body: Body
    question: str
    reply: str
    answers: tuple[str, ...]
    depth: float | None = None


class Hidden:
    """Sentences that are hidden in a filler.

    The filler ends where the tokens are used up, in the middle of a sentence if need be.

    Args:
      encoder: of the model's tokenizer.
      sentences: share of the filler before each, and the sentence. At most one has the share 0.
      filler: sentences of it, in order; as many are taken as are needed.
      start, between: white space before the first sentence of all, and before each of the others.
    """

    def __init__(
        self,
        encoder: Encoder,
        sentences: Iterable[tuple[float, str]],
        filler: Iterable[str],
        start: str,
        between: str,
    ) -> None:
        self._encoder, self._filler, self._between = encoder, filler, between
        ordered = sorted(sentences)
        self._start = start if ordered[0][0] > 0 else between  # of the filler
        self._sentences = [
            (depth, encoder.next((between if depth > 0 else start) + text))
            for depth, text in ordered
        ]
        self.least = sum(len(tokens) for _, tokens in self._sentences)

    def fill(self, room: int) -> list[int]:
        """Exactly `room` tokens.

        Raises:
          ValueError: the filler is too short.
        """
        filler, ends = self._taken(room - self.least)
        tokens: list[int] = []
        done = 0
        for depth, sentence in self._sentences:
            place = _place(ends, depth)
            tokens += [*filler[done:place], *sentence]
            done = place
        return tokens + filler[done:]

    def _taken(self, room: int) -> tuple[list[int], list[int]]:
        """`room` tokens of the filler, and where its sentences end."""
        tokens: list[int] = []
        ends = [0]
        for text in self._filler:
            if len(tokens) >= room:
                break
            tokens += self._encoder.next((self._between if tokens else self._start) + text)
            ends.append(min(len(tokens), room))
        if len(tokens) < room:
            raise ValueError(
                f"the haystack's text is too short: {room} tokens of it are needed, "
                f"and it has {len(tokens)}"
            )
        return tokens[:room], ends


def _place(ends: Sequence[int], depth: float) -> int:
    """The first end of a sentence at or behind a share of the filler.

    The end of the filler is one. If the next end is far away, the place is the share itself,
    between any two tokens.
    """
    wanted = round(depth * ends[-1])
    end = ends[bisect.bisect_left(ends, wanted)]
    return end if end - wanted <= _NEAR else wanted
