"""Assembly of RULER's prompts from texts, with an exact number of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np

from kvjax.evaluation.tasks.encoder import Encoder, Filler

LONG = 4096
"""Prompt length, in tokens, from which on examples and lists have RULER's full sizes."""


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

    The filler ends when the tokens are used up, in the middle of a sentence if necessary. Dots take
    the place of a character that would be cut.

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
        filler = self._take_filler(room - self.least)
        text, done = filler.tokens.tolist(), 0
        tokens: list[int] = []
        for depth, sentence in self._sentences:
            place = filler.place_at(round(depth * len(text)), from_there=True)
            tokens += [*text[done:place], *sentence]
            done = place
        return tokens + text[done:]

    def _take_filler(self, room: int) -> Filler:
        """Returns `room` tokens of the filler."""
        tokens: list[int] = []
        whole, ends, characters = [True], [True], [0]
        for text in self._filler:
            if len(tokens) >= room:
                break
            encoded = self._encoder.encode_next((self._between if tokens else self._start) + text)
            tokens += encoded.tokens.tolist()
            whole += encoded.whole[1:].tolist()
            ends += [False] * (len(encoded.tokens) - 1) + [True]
            characters += (characters[-1] + encoded.characters[1:]).tolist()
        if len(tokens) < room:
            raise ValueError(
                f"the haystack's text is too short: {room} tokens of it are needed, "
                f"and it has {len(tokens)}"
            )
        filler = Filler(*map(np.array, (tokens, whole, ends, characters)))
        return filler.cut(0, self._encoder.dots(room))
