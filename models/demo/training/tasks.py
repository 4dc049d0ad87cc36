"""Sequences that the bundled model learns from: text, returning segments, questions.

A mark per token says how it counts in the loss. The model learns to predict text as any language
model does, the answers of questions, and the returning part of segments. Tokens that cannot be
predicted, such as a needle that appears for the first time, are ignored.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvjax.evaluation.tasks.wording import TRAINING_ADJECTIVES, TRAINING_NOUNS, WORDINGS

from .words import FreeWords, given_keys

IGNORED, TEXT, ANSWER = 0, 1, 2
"""Marks: how a token counts in the loss."""

_LIST = "{key}:"  # a line of a key-value list, up to the value
_CHAIN = " The code of the {key} is the code of the {previous}."


class Insert(NamedTuple):
    """Tokens that go into the filler, with their marks."""

    at: float  # share of the filler that comes before it
    tokens: list[int]
    marks: list[int]


@dataclass(frozen=True)
class Mix:
    """Shares of the types of sequences, and how much a sequence holds.

    Args:
      segments: share of sequences of returning segments.
      lists: share of sequences with a key-value list.
      chains: share of sequences with variable chains; the rest have needles in text.
      questions: most questions per sequence.
      positions: in half of the sequences, positions have gaps and go up to this number; 0: in
        none. This teaches long distances with short texts (arXiv 2309.10400).
      free: share of sequences whose keys are two made-up words. In two thirds of those with
        needles, the sentences are also made up. Without such sequences, a model retrieves only with
        the words and sentences that it was trained with.
    """

    segments: float
    lists: float
    chains: float
    questions: int
    positions: int
    free: float = 0.0


@dataclass(frozen=True)
class Tasks:
    """Makes training sequences.

    Args:
      encode: text to token ids, without a start token.
      stream: the training text as token ids.
      words: words of free keys and wordings.
      vocab: number of ids that random segments are drawn from.
      special: ids below this are special tokens, which are never drawn.
      bos, eos: ids that start a sequence and end an answer.
    """

    encode: Callable[[str], list[int]]
    stream: np.ndarray
    words: FreeWords
    vocab: int
    special: int
    bos: int
    eos: int

    def batch(
        self, rng: np.random.Generator, rows: int, length: int, mix: Mix
    ) -> dict[str, np.ndarray]:
        """Makes `rows` sequences: `tokens`, `marks` `[rows, length + 1]`, `positions` one less."""
        pairs = [self.sequence(rng, length + 1, mix) for _ in range(rows)]
        return {
            "tokens": np.array([tokens for tokens, _ in pairs], np.int32),
            "marks": np.array([marks for _, marks in pairs], np.int32),
            "positions": np.stack([_positions(rng, length, mix.positions) for _ in range(rows)]),
        }

    def sequence(
        self, rng: np.random.Generator, length: int, mix: Mix
    ) -> tuple[list[int], list[int]]:
        """Makes a sequence of `length` tokens and their marks."""
        draw, room = rng.random(), length // 2
        free = mix.free > 0 and rng.random() < mix.free
        words = self.words if free else None
        if draw < mix.segments:
            inserts = self._segments(rng, room)
        elif draw < mix.segments + mix.lists:
            inserts = self._list(rng, mix.questions, room, words)
        elif draw < mix.segments + mix.lists + mix.chains:
            inserts = self._chains(rng, mix.questions, room, words)
        else:
            inserts = self._needles(rng, mix.questions, room, words)
        return self._weave(rng, inserts, length)

    def _weave(
        self, rng: np.random.Generator, inserts: list[Insert], length: int
    ) -> tuple[list[int], list[int]]:
        """Puts the inserts into filler, each at its place, after the start token."""
        filler = length - 1 - sum(len(insert.tokens) for insert in inserts)
        start = rng.integers(len(self.stream) - filler)
        text = self.stream[start : start + filler].tolist()
        tokens, marks, done = [self.bos], [IGNORED], 0
        for insert in sorted(inserts, key=lambda insert: insert.at):  # stable
            end = round(insert.at * filler)
            tokens += text[done:end] + insert.tokens
            marks += [TEXT] * (end - done) + insert.marks
            done = end
        return tokens + text[done:], marks + [TEXT] * (filler - done)

    def _segments(self, rng: np.random.Generator, room: int) -> list[Insert]:
        """Makes segments that return after a random gap, half of them of random tokens."""
        inserts: list[Insert] = []
        while room >= 16:
            size = int(rng.integers(4, min(64, room // 2) + 1))
            if rng.random() < 0.5:
                segment = rng.integers(self.special, self.vocab, size).tolist()
            else:
                start = rng.integers(len(self.stream) - size)
                segment = self.stream[start : start + size].tolist()
            first, again = sorted(rng.random(2))
            inserts.append(Insert(first, segment, [IGNORED] * size))
            # The first two tokens say which segment returns; they cannot be predicted.
            inserts.append(Insert(again, segment, [IGNORED] * 2 + [ANSWER] * (size - 2)))
            room -= 2 * size
            if rng.random() < 0.1:
                break
        return inserts

    def _needles(
        self, rng: np.random.Generator, questions: int, room: int, words: FreeWords | None
    ) -> list[Insert]:
        """Makes needles all over the text, and questions about some of them."""
        inserts, count = [], 0
        keys = _keys(rng, int(rng.integers(1, 2 * questions + 1)), words)
        by_chance = words.wording(rng) if words and rng.random() < 2 / 3 else None
        for key in keys:
            value, at = _value(rng), rng.random()
            wording = by_chance or WORDINGS[rng.integers(len(WORDINGS))]
            needle = self._ignored(at, wording.needle(key, value))
            question = self._question(rng, at, wording.ask(key), f" {value}.")
            room -= len(needle.tokens)
            if room < 0:
                break
            inserts.append(needle)
            if count < questions and room >= len(question.tokens):
                room -= len(question.tokens)
                count += 1
                inserts.append(question)
        return inserts

    def _list(
        self, rng: np.random.Generator, questions: int, room: int, words: FreeWords | None
    ) -> list[Insert]:
        """Makes a list of keys and values, and questions that begin a line of it again."""
        at = rng.random()
        keys = _keys(rng, int(rng.integers(2, 6 * questions)), words)
        pairs = [(key, _value(rng)) for key in keys]
        pairs = pairs[: max(2, room // 2 // 10)]
        text = "\n\n" + "".join(f"{_LIST.format(key=key)} {value}\n" for key, value in pairs)
        inserts = [self._ignored(at, text + "\n")]
        room -= len(inserts[0].tokens)
        if room < 0:
            return []
        for index in rng.permutation(len(pairs))[:questions]:
            key, value = pairs[index]
            begun = f"\n\nQuestion: Which value has the {key}?\nAnswer: {_LIST.format(key=key)}"
            question = self._question(rng, at, begun, f" {value}.")
            room -= len(question.tokens)
            if room < 0:
                break
            inserts.append(question)
        return inserts

    def _chains(
        self, rng: np.random.Generator, questions: int, room: int, words: FreeWords | None
    ) -> list[Insert]:
        """Makes keys that have the value of another key; the answer follows the chain."""
        inserts: list[Insert] = []
        wording = WORDINGS[0]
        lengths = rng.integers(2, 4, size=int(rng.integers(1, questions + 1)))
        all_keys = iter(_keys(rng, int(lengths.sum()), words))
        for length in lengths:
            keys, value = list(itertools.islice(all_keys, int(length))), _value(rng)
            at = rng.random(len(keys))
            chain = [self._ignored(at[0], wording.needle(keys[0], value))]
            for place, key, previous in zip(at[1:], keys[1:], keys, strict=False):
                chain.append(self._ignored(place, _CHAIN.format(key=key, previous=previous)))
            steps = "".join(f" the code of the {key} is" for key in keys[-2::-1])
            answer = f"{steps} {value}."
            chain.append(self._question(rng, at.max(), wording.ask(keys[-1]), answer))
            room -= sum(len(insert.tokens) for insert in chain)
            if room < 0:
                break
            inserts += chain
        return inserts

    def _ignored(self, at: float, text: str) -> Insert:
        tokens = self.encode(text)
        return Insert(at, tokens, [IGNORED] * len(tokens))

    def _question(self, rng: np.random.Generator, after: float, text: str, answer: str) -> Insert:
        """Makes a question and its answer, at the end or anywhere after its needle."""
        at = 1.0 if rng.random() < 0.6 else after + (1.0 - after) * rng.random()
        question, reply = self.encode(text), [*self.encode(answer), self.eos]
        return Insert(at, question + reply, [IGNORED] * len(question) + [ANSWER] * len(reply))


def _keys(rng: np.random.Generator, count: int, words: FreeWords | None) -> list[str]:
    """Makes different keys, of training words unless others are given."""
    if words is not None:
        return words.keys(rng, count)
    return given_keys(rng, TRAINING_ADJECTIVES, TRAINING_NOUNS, count)


def _value(rng: np.random.Generator) -> str:
    """Draws a value of six digits in most cases, else of four or eight."""
    digits = int(rng.choice((4, 6, 6, 6, 8)))
    return str(rng.integers(10 ** (digits - 1), 10**digits))


def _positions(rng: np.random.Generator, length: int, spread: int) -> np.ndarray:
    """Draws rising positions; in half of all cases with gaps, up to `spread`."""
    positions = np.arange(length, dtype=np.int32)
    if spread <= length or rng.random() < 0.5:
        return positions
    gaps = int(rng.integers(1, 9))
    extra = np.sort(rng.integers(0, rng.integers(1, spread - length + 1), gaps))
    cuts = np.sort(rng.integers(1, length, gaps))
    shift = np.concatenate(([0], extra))[np.searchsorted(cuts, positions, "right")]
    return positions + shift.astype(np.int32)
