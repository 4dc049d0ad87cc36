"""The tasks of RULER at any length: needles, chains of variables, frequent words, articles."""

from __future__ import annotations

import math
import os
import zlib
from typing import Any

import numpy as np

from kvjax.checks import check_choice, check_count
from kvjax.evaluation.tasks.encoder import Encoder, sentences_of
from kvjax.evaluation.tasks.squad import read_articles
from kvjax.evaluation.tasks.task import Case, Frame, Task

from .articles import article_questions
from .needles import DEPTHS, NEEDLES, needles, variables
from .prompt import Prompt
from .words import common_words, frequent_words

# The tasks without needles: the function that makes a case, and the maximum number of new tokens.
_OTHER_TASKS = {"vt": (variables, 30), "cwe": (common_words, 120), "fwe": (frequent_words, 50)}
_NEEDLES_NEW = 128  # maximum new tokens of RULER's needles
_ANSWER_NEW = 32  # maximum new tokens of an answer about an article

RULER_TASKS = (*NEEDLES, *_OTHER_TASKS)
"""RULER's names of the tasks that are generated:

- `niah_single_1`: the number of a word, hidden in noise. `niah_single_2`: hidden in the text.
  `niah_single_3`: the UUID of a word, hidden in the text.
- `niah_multikey_1`: the number of a word, in the text, among three others. `niah_multikey_2`: in
  a list of words and numbers. `niah_multikey_3`: in a list of pairs of UUIDs.
- `niah_multivalue`: four numbers of one word. `niah_multiquery`: the numbers of four words.
- `vt`: variables that get a number from each other.
- `cwe`: the ten most common words of a list.
- `fwe`: the three most frequent words of a coded text.
"""

RULER_QA = "qa_1"
"""RULER's name of the task of SQuAD's questions: a paragraph that answers, among others.

RULER's `qa_2`, of HotpotQA, is this task with a file of HotpotQA in SQuAD's format.
"""


def ruler(
    name: str,
    tokenizer: Any,
    text: str,
    *,
    length: int,
    cases: int,
    seed: int,
    frame: Frame,
    data: str | os.PathLike[str] | None = None,
) -> Task:
    """Makes cases of one of RULER's tasks, each with a prompt of exactly `length` tokens.

    The context is RULER's instruction and text; in `vt` and `cwe`, an example with its answer comes
    before them. The question is RULER's, with the beginning of the answer after the frame's end.
    The text ends when the tokens are used up, in the middle of a sentence or word if necessary.
    Dots take the place of a character that would be cut. Questions differ by a few tokens, and so
    contexts do too.

    A case depends on its number, the task's name and the seed, besides text, tokenizer, length and
    frame. A single needle is at one of RULER's 40 depths. Any 40 consecutive cases have all depths,
    and a few consecutive cases are spread over them. A score is the share of the answers that occur
    in the continuation, and in `qa_1` whether one of them does; upper and lower case are equal.

    Args:
      name: a name in `RULER_TASKS`, or `RULER_QA`.
      tokenizer: tokenizer of the model, from `transformers`.
      text: haystack for the needles of `niah_single_2` and `_3`, `niah_multikey_1`,
        `niah_multivalue` and `niah_multiquery`. RULER uses essays of Paul Graham.
      length: tokens of every prompt, with the frame.
      cases: number of cases, from number 0 on.
      seed: seed of all random choices.
      frame: the tokens around a user's text.
      data: for `qa_1`, a file in the format of SQuAD, or the folder of one, as for `squad`.

    Raises:
      ValueError: the name is unknown, the length is too small for the task, the text is too short,
        `qa_1` has no data or data in another format, or `wonderwords` is not installed, which all
        tasks with words need.
      OSError: the data cannot be read.

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
      - RULER's lengths count the new tokens too, and a prompt ends before the first sentence, line
        or word that does not fit. Here the prompt alone has the length, exactly.
      - The text begins at a random sentence, not always at its first one, and continues from its
        beginning after its end. It is not repeated.
      - The depth of the needle that is asked for cycles through RULER's depths and is not random.
        RULER has these depths for needles in the text alone; here noise, lists and `vt` use them
        too. RULER draws the lines after which such a sentence is hidden.
      - The prompt of `vt` ends with a colon, without the space after it, so that a new token can
        begin with the space. Its example has fewer lines of noise in prompts below 4,096 tokens.
      - Words of the example of `cwe` are not in its list.
      - The questions of `qa_1` are drawn, and do not come in the order of the data. Paragraphs of
        the same article come into the prompt first, as in RULER, and the last paragraph is cut off
        where the tokens are used up.
    """
    check_choice("the task of RULER", name, (*RULER_TASKS, RULER_QA))
    check_count("length", length, 1)
    check_count("cases", cases, 1)
    check_count("seed", seed, 0, most=math.inf)
    encoder, sentences = Encoder(tokenizer), sentences_of(text)
    articles = read_articles(data)[1] if name == RULER_QA else []
    name_hash = zlib.crc32(name.encode())
    task_cases = []
    for number in range(cases):
        rng = np.random.default_rng((seed, name_hash, number))
        if name in NEEDLES:
            # Steps of 23 reach all 40 depths, since 23 and 40 have no common divisor. They spread
            # few cases evenly, since 23 is about 40 divided by the golden ratio.
            depth = DEPTHS[(seed + name_hash + 23 * number) % len(DEPTHS)]
            prompt = needles(NEEDLES[name], encoder, rng, depth, sentences)
            most_new = _NEEDLES_NEW
        elif name == RULER_QA:
            prompt, most_new = article_questions(encoder, rng, articles), _ANSWER_NEW
        else:
            make, most_new = _OTHER_TASKS[name]
            prompt = make(encoder, rng, length)
        task_cases.append(_case(name, encoder, prompt, length, frame, most_new))
    score = _any_of_answers if name == RULER_QA else _share_of_answers
    return Task(name, tuple(task_cases), score, "accuracy")


def _case(
    name: str, encoder: Encoder, prompt: Prompt, length: int, frame: Frame, most_new: int
) -> Case:
    """Returns the case as tokens, with the body at the length that the prompt needs."""
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
    """Returns RULER's score of generated tasks; answers are random, so it is 0 without context."""
    return sum(answer.lower() in text.lower() for answer in case.answers) / len(case.answers)


def _any_of_answers(text: str, case: Case) -> float:
    """Returns RULER's score of questions about articles, whose answers have several wordings."""
    return float(any(answer.lower() in text.lower() for answer in case.answers))
