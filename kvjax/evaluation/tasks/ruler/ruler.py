"""The tasks of RULER: needles, chains of variables and frequent words, generated at any length."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np

from kvjax.checks import check_choice, check_count
from kvjax.evaluation.tasks.task import Case, Frame, Task

from .needles import DEPTHS, NEEDLES, needles, sentences_of, variables
from .prompt import Encoder, Prompt
from .words import common_words, frequent_words

_OTHERS = {"vt": (variables, 30), "cwe": (common_words, 120), "fwe": (frequent_words, 50)}
_NEEDLES_NEW = 128  # most new tokens of RULER's needles

RULER_TASKS = (*NEEDLES, *_OTHERS)
"""RULER's names. `niah_single_1` to `_3`: a word has a number (in the third, a UUID), hidden in
noise, in the text, in the text. `niah_multikey_1`: the same in the text, among three others.
`niah_multikey_2` and `_3`: in a list of nothing else, of words and numbers, and of UUIDs.
`niah_multivalue`: four numbers of one word. `niah_multiquery`: the numbers of four words. `vt`:
variables that get a number from each other. `cwe`: the ten most common words of a list. `fwe`: the
three most frequent words of a coded text."""


def ruler(
    name: str,
    tokenizer: Any,
    text: str,
    *,
    length: int,
    cases: int,
    seed: int,
    frame: Frame,
) -> Task:
    """Cases of one of RULER's tasks, each with a prompt of exactly `length` tokens.

    The context is RULER's instruction and text (behind an example with its answer in `vt` and
    `cwe`), the question is RULER's, with the beginning of the answer behind the frame's end. The
    text ends where the tokens are used up, in the middle of a sentence or word if need be. A
    question has a few tokens more or less than another one, and so has its context.

    A case depends on its number, the task's name and the seed, besides text, tokenizer, length and
    frame. A single needle is at one of RULER's 40 depths, which follow each other so that every 40
    cases have all of them, and few cases are spread. A score is the share of the answers that occur
    in the continuation, whatever the case of letters.

    Args:
      name: one of `RULER_TASKS`.
      tokenizer: of the model, from `transformers`.
      text: what the needles of `niah_single_2` and `_3`, `niah_multikey_1`, `niah_multivalue` and
        `niah_multiquery` are hidden in; RULER has essays of Paul Graham.
      length: tokens of every prompt, with the frame.
      cases: how many, from number 0.
      seed: what is drawn depends on it.
      frame: the tokens around a user's text.

    Raises:
      ValueError: an unknown name, a length that the task does not fit into, a text that is too
        short for it, or `wonderwords` is not installed, which all tasks with words in them need.

    Example:
      >>> from kvjax.evaluation.tasks import Frame, ruler
      >>> from kvjax.models import demo, load_tokenizer
      >>> tokenizer, text = load_tokenizer(demo.directory()), demo.held_out_text()
      >>> frame = Frame.of(tokenizer, chat=False)
      >>> task = ruler("fwe", tokenizer, text, length=512, cases=2, seed=0, frame=frame)
      >>> [len(case.prompt) for case in task.cases], len(task.cases[0].answers)
      ([512, 512], 3)

    References:
      Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?",
      2024, https://arxiv.org/abs/2404.06654. Templates, noise and parameters are those of its
      authors' code, https://github.com/NVIDIA/RULER (Apache-2.0).

    Deviations from the paper:
      - RULER's lengths count the new tokens too, and a prompt is shorter by what a further
        sentence, line or word does not fit into. Here the prompt alone has the length.
      - The text begins at a sentence that is drawn, not always at its first one, and goes on at its
        beginning behind its end. It is not repeated.
      - The depth of the needle that is asked for goes through RULER's depths, and is not drawn.
        These depths are those of needles in the text; here noise, lists and `vt` have them too.
        RULER draws the lines that a sentence stands behind.
      - The prompt of `vt` ends with a colon, without the space behind it, so that a new token can
        begin with the space. Its example has fewer lines of noise in prompts below 4,096 tokens.
      - Words of the example of `cwe` are not in its list.
    """
    check_choice("the task of RULER", name, RULER_TASKS)
    check_count("length", length, 1)
    check_count("cases", cases, 1)
    check_count("seed", seed, 0, most=math.inf)
    encoder, sentences = Encoder(tokenizer), sentences_of(text)
    of_name = zlib.crc32(name.encode())
    made = []
    for number in range(cases):
        rng = np.random.default_rng((seed, of_name, number))
        if name in NEEDLES:
            # 23 is about 40 divided by the golden ratio, and has no divisor in common with 40.
            depth = DEPTHS[(seed + of_name + 23 * number) % len(DEPTHS)]
            prompt = needles(NEEDLES[name], encoder, rng, depth, sentences)
            most_new = _NEEDLES_NEW
        else:
            make, most_new = _OTHERS[name]
            prompt = make(encoder, rng, length)
        made.append(_case(name, encoder, prompt, length, frame, most_new))
    return Task(name, tuple(made), _share_of_answers, "accuracy")


def _case(
    name: str, encoder: Encoder, prompt: Prompt, length: int, frame: Frame, most_new: int
) -> Case:
    """The case as tokens; its body is as long as it must be."""
    start = [*frame.before, *encoder.first(prompt.before)]
    question = [*encoder.next(prompt.question), *frame.after, *encoder.next(prompt.reply)]
    room = length - len(start) - len(question)
    if room < prompt.body.least:
        raise ValueError(
            f"a prompt of {length} tokens is too short for {name}: "
            f"{length - room + prompt.body.least} are needed"
        )
    context = start + prompt.body.fill(room)
    return Case(context, question, prompt.answers, most_new, prompt.depth)


def _share_of_answers(text: str, case: Case) -> float:
    """RULER's measure for all of these tasks; without the context it is 0, as answers are drawn."""
    return sum(answer.lower() in text.lower() for answer in case.answers) / len(case.answers)
