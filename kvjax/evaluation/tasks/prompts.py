"""Prompts of data sets: context and question as tokens, and what is left out of a long one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from kvjax.budgets.budgets import check_count

from .task import Case, Frame


def frame_for(tokenizer: Any, chat: bool | None, plain: bool) -> Frame:
    """The frame around a prompt.

    Args:
      tokenizer: of the model, from `transformers`.
      chat: whether there is a chat template; None for what the benchmark does, which is a template
        where the tokenizer has one, but not around a `plain` prompt.
      plain: whether the prompt is one of examples to go on with, or code.

    Raises:
      ValueError: a chat template is wanted and the tokenizer has none.
    """
    if chat is None:
        chat = not plain and getattr(tokenizer, "chat_template", None) is not None
    return Frame.of(tokenizer, chat)


def split_tokens(tokenizer: Any, context: str, question: str) -> tuple[list[int], list[int]]:
    """The tokens of `context + question`, divided where the question begins.

    They are those of the whole text: a token across the border belongs to the question. Special
    tokens that are spelled out are read as text.

    Raises:
      ValueError: the tokenizer cannot say which characters a token stands for.

    Example:
      >>> from kvjax.evaluation.tasks.prompts import split_tokens
      >>> from kvjax.models import demo, load_tokenizer
      >>> tokenizer = load_tokenizer(demo.directory())
      >>> [tokenizer.decode(part) for part in split_tokens(tokenizer, "Old boats.", "Who?")]
      ['Old boats.', 'Who?']
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError("data sets need a tokenizer with a tokenizer.json, the model's has none")
    encoded = tokenizer(
        context + question, add_special_tokens=False, split_special_tokens=True,
        return_offsets_mapping=True, verbose=False,
    )  # fmt: skip
    ends = [end for _, end in encoded.offset_mapping]
    border = bisect_right(ends, len(context))
    return encoded.input_ids[:border], encoded.input_ids[border:]


def cut_middle(
    frame: Frame, context: Sequence[int], question: Sequence[int], length: int | None
) -> tuple[list[int], list[int]]:
    """Context and question of a prompt of at most `length` tokens, without its middle.

    As LongBench does it, the prompt's first and last tokens stay, half and half. The question stays
    whole: where it has more than half, the front has less. The frame counts.

    Raises:
      ValueError: frame and question leave no token for the context.

    Example:
      >>> from kvjax.evaluation.tasks import Frame
      >>> from kvjax.evaluation.tasks.prompts import cut_middle
      >>> cut_middle(Frame((0,)), range(1, 10), [10, 11], length=8)
      ([0, 1, 2, 3, 8, 9], [10, 11])
    """
    room = _room(frame, question, length)
    kept = list(context)
    if room is not None and room < len(kept):
        front = min((room + len(question)) // 2, room)
        kept = kept[:front] + kept[len(kept) - (room - front) :]
    return [*frame.before, *kept], [*question, *frame.after]


def cut_end(
    frame: Frame, context: Sequence[int], question: Sequence[int], length: int | None
) -> tuple[list[int], list[int]]:
    """As `cut_middle`, without the end of the context."""
    room = _room(frame, question, length)
    return [*frame.before, *context[:room]], [*question, *frame.after]


def _room(frame: Frame, question: Sequence[int], length: int | None) -> int | None:
    """How many tokens of the context a prompt has room for; None where it has any."""
    if length is None:
        return None
    check_count("length", length, 1)
    other = len(frame.before) + len(question) + len(frame.after)
    if length <= other:
        raise ValueError(
            f"a prompt of {length} tokens is too short: question and template have {other}"
        )
    return length - other


def first(records: Sequence[Any], cases: int | None, name: str = "cases") -> Sequence[Any]:
    """The first so many records; all for None. Messages call their number by `name`.

    Raises:
      ValueError: there are not so many.
    """
    if cases is None:
        return records
    check_count(name, cases, 1)
    if cases > len(records):
        raise ValueError(
            f"{name} must be at most {len(records)}, as many as the data has, got {cases}"
        )
    return records[:cases]


def others_answers(cases: Sequence[Case], score: Callable[[str, Case], float]) -> float:
    """A floor: the mean score of the answer that belongs to the next case; 0 for one case.

    Such answers have the right form and know nothing of the context.
    """
    if len(cases) < 2:
        return 0.0
    pairs = zip(cases, [*cases[1:], cases[0]], strict=True)
    return sum(score(other.answers[0], case) for case, other in pairs) / len(cases)
