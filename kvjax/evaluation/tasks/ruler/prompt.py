"""Assembly of RULER's prompts from texts, with an exact number of tokens."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

LONG = 4096
"""Prompt length, in tokens, from which on examples and lists have RULER's full sizes."""

_NEAR = 100  # maximum tokens from a wanted place to the sentence end that is used instead


class Encoder:
    """Encodes texts that follow each other in one prompt.

    Special tokens that are spelled out in a text are read as text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._letter = self.first("a")
        self.next = functools.cache(self._next)

    def first(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of the text that a prompt begins with."""
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        return tuple(encoded.input_ids)

    def _next(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of a text that begins with white space and follows another text.

        Some tokenizers add a space before every text. Encoding the text after a letter avoids that,
        except for tokenizers that join white space to the word before it.
        """
        joined, letter = self.first("a" + text), self._letter
        return joined[len(letter) :] if joined[: len(letter)] == letter else self.first(text)


class Body(Protocol):
    """The part of a context whose length is adjusted to the prompt.

    Attributes:
      least: minimum number of tokens.
    """

    least: int

    def fill(self, room: int) -> list[int]:
        """Returns exactly `room` tokens; `room` is at least `least`."""
        ...


class Prompt(NamedTuple):
    """A case as text, except for its body.

    Args:
      before: the instruction, after an example if the task has one.
      body: the part after the instruction.
      question, reply: the question, and the beginning of the answer.
      answers: texts that a right answer contains.
      depth: share of the filler before the sentence that is asked for.
    """

    before: str
    body: Body
    question: str
    reply: str
    answers: tuple[str, ...]
    depth: float | None = None


class Hidden:
    """A body of sentences that are hidden in a filler text.

    The filler ends when the tokens are used up, in the middle of a sentence if necessary.

    Args:
      encoder: encoder of the model's tokenizer.
      sentences: pairs of a depth, the share of the filler before the sentence, and the sentence. At
        most one has the depth 0.
      filler: sentences of the filler in order; as many are taken as needed.
      start, between: white space before the first sentence of the body, and before the others.
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
        # White space before the filler: a sentence at depth 0 comes first and takes `start`.
        self._start = start if ordered[0][0] > 0 else between
        self._sentences = [
            (depth, encoder.next((between if depth > 0 else start) + text))
            for depth, text in ordered
        ]
        self.least = sum(len(tokens) for _, tokens in self._sentences)

    def fill(self, room: int) -> list[int]:
        """Returns exactly `room` tokens.

        Raises:
          ValueError: the filler is too short.
        """
        filler, ends = self._take_filler(room - self.least)
        tokens: list[int] = []
        done = 0
        for depth, sentence in self._sentences:
            place = _place(ends, depth)
            tokens += [*filler[done:place], *sentence]
            done = place
        return tokens + filler[done:]

    def _take_filler(self, room: int) -> tuple[list[int], list[int]]:
        """Returns `room` tokens of the filler, and the places where its sentences end."""
        tokens: list[int] = []
        ends = [0]
        for text in self._filler:
            if len(tokens) >= room:
                break
            tokens += self._encoder.next((self._between if tokens else self._start) + text)
            ends.append(min(len(tokens), room))  # the last sentence may be cut at `room`
        if len(tokens) < room:
            raise ValueError(
                f"the haystack's text is too short: {room} tokens of it are needed, "
                f"and it has {len(tokens)}"
            )
        return tokens[:room], ends


def _place(ends: Sequence[int], depth: float) -> int:
    """Returns the first sentence end at or after a depth in the filler.

    The end of the filler counts as a sentence end. If the next end is far away, the depth itself is
    the place, in the middle of a sentence.
    """
    wanted = round(depth * ends[-1])
    end = ends[bisect.bisect_left(ends, wanted)]
    return end if end - wanted <= _NEAR else wanted
