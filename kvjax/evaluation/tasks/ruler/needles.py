"""RULER's needles and its chains of variables: sentences hidden in a filler text.

Templates, noise and hidden sentences are data of NVIDIA's RULER (Apache-2.0).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from string import ascii_uppercase
from typing import NamedTuple

import numpy as np

from kvjax.evaluation.tasks.encoder import Encoder

from .draws import distinct, key_of_words, number, uuid4, word_of
from .prompt import LONG, Hidden, Prompt

DEPTHS = tuple(round(100 * step / 39) / 100 for step in range(40))
"""Depths of hidden sentences as shares of the filler: 40 of them, evenly from 0 to 1."""

_DRAWS = {"words": key_of_words, "numbers": number, "uuids": uuid4}
_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_TRACK = "Memorize and track the chain(s) of variable assignment hidden in the following text."
_NEEDLE = "One of the special magic {kind} for {key} is: {value}."

_HOPS = 4
_EXAMPLE_LINES = 5, 15  # lines of noise, in prompts shorter than `LONG`, and in longer ones


class Needles(NamedTuple):
    """Parameters in which the needle tasks differ.

    Args:
      haystack: `"noise"`, one line repeated; `"essay"`, the text; or `"needle"`, needles that the
        question does not ask for.
      keys, values: `"words"`, `"numbers"` or `"uuids"`.
      hidden: number of hidden keys.
      each: number of values per key.
      asked: number of keys that the question asks for.
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


def needles(
    task: Needles, encoder: Encoder, rng: np.random.Generator, depth: float, text: Sequence[str]
) -> Prompt:
    """Makes a case of a needle task.

    Args:
      task: parameters of the task.
      encoder: encoder of the model's tokenizer.
      rng: source of all random choices.
      depth: depth of the first needle, one of `DEPTHS`; further needles are at other depths.
      text: sentences of the haystack `"essay"`. The haystack begins at a random sentence, and the
        first sentence follows the last one.
    """
    keys, values = (distinct(rng, _DRAWS[draw_name]) for draw_name in (task.keys, task.values))

    def needle(key: str, value: str) -> str:
        return _NEEDLE.format(kind=task.values, key=key, value=value)

    hidden = [
        (key, value)
        for key in itertools.islice(keys, task.hidden)
        for value in itertools.islice(values, task.each)
    ]
    other_depths = rng.permutation([place for place in DEPTHS if place != depth]).tolist()
    places = [depth, *other_depths[: len(hidden) - 1]]
    sentences = [(place, needle(*pair)) for place, pair in zip(places, hidden, strict=True)]
    if task.haystack == "noise":
        filler = itertools.repeat(_NOISE)
    elif task.haystack == "needle":
        # The generators go on, so that the filler repeats no hidden key or value.
        filler = map(needle, keys, values)
    else:
        start = int(rng.integers(len(text)))
        filler = [*text[start:], *text[:start]]
    body = Hidden(encoder, sentences, filler, "\n", " " if task.haystack == "essay" else "\n")
    wanted = hidden[: task.asked * task.each]
    return _asking_for(task.values, wanted, body, depth)


def _asking_for(noun: str, wanted: list[tuple[str, str]], body: Hidden, depth: float) -> Prompt:
    """Returns the prompt that asks for pairs of key and value, worded for one or for several."""
    *keys, last = dict(wanted)
    query = f"{', '.join(keys)}, and {last}" if keys else last
    answers = tuple(value for _, value in wanted)
    if len(wanted) == 1:
        word = noun.removesuffix("s")
        return Prompt(
            f"A special magic {word} is hidden within the following text. Make sure to memorize "
            f"it. I will quiz you about the {word} afterwards.",
            body,
            f"\nWhat is the special magic {word} for {query} mentioned in the provided text?",
            f" The special magic {word} for {query} mentioned in the provided text is",
            answers,
            depth,
        )
    # Several needles have no single depth, so the prompt has none.
    return Prompt(
        f"Some special magic {noun} are hidden within the following text. Make sure to memorize "
        f"it. I will quiz you about the {noun} afterwards.",
        body,
        f"\nWhat are all the special magic {noun} for {query} mentioned in the provided text?",
        f" The special magic {noun} for {query} mentioned in the provided text are",
        answers,
    )


def variables(encoder: Encoder, rng: np.random.Generator, length: int) -> Prompt:
    """Makes a case of `vt`: a variable gets a number, and four more get it from one another.

    An example with shorter names comes first, with its answer. It has 15 lines of noise, about as
    many as fit into the 500 tokens that RULER gives it. In prompts of less than 4,096 tokens it has
    5 lines.
    """
    shown, value, chain = _chain(rng, 3)
    lines = [f"{_NOISE}\n"] * _EXAMPLE_LINES[length >= LONG]
    places = np.sort(rng.choice(len(lines), len(chain), replace=False)).tolist()
    # From the last place to the first, so that an insertion does not move the later places.
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
    """Draws names of variables and their common number; returns them and the assignments."""
    names = list(itertools.islice(distinct(rng, word_of(ascii_uppercase, letters)), _HOPS + 1))
    value = int(rng.integers(10_000, 100_000))
    pairs = zip(names[1:], names[:-1], strict=True)
    links = (f"VAR {name} = VAR {previous} " for name, previous in pairs)
    return names, value, [f"VAR {names[0]} = {value}", *links]


def _asking_for_variables(value: int) -> tuple[str, str]:
    """Returns the question and the beginning of the answer.

    The spelling is RULER's, mistakes included, so that scores can be compared.
    """
    return (
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above.",
        " Answer: According to the chain(s) of variable assignment in the text above, "
        f"{_HOPS + 1} variables are assgined the value {value}, they are:",
    )
