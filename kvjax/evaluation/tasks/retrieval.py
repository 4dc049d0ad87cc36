"""Retrieval tasks: a value is hidden in a long text, and the end of the prompt asks for it."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvjax.checks import check_choice, check_count

from .encoder import Encoder, Filler
from .task import Case, Frame, Task
from .wording import HELD_OUT_ADJECTIVES, HELD_OUT_NOUNS, WORDINGS, Wording

OWN_TASKS = ("needle", "multi_needle", "key_value", "chain")
"""Names of kvjax's own retrieval tasks:

- `needle`: one sentence is hidden in the text.
- `multi_needle`: several sentences are hidden, and the question asks for one of them.
- `key_value`: a list of keys and values is hidden, and the question asks for one of them.
- `chain`: a key has the code of another key, and a second sentence tells that code.
"""

STATEMENT = "statement"
"""Name of Kamradt's needle in a haystack: a sentence of words is hidden, and asked for."""

# The sentence and the question are data of LLMTest_NeedleInAHaystack (MIT licence). The end of the
# sentence is what an answer must say.
_ADVICE = Wording(
    "The best thing to do in San Francisco is", "What is the best thing to do in San Francisco?"
)
_ADVISED = "eat a sandwich and sit in Dolores Park on a sunny day"

_LINE = Wording("{key}:", "Which value has the {key}?")
_LINK = " The code of the {key} is the code of the {other}."


class _Pieces(NamedTuple):
    """Texts that are hidden in the filler, and the question.

    Args:
      inserts: pairs of a depth, the share of the filler before the text, and the text; the text
        that is asked for comes last.
      question, reply: the question, and an exact answer.
      answer: the value that is asked for.
      begins: index in its insert of the first character of the text that is asked for.
    """

    inserts: list[tuple[float, str]]
    question: str
    reply: str
    answer: str
    begins: int = 0


class Haystack:
    """Makes retrieval cases from a text.

    Prompts have an exact number of tokens. They are a window of the text, with needles after
    sentence ends, and the question. A sentence ends with a full stop, a line break, or a stop of
    another script, such as `。`, `।` and `؟` (the property `Sentence_Terminal` of Unicode). Where
    none is near, a needle stands between two characters. The window begins with a whole character,
    and dots take the place of one that would be cut at its end.

    Keys and values are drawn anew for every case. Keys are made of words that no key had in the
    training of the bundled model.

    Args:
      tokenizer: tokenizer of the model, from `transformers`. Prompts begin with the special tokens
        that it puts before a text. A special token that is spelled out in the text is read as text.
      text: the filler, longer than the longest prompt.

    Attributes:
      start: special tokens that prompts begin with.
      filler: tokens of the text.

    Raises:
      ValueError: the text is empty, or the tokenizer cannot say which characters a token stands
        for.

    Example:
      >>> from kvjax.evaluation import Haystack
      >>> from kvjax.models import demo, load_tokenizer
      >>> haystack = Haystack(load_tokenizer(demo.directory()), demo.held_out_text())
      >>> case = haystack.case("needle", length=512, depth=0.5, seed=0)
      >>> len(case.prompt), len(case.answers[0])
      (512, 6)
    """

    def __init__(self, tokenizer: Any, text: str) -> None:
        self._encoder = Encoder(tokenizer)
        self.start = list(Frame.of(tokenizer, chat=False).before)
        encoded = self._encoder.encode_first(text)
        self.filler = encoded.tokens
        if not len(self.filler):
            raise ValueError("the filler text is empty")
        self._text = Filler(
            encoded.tokens, encoded.whole, encoded.sentence_ends, encoded.characters
        )

    def case(
        self,
        task: str,
        *,
        length: int,
        depth: float,
        seed: int,
        needles: int = 8,
        wording: Wording = WORDINGS[0],
    ) -> Case:
        """Makes a case; equal arguments give equal cases.

        Args:
          task: a name in `OWN_TASKS`, or `STATEMENT`.
          length: tokens of the prompt, question included.
          depth: share of the filler before the text that is asked for, 0 to 1.
          seed: number of the case, from 0.
          needles: number of sentences of `multi_needle`, the one that is asked for included;
            `key_value` has four times as many lines. The sentences are spread at random.
          wording: wording of needles and questions; lists and links have a wording of their own.

        Returns:
          A case with one answer, the digits that must be the first number of the continuation;
          in `STATEMENT`, the end of the sentence.
          `details["position"]` is the index in the prompt of the first token of the text that is
          asked for.

        Raises:
          ValueError: the task is unknown, the depth is outside 0 to 1, the length is too small for
            the hidden texts, or the filler is too short for the length.
        """
        check_choice("task", task, (*OWN_TASKS, STATEMENT))
        if not 0 <= depth <= 1:
            raise ValueError(f"depth must lie between 0 and 1, got {depth}")
        check_count("length", length, 1)
        check_count("seed", seed, 0, most=math.inf)
        check_count("needles", needles, 1)
        # The wording is not part of the seed: keys and values are the same in every wording.
        rng = np.random.default_rng(
            (seed, zlib.crc32(task.encode()), length, round(depth * 10**6), needles)
        )
        return self._assemble(rng, _pieces(rng, task, depth, needles, wording), length, depth)

    def _assemble(
        self, rng: np.random.Generator, pieces: _Pieces, length: int, depth: float
    ) -> Case:
        encode, (_, asked) = self._encoder.next, pieces.inserts[-1]
        inserts = [(at, encode(text)) for at, text in pieces.inserts]
        wanted, question = inserts[-1][1], encode(pieces.question)
        room = length - len(self.start) - len(question) - sum(len(ids) for _, ids in inserts)
        if room < 0:
            raise ValueError(
                f"a prompt of {length} tokens is too short: what is hidden in it and the question "
                f"have {length - room}"
            )
        if room > len(self.filler):
            raise ValueError(
                f"a prompt of {length} tokens needs {room} tokens of filler, "
                f"and the text has {len(self.filler)}"
            )
        filler = self._window(int(rng.integers(len(self.filler) - room + 1)), room)
        text = filler.tokens.tolist()
        prompt, done, position = list(self.start), 0, 0
        for at, ids in sorted(inserts, key=lambda insert: insert[0]):
            place = filler.place_at(at * room, from_there=False)
            prompt += text[done:place]
            if ids is wanted:
                position = len(prompt)
                position += self._encoder.encode_next(asked).count_before(pieces.begins)
            prompt, done = [*prompt, *ids], place
        most_new = len(encode(pieces.reply)) + 1  # an exact answer and its end token
        return Case(
            prompt + text[done:], list(question), (pieces.answer,), most_new, depth,
            {"position": position},
        )  # fmt: skip

    def _window(self, start: int, room: int) -> Filler:
        """Returns `room` tokens of the text, from a token on that begins a character.

        It is the first such token from `start` on, or the last one before which there is room.
        """
        begins = np.flatnonzero(self._text.whole[: len(self.filler) - room + 1])
        start = int(begins[min(np.searchsorted(begins, start), len(begins) - 1)])
        return self._text.cut(start, self._encoder.dots(room))


def retrieval(
    name: str,
    haystack: Haystack,
    *,
    length: int,
    depths: Sequence[float],
    cases: int,
    seed: int,
) -> Task:
    """Makes one of `OWN_TASKS`, or `STATEMENT`; its cases cycle through the depths.

    A case depends on its number and the seed, not on the number of cases.
    """
    task_cases = []
    for number in range(cases):
        case_seed = int(np.random.SeedSequence((seed, number)).generate_state(1)[0])
        depth = depths[number % len(depths)]
        task_cases.append(haystack.case(name, length=length, depth=depth, seed=case_seed))
    if name == STATEMENT:
        return Task(name, tuple(task_cases), _words_found, "words found")
    # Floors stay 0: nobody guesses a number of six digits by chance, or says such words.
    return Task(name, tuple(task_cases), _right, "accuracy")


def _right(text: str, case: Case) -> float:
    return float(is_right(text, case.answers[0]))


def _words_found(text: str, case: Case) -> float:
    """Returns the share of the answer's words of four letters and more that a text has."""
    answered, said = (
        set(re.findall(r"\w{4,}", words.lower())) for words in (case.answers[0], text)
    )
    return len(answered & said) / len(answered)


def is_right(text: str, answer: str) -> bool:
    """Returns whether the first number in the continuation is the answer.

    Example:
      >>> from kvjax.evaluation import is_right
      >>> is_right(" 482130. The code of", "482130"), is_right(" 4821309", "482130")
      (True, False)
    """
    digits = re.search(r"\d+", text)
    return digits is not None and digits.group() == answer


def _pieces(
    rng: np.random.Generator, task: str, depth: float, needles: int, wording: Wording
) -> _Pieces:
    """Draws the hidden texts and the question of a case."""
    if task == STATEMENT:
        inserts, question = [(depth, _ADVICE.needle("", _ADVISED))], _ADVICE.ask("")
        return _Pieces(inserts, question, f" {_ADVISED}.", _ADVISED)
    count = {"needle": 1, "multi_needle": needles, "key_value": 4 * needles, "chain": 2}[task]
    keys, values = _keys(rng, count), _values(rng, count)
    # The first key is the one that is asked for; the others are at random depths.
    distractors = list(zip(rng.random(count - 1).tolist(), keys[1:], values[1:], strict=True))
    if task == "key_value":
        lines = [
            f"{_LINE.statement.format(key=key)} {value}\n"
            for key, value in zip(keys, values, strict=True)
        ]
        index = int(rng.integers(count))
        before, value = "\n\n" + "".join(lines[:index]), values[index]
        inserts, question = [(depth, "\n\n" + "".join(lines) + "\n")], _LINE.ask(keys[index])
        return _Pieces(inserts, question, f" {value}.", value, len(before))
    if task == "chain":
        ((at, key, value),) = distractors
        link = depth, _LINK.format(key=keys[0], other=key)
        inserts, question = [(at, WORDINGS[0].needle(key, value)), link], WORDINGS[0].ask(keys[0])
        return _Pieces(inserts, question, f" the code of the {key} is {value}.", value)
    hidden = [*distractors, (depth, keys[0], values[0])]
    inserts = [(at, wording.needle(key, value)) for at, key, value in hidden]
    return _Pieces(inserts, wording.ask(keys[0]), f" {values[0]}.", values[0])


def _keys(rng: np.random.Generator, count: int) -> list[str]:
    """Draws different keys of held-out words."""
    total = len(HELD_OUT_ADJECTIVES) * len(HELD_OUT_NOUNS)
    if count > total:
        raise ValueError(f"there are {total} different keys, got a task that needs {count}")
    chosen = rng.choice(total, count, replace=False)
    pairs = (divmod(int(index), len(HELD_OUT_NOUNS)) for index in chosen)
    return [f"{HELD_OUT_ADJECTIVES[a]} {HELD_OUT_NOUNS[n]}" for a, n in pairs]


def _values(rng: np.random.Generator, count: int) -> list[str]:
    """Draws different numbers of six digits."""
    return [str(value) for value in 100_000 + rng.choice(900_000, count, replace=False)]
