"""RULER's needles and its chains of variables: sentences that are hidden in a filler.

Templates, noise and hidden sentences are data of NVIDIA's RULER (Apache-2.0).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from string import ascii_uppercase
from typing import NamedTuple

import numpy as np

from .draws import distinct, key_of_words, number, uuid4, word_of
from .prompt import LONG, Encoder, Hidden, Prompt

DEPTHS = tuple(round(100 * step / 39) / 100 for step in range(40))
"""Shares of the filler that stand before a hidden sentence: 40 of them, evenly from 0 to 1."""

_DRAWS = {"words": key_of_words, "numbers": number, "uuids": uuid4}
_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_TRACK = "Memorize and track the chain(s) of variable assignment hidden in the following text."
_NEEDLE = "One of the special magic {kind} for {key} is: {value}."

_HOPS = 4
_EXAMPLE_LINES = 5, 15  # of noise, in prompts that are shorter than `LONG`, and in others


class Needles(NamedTuple):
    """What tells the tasks of needles apart.

    Args:
      haystack: `"noise"`, one line again and again; `"essay"`, the text; or `"needle"`, needles
        that nobody asks for.
      keys, values: `"words"`, `"numbers"` or `"uuids"`.
      hidden: how many keys are hidden.
      each: how many values each key has.
      asked: how many of the keys are asked for.
    """

    haystack: str
    keys: str
    values: str
    hidden: int = 1
    each: int = 1
    asked: int = 1


NEEDLES = {
    "niah_single_1": Needles("noise", "words", "numbers"),
    "niah_single_2": Needles("essay", "words", "numbers"),
    "niah_single_3": Needles("essay", "words", "uuids"),
    "niah_multikey_1": Needles("essay", "words", "numbers", hidden=4),
    "niah_multikey_2": Needles("needle", "words", "numbers"),
    "niah_multikey_3": Needles("needle", "uuids", "uuids"),
    "niah_multivalue": Needles("essay", "words", "numbers", each=4),
    "niah_multiquery": Needles("essay", "words", "numbers", hidden=4, asked=4),
}


def sentences_of(text: str) -> list[str]:
    """The sentences of a text, with one space in place of every white space."""
    return re.split(r"(?<=[.!?]) ", " ".join(text.split()))


def needles(
    task: Needles, encoder: Encoder, rng: np.random.Generator, depth: float, text: Sequence[str]
) -> Prompt:
    """A case of needles.

    Args:
      task: which needles.
      encoder: of the model's tokenizer.
      rng: what everything is drawn from.
      depth: of the first needle, one of `DEPTHS`; further needles are at others of them.
      text: sentences, for the haystack `"essay"`. It begins at any of them, and the first one
        follows the last one.
    """
    keys, values = (distinct(rng, _DRAWS[kind]) for kind in (task.keys, task.values))

    def needle(key: str, value: str) -> str:
        return _NEEDLE.format(kind=task.values, key=key, value=value)

    hidden = [
        (key, value)
        for key in itertools.islice(keys, task.hidden)
        for value in itertools.islice(values, task.each)
    ]
    others = rng.permutation([other for other in DEPTHS if other != depth]).tolist()
    places = [depth, *others[: len(hidden) - 1]]
    sentences = [(place, needle(*pair)) for place, pair in zip(places, hidden, strict=True)]
    if task.haystack == "noise":
        filler = itertools.repeat(_NOISE)
    elif task.haystack == "needle":
        filler = map(needle, keys, values)
    else:
        start = int(rng.integers(len(text)))
        filler = [*text[start:], *text[:start]]
    body = Hidden(encoder, sentences, filler, "\n", " " if task.haystack == "essay" else "\n")
    asked = hidden[: task.asked * task.each]
    return _asking_for(task.values, asked, body, depth)


def _asking_for(kind: str, asked: list[tuple[str, str]], body: Hidden, depth: float) -> Prompt:
    """The prompt that asks for some pairs of key and value, worded for one or for several."""
    *keys, last = dict(asked)
    query = f"{', '.join(keys)}, and {last}" if keys else last
    answers = tuple(value for _, value in asked)
    if len(asked) == 1:
        word = kind.removesuffix("s")
        return Prompt(
            f"A special magic {word} is hidden within the following text. Make sure to memorize "
            f"it. I will quiz you about the {word} afterwards.",
            body,
            f"\nWhat is the special magic {word} for {query} mentioned in the provided text?",
            f" The special magic {word} for {query} mentioned in the provided text is",
            answers,
            depth,
        )
    return Prompt(
        f"Some special magic {kind} are hidden within the following text. Make sure to memorize "
        f"it. I will quiz you about the {kind} afterwards.",
        body,
        f"\nWhat are all the special magic {kind} for {query} mentioned in the provided text?",
        f" The special magic {kind} for {query} mentioned in the provided text are",
        answers,
    )


def variables(encoder: Encoder, rng: np.random.Generator, length: int) -> Prompt:
    """A case of `vt`: a number is given to a variable, and by that one to the next, four times.

    An example with shorter names and with its answer comes first. It has 15 lines of noise, about
    what fits into the 500 tokens that RULER gives it, and 5 in prompts of less than 4,096 tokens.
    """
    shown, value, chain = _chain(rng, 3)
    lines = [f"{_NOISE}\n"] * _EXAMPLE_LINES[length >= LONG]
    places = np.sort(rng.choice(len(lines), len(chain), replace=False)).tolist()
    for place, sentence in zip(reversed(places), reversed(chain), strict=True):
        lines.insert(place, sentence)
    question, reply = _asking_for_variables(value)
    example = f"{_TRACK}\n\n{' '.join(lines)}{question}{reply} {' '.join(shown)}\n\n"

    names, value, chain = _chain(rng, 5)
    places = np.sort(rng.choice(DEPTHS, len(chain), replace=False)).tolist()
    filler = itertools.repeat(f"{_NOISE}\n")
    body = Hidden(encoder, zip(places, chain, strict=True), filler, "\n\n", " ")
    return Prompt(example + _TRACK, body, *_asking_for_variables(value), tuple(names))


def _chain(rng: np.random.Generator, letters: int) -> tuple[list[str], int, list[str]]:
    """Names of variables, the number that they all have, and the sentences that say so."""
    names = list(itertools.islice(distinct(rng, word_of(ascii_uppercase, letters)), _HOPS + 1))
    value = int(rng.integers(10_000, 100_000))
    pairs = zip(names[1:], names[:-1], strict=True)
    chain = [f"VAR {names[0]} = {value}", *(f"VAR {name} = VAR {other} " for name, other in pairs)]
    return names, value, chain


def _asking_for_variables(value: int) -> tuple[str, str]:
    """The question, and how the answer begins: RULER's letters, so that figures compare."""
    return (
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above.",
        " Answer: According to the chain(s) of variable assignment in the text above, "
        f"{_HOPS + 1} variables are assgined the value {value}, they are:",
    )
