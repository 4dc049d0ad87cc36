"""What every task gives: cases of a context and a question, and a score for an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvjax.generation.chat import MESSAGE, TEXT, chat_parts, with_start


@dataclass(frozen=True)
class Case:
    """One prompt, in the two parts between which a cache may be compressed, and its answers.

    Args:
      context: token ids that are read first, with the special tokens that a prompt begins with.
      question: token ids that follow, with what a chat template puts behind a message and with the
        beginning of the answer, if the task gives one.
      answers: texts that a metric compares with.
      max_new: most new tokens.
      depth: share of the context before what is asked for; None where that has no one place.
      details: what else a score depends on, such as the classes of a classification.
    """

    context: list[int]
    question: list[int]
    answers: tuple[str, ...]
    max_new: int
    depth: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prompt(self) -> list[int]:
        """Context and question."""
        return self.context + self.question


@dataclass(frozen=True)
class Task:
    """A task with the cases that were asked for.

    Args:
      name: as the command line has it, `"niah_single_1"`, `"multi_news"`.
      cases: in order.
      score: of a case's continuation, 0 to 1; `score(text, case)`.
      metric: what the mean of the scores is called, such as `"accuracy"` or `"ROUGE-L"`.
      floor: the mean score, 0 to 1, that needs no context: a full cache that is not better by more
        than chance shows nothing.
    """

    name: str
    cases: tuple[Case, ...]
    score: Callable[[str, Case], float]
    metric: str
    floor: float = 0.0


@dataclass(frozen=True)
class Frame:
    """The tokens around a user's text: those of a chat template, or the special tokens of a start.

    Args:
      before, after: token ids.
    """

    before: tuple[int, ...]
    after: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Any, chat: bool) -> Frame:
        """Of the tokenizer's chat template, whose answer begins behind `after`; or without one.

        Raises:
          ValueError: a chat template is wanted, and the tokenizer has none, or it fails.

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
