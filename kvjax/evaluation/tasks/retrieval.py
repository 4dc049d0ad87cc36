"""Retrieval tasks: a value is hidden in a long text, and the end of the prompt asks for it."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvjax.checks import check_choice, check_count

from .task import Case, Frame, Task
from .wording import HELD_OUT_ADJECTIVES, HELD_OUT_NOUNS, WORDINGS, Wording

OWN_TASKS = ("needle", "multi_needle", "key_value", "chain")
"""`needle`: one sentence in the text. `multi_needle`: several, one is asked for. `key_value`: a
list of keys and values, one is asked for. `chain`: a key has the code of another key, and another
sentence tells that one's code."""

_NEAR = 100  # most tokens between a wanted place and the end of a sentence that is taken instead

_LINE = Wording("{key}:", "Which value has the {key}?")
_LINK = " The code of the {key} is the code of the {other}."


class _Pieces(NamedTuple):
    """What goes into the filler, and the question."""

    inserts: list[tuple[float, str]]  # share of the filler before a text, and the text; asked last
    question: str
    reply: str
    answer: str
    line: tuple[str, str] = ("", "")  # of a list: the text before the asked line, and the line


class Haystack:
    """Makes retrieval cases in a text.

    Prompts have an exact number of tokens: a window of the text, needles after ends of sentences,
    and the question. Keys and values are drawn anew for every case; keys are made of words that are
    in no key of the bundled model's training.

    Args:
      tokenizer: of the model, from `transformers`. Prompts begin with the special tokens that it
        puts before a text. A special token that is spelled out in the text is read as text.
      text: the filler, longer than the longest prompt.

    Attributes:
      start: the special tokens that prompts begin with.
      filler: the tokens of the text.

    Raises:
      ValueError: the text is empty.

    Example:
      >>> from kvjax.evaluation import Haystack
      >>> from kvjax.models import demo, load_tokenizer
      >>> haystack = Haystack(load_tokenizer(demo.directory()), demo.held_out_text())
      >>> case = haystack.case("needle", length=512, depth=0.5, seed=0)
      >>> len(case.prompt), len(case.answers[0])
      (512, 6)
    """

    def __init__(self, tokenizer: Any, text: str) -> None:
        self._tokenizer = tokenizer
        self.start = list(Frame.of(tokenizer, chat=False).before)
        self.filler = np.array(self._encode(text), np.int32)
        if not len(self.filler):
            raise ValueError("the filler text is empty")
        ends = {
            token: tokenizer.decode([token]).rstrip(" ").endswith((".", "\n"))
            for token in np.unique(self.filler).tolist()
        }
        self._ends_sentence = np.array([ends[token] for token in self.filler.tolist()])

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
        """One case; the same arguments give the same case.

        Args:
          task: one of `OWN_TASKS`.
          length: tokens of the prompt, question included.
          depth: share of the filler that stands before what is asked for, 0 to 1.
          seed: which case, from 0.
          needles: sentences of `multi_needle`, the asked one included; lines of `key_value` are
            four times as many. They are spread at random.
          wording: of needles and questions; lists and links have their own.

        Returns:
          A case whose one answer is the digits that must come first among those of the
          continuation. `details["position"]` is the index in the prompt of the first token of what
          is asked for.

        Raises:
          ValueError: an unknown task, a depth outside 0 to 1, or a length that the pieces and the
            text cannot fill.
        """
        check_choice("task", task, OWN_TASKS)
        if not 0 <= depth <= 1:
            raise ValueError(f"depth must lie between 0 and 1, got {depth}")
        check_count("length", length, 1)
        check_count("seed", seed, 0, most=math.inf)
        check_count("needles", needles, 1)
        rng = np.random.default_rng(
            (seed, zlib.crc32(task.encode()), length, round(depth * 10**6), needles)
        )
        return self._assemble(rng, _pieces(rng, task, depth, needles, wording), length, depth)

    def _assemble(
        self, rng: np.random.Generator, pieces: _Pieces, length: int, depth: float
    ) -> Case:
        inserts = [(at, self._encode(text)) for at, text in pieces.inserts]
        asked, question = inserts[-1][1], self._encode(pieces.question)
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
        start = int(rng.integers(len(self.filler) - room + 1))
        text = self.filler[start : start + room].tolist()
        ends = np.flatnonzero(self._ends_sentence[start : start + room]) + 1
        prompt, done, position = list(self.start), 0, 0
        for at, ids in sorted(inserts, key=lambda insert: insert[0]):
            place = _place(ends, at, room)
            prompt += text[done:place]
            if ids is asked:
                before, line = pieces.line
                skipped = len(self._encode(before + line)) - len(self._encode(line))
                position = len(prompt) + skipped
            prompt, done = prompt + ids, place
        most_new = len(self._encode(pieces.reply)) + 1  # an exact answer and its end token
        return Case(
            prompt + text[done:], question, (pieces.answer,), most_new, depth,
            {"position": position},
        )  # fmt: skip

    def _encode(self, text: str) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        return list(encoded.input_ids)


def _place(ends: np.ndarray, at: float, room: int) -> int:
    """Where in `room` tokens of filler a piece goes: an end of a sentence near the share `at`.

    If no sentence ends near that place, it goes exactly there, between any two tokens.
    """
    places = np.concatenate(([0], ends, [room]))
    place = int(places[np.abs(places - at * room).argmin()])
    return place if abs(place - at * room) <= _NEAR else round(at * room)


def retrieval(
    name: str,
    haystack: Haystack,
    *,
    length: int,
    depths: Sequence[float],
    cases: int,
    seed: int,
) -> Task:
    """One of `OWN_TASKS`, with the depths in turn; a case depends on its number and the seed."""
    made = []
    for number in range(cases):
        drawn = int(np.random.SeedSequence((seed, number)).generate_state(1)[0])
        depth = depths[number % len(depths)]
        made.append(haystack.case(name, length=length, depth=depth, seed=drawn))
    # Numbers of six digits are not found by chance.
    return Task(name, tuple(made), _right, "accuracy")


def _right(text: str, case: Case) -> float:
    return float(is_right(text, case.answers[0]))


def is_right(text: str, answer: str) -> bool:
    """Whether the first number in the continuation is the answer.

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
    count = {"needle": 1, "multi_needle": needles, "key_value": 4 * needles, "chain": 2}[task]
    keys, values = _keys(rng, count), _values(rng, count)
    others = list(zip(rng.random(count - 1).tolist(), keys[1:], values[1:], strict=True))
    if task == "key_value":
        lines = [
            f"{_LINE.statement.format(key=key)} {value}\n"
            for key, value in zip(keys, values, strict=True)
        ]
        which = int(rng.integers(count))
        before, value = "\n\n" + "".join(lines[:which]), values[which]
        inserts, question = [(depth, "\n\n" + "".join(lines) + "\n")], _LINE.ask(keys[which])
        return _Pieces(inserts, question, f" {value}.", value, (before, lines[which]))
    if task == "chain":
        ((at, key, value),) = others
        link = depth, _LINK.format(key=keys[0], other=key)
        inserts, question = [(at, WORDINGS[0].needle(key, value)), link], WORDINGS[0].ask(keys[0])
        return _Pieces(inserts, question, f" the code of the {key} is {value}.", value)
    hidden = [*others, (depth, keys[0], values[0])]
    inserts = [(at, wording.needle(key, value)) for at, key, value in hidden]
    return _Pieces(inserts, wording.ask(keys[0]), f" {values[0]}.", values[0])


def _keys(rng: np.random.Generator, count: int) -> list[str]:
    """Different keys of held-out words."""
    total = len(HELD_OUT_ADJECTIVES) * len(HELD_OUT_NOUNS)
    if count > total:
        raise ValueError(f"there are {total} different keys, got a task that needs {count}")
    chosen = rng.choice(total, count, replace=False)
    pairs = (divmod(int(index), len(HELD_OUT_NOUNS)) for index in chosen)
    return [f"{HELD_OUT_ADJECTIVES[a]} {HELD_OUT_NOUNS[n]}" for a, n in pairs]


def _values(rng: np.random.Generator, count: int) -> list[str]:
    """Different numbers of six digits."""
    return [str(value) for value in 100_000 + rng.choice(900_000, count, replace=False)]
