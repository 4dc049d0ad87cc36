"""Questions about passages of SQuAD, whose right answers have a loss."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvjax.checks import check_count
from kvjax.messages import brief, one_line, printable

from .encoder import Encoder
from .task import NATS, Case, Frame, Task

SQUAD = "squad"
"""Name of the task of SQuAD's questions."""

_FILES = ("dev-v2.0.json", "dev-v1.1.json")  # SQuAD's names of its development sets


_OPENING = "Passage:"


class _Question(NamedTuple):
    """Tokens of a question and of its shortest right answer, and the answer's text."""

    tokens: list[int]
    answer_tokens: tuple[int, ...]
    answer: str


class _Paragraph(NamedTuple):
    """Tokens of a paragraph, and its questions that have an answer."""

    tokens: list[int]
    questions: list[_Question]


def squad(
    tokenizer: Any,
    *,
    data: str | os.PathLike[str] | None,
    length: int,
    cases: int,
    frame: Frame,
    questions: int = 5,
) -> Task:
    """Makes questions about passages of SQuAD, scored by the loss of their right answers.

    A passage is made of consecutive paragraphs of one article: as many as leave room for their
    questions in a prompt of `length` tokens. It is the context of several cases. The
    score of a case is the loss, in nats per token, of the shortest right answer of the question: of
    the one with the fewest tokens, and of several such answers the first. Lower is better. The
    answer follows `Answer:` and is not generated, so a small change of a cache shows, and so does a
    model that finds the answer and words it differently.

    The first passages of all articles come first, then the second ones, and so on. The questions of
    a passage are spread evenly over those of its paragraphs. Questions without an answer are left
    out, and so is the last passage of an article, which may be shorter, unless it is the only one.

    Args:
      tokenizer: tokenizer of the model, from `transformers`.
      data: file in the format of SQuAD 1.1 or 2.0, or a folder with SQuAD's `dev-v2.0.json` or
        `dev-v1.1.json`.
      length: maximum tokens of a prompt: of the frame, a passage and one of its questions.
      cases: number of questions, from the first on.
      frame: the tokens around a user's text.
      questions: maximum number of questions about a passage; 5.

    Returns:
      The task. In the `details` of a case, `"answer_tokens"` are the token ids of the answer, and
      `"passage"` is the number of the passage.

    Raises:
      ValueError: there is no data, it is not in SQuAD's format or has too few questions, or the
        length is too small for every paragraph.
      OSError: the file cannot be read.

    Example:
      >>> import json, tempfile
      >>> from kvjax.evaluation.tasks import Frame, squad
      >>> from kvjax.models import demo, load_tokenizer
      >>> tokenizer = load_tokenizer(demo.directory())
      >>> question = {"question": "Where?", "answers": [{"text": "in port"}, {"text": "port"}]}
      >>> paragraph = {"context": "The boats are in port.", "qas": [question]}
      >>> with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
      ...     json.dump({"data": [{"paragraphs": [paragraph]}]}, file)
      ...     file.flush()
      ...     frame = Frame.of(tokenizer, chat=False)
      ...     task = squad(tokenizer, data=file.name, length=64, cases=1, frame=frame)
      >>> task.cases[0].answers
      ('port',)

    References:
      Rajpurkar et al., Know What You Don't Know: Unanswerable Questions for SQuAD, 2018,
      arXiv:1806.03822.

    Deviations from the paper:
      - SQuAD asks about one paragraph, and scores the words of an answer that is given. Here a
        passage has several paragraphs, and the score is the loss of a right answer.
      - Questions without an answer are left out.
    """
    for name, count in (("length", length), ("cases", cases), ("questions", questions)):
        check_count(name, count, 1)
    path, articles = read_articles(data)
    encoder, passages = Encoder(tokenizer), []
    before = [*frame.before, *encoder.first(_OPENING)]
    for article in articles:
        paragraphs = [_paragraph(encoder, frame, paragraph) for paragraph in article]
        passages.append(list(_passages(paragraphs, length - len(before))))
    if not any(passages):
        raise ValueError(
            f"a prompt of {length} tokens is too short for every paragraph of {printable(path)} "
            "that has a question with an answer"
        )
    by_turns = itertools.chain.from_iterable(itertools.zip_longest(*passages))
    found = [
        case
        for number, passage in enumerate(passage for passage in by_turns if passage)
        for case in _cases(before, passage, number, questions)
    ]
    if cases > len(found):
        raise ValueError(f"cases must be at most the {len(found)} of the data, got {cases}")
    return Task(SQUAD, tuple(found[:cases]), None, NATS, floor=None)


def _paragraph(encoder: Encoder, frame: Frame, paragraph: dict[str, Any]) -> _Paragraph:
    """Returns the tokens of a paragraph, which follows a blank line, and of its questions."""
    # A template ends a message between a question and the beginning of the answer.
    reply = encoder.first("Answer:") if frame.after else encoder.next("\n\nAnswer:")
    questions = []
    for entry in paragraph["qas"]:
        if not entry.get("is_impossible", False):
            texts = [answer["text"] for answer in entry["answers"]]
            tokens, text = min(
                ((encoder.next(f" {text}"), text) for text in texts), key=lambda x: len(x[0])
            )
            asked = encoder.next(f"\n\nQuestion: {entry['question']}")
            questions.append(_Question([*asked, *frame.after, *reply], tokens, text))
    return _Paragraph(list(encoder.next(f"\n\n{paragraph['context']}")), questions)


def _passages(paragraphs: Sequence[_Paragraph], room: int) -> Iterator[list[_Paragraph]]:
    """Yields the passages of an article that have a question.

    A paragraph that has no room alone begins a new passage, and is left out.

    Args:
      paragraphs: those of the article.
      room: maximum tokens of a passage and one of its questions.
    """
    passages: list[list[_Paragraph]] = [[]]
    for paragraph in paragraphs:
        if passages[-1] and _tokens([*passages[-1], paragraph]) > room:
            passages.append([])
        if _tokens([paragraph]) <= room:
            passages[-1].append(paragraph)
    for passage in passages[:-1] or passages:
        if any(paragraph.questions for paragraph in passage):
            yield passage


def _tokens(passage: Sequence[_Paragraph]) -> int:
    """Returns the tokens of a passage and of its longest question."""
    questions = [question for paragraph in passage for question in paragraph.questions]
    longest = max((len(question.tokens) for question in questions), default=0)
    return sum(len(paragraph.tokens) for paragraph in passage) + longest


def _cases(
    before: Sequence[int], passage: Sequence[_Paragraph], number: int, most: int
) -> Iterator[Case]:
    """Yields at most `most` questions about a passage, spread evenly over all of them.

    Args:
      before: tokens before the passage.
      passage: its paragraphs.
      number: number of the passage.
      most: maximum number of questions.
    """
    context = [*before, *(token for paragraph in passage for token in paragraph.tokens)]
    questions = [question for paragraph in passage for question in paragraph.questions]
    count = min(most, len(questions))
    for index in np.linspace(0, len(questions) - 1, count).round().astype(int):
        question = questions[index]
        details = {"passage": number, "answer_tokens": question.answer_tokens}
        yield Case(
            context, question.tokens, (question.answer,), len(question.answer_tokens),
            details=details,
        )  # fmt: skip


def read_articles(data: str | os.PathLike[str] | None) -> tuple[Path, list[list[dict[str, Any]]]]:
    """Reads the paragraphs of each article, and checks what is used of them.

    Raises:
      ValueError: there is no data, or it is not in SQuAD's format.
      OSError: the file cannot be read.
    """
    if data is None:
        raise ValueError("questions of SQuAD need data: a file in its format, or its folder")
    path = Path(data)
    if path.is_dir():
        files = [path / name for name in _FILES if (path / name).exists()]
        if not files:
            raise ValueError(f"{printable(path)} has no {' or '.join(_FILES)}")
        path = files[0]
    try:
        try:
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is not JSON: {one_line(error)}") from error
        articles = []
        for article, at in _items(content, "data", "the file"):
            paragraphs = [paragraph for paragraph, _ in _checked_paragraphs(article, at)]
            articles.append(paragraphs)
    except ValueError as error:
        raise ValueError(f"{printable(path)} must be in the format of SQuAD: {error}") from error
    return path, articles


def _checked_paragraphs(article: Any, at: str) -> Iterator[tuple[Any, str]]:
    """Yields the paragraphs of an article; raises ValueError if a field is not as it must be."""
    for paragraph, place in _items(article, "paragraphs", at):
        _field(paragraph, "context", str, place)
        for question, asked in _items(paragraph, "qas", place):
            _field(question, "question", str, asked)
            if not question.get("is_impossible", False):
                answers = [answer for answer in _items(question, "answers", asked)]
                if not answers:
                    raise ValueError(f"answers of {asked} must not be empty")
                for answer, given in answers:
                    if not _field(answer, "text", str, given).strip():
                        raise ValueError(f"text of {given} must not be empty")
        yield paragraph, place


def _items(parent: Any, name: str, at: str) -> Iterator[tuple[Any, str]]:
    """Yields the elements of a list, each with its place in the file."""
    for number, item in enumerate(_field(parent, name, list, at)):
        yield item, f"{name}[{number}]" if name == "data" else f"{at}.{name}[{number}]"


def _field(parent: Any, name: str, wanted: type, at: str) -> Any:
    """Returns a field of an object; raises ValueError if it has another type."""
    if not isinstance(parent, dict):
        raise ValueError(f"{at} must be an object, got {brief(parent)}")
    value = parent.get(name)
    if not isinstance(value, wanted):
        raise ValueError(f"{name} of {at} must be {wanted.__name__}, got {brief(value)}")
    return value
