"""Interface of all tasks: cases with a context and a question, and a score for an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvjax.generation.chat import MESSAGE, TEXT, chat_parts, with_start

NATS = "nats per token"
"""Metric of scores that are losses, of which the lower one is better."""


@dataclass(frozen=True)
class Case:
    """A prompt in two parts, between which a cache may be compressed, and its answers.

    Args:
      context: token ids that are read first, with the special tokens that a prompt begins with.
      question: token ids that follow. They include what a chat template puts after a message, and
        the beginning of the answer if the task gives one.
      answers: reference texts for the metric.
      max_new: maximum number of new tokens.
      depth: share of the context, from 0 to 1, that comes before the text that is asked for; None
        by default, and if that text has no single place.
      details: further inputs of the score, such as the classes of a classification; empty by
        default.

    Example:
      >>> from kvjax.evaluation import Case
      >>> Case(context=[1, 5, 9], question=[7], answers=("a fox",), max_new=8).prompt
      [1, 5, 9, 7]
    """

    context: list[int]
    question: list[int]
    answers: tuple[str, ...]
    max_new: int
    depth: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prompt(self) -> list[int]:
        """Token ids of context and question."""
        return self.context + self.question


@dataclass(frozen=True)
class Task:
    """A task with its cases.

    Args:
      name: name on the command line, such as `"niah_single_1"` or `"multi_news"`.
      cases: the cases in order.
      score: `score(text, case)` rates the continuation of a case from 0 to 1. None: nothing is
        generated, and the score is the loss of the case's `details["answer_tokens"]`. Of cases
        with an equal `details["passage"]`, scores are not independent.
      metric: name of the mean score, such as `"accuracy"`, `"ROUGE-L"` or, of a loss, `NATS`.
      floor: mean score, 0 to 1, that is reached without the context. If the full cache is not
        better than that by more than chance, the task shows nothing. None for a loss: what it is
        without the context is measured.

    Example:
      >>> from kvjax.evaluation import Case, Task
      >>> case = Case(context=[1, 5, 9], question=[7], answers=("a fox",), max_new=8)
      >>> task = Task("animals", (case,), score=lambda text, case: float(case.answers[0] in text),
      ...             metric="accuracy")
      >>> task.score(" It was a fox.", task.cases[0]), task.score(" A dog.", task.cases[0])
      (1.0, 0.0)
    """

    name: str
    cases: tuple[Case, ...]
    score: Callable[[str, Case], float] | None
    metric: str
    floor: float | None = 0.0


@dataclass(frozen=True)
class Frame:
    """Tokens around a user's text: those of a chat template, or the special tokens at the start.

    Args:
      before, after: token ids; none come after by default.

    Example:
      >>> from kvjax.evaluation import Case, Frame
      >>> frame = Frame(before=(1,), after=(2, 3))  # Frame.of makes that of a tokenizer
      >>> Case([*frame.before, 5, 9], [7, *frame.after], answers=("a fox",), max_new=8).prompt
      [1, 5, 9, 7, 2, 3]
    """

    before: tuple[int, ...]
    after: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Any, chat: bool) -> Frame:
        """Makes the frame of the tokenizer's chat template, or the frame without a template.

        In a template's frame, the answer begins after `after`.

        Raises:
          ValueError: `chat` is true, and the tokenizer has no chat template, or the template fails.

        Example:
          >>> from kvjax.evaluation.tasks import Frame
          >>> from kvjax.models import demo, load_tokenizer
          >>> Frame.of(load_tokenizer(demo.directory()), chat=False).after
          ()
        """
        if not chat:
            encoded = tokenizer("a", return_special_tokens_mask=True)
            return cls(tuple(encoded.input_ids[: encoded.special_tokens_mask.index(0)]))
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError("chat needs a chat template: the model's tokenizer has none")
        parts = chat_parts(tokenizer, [MESSAGE], TEXT)
        before, after = (tokenizer(part, add_special_tokens=False).input_ids for part in parts)
        return cls(tuple(with_start(tokenizer, before)), tuple(after))
