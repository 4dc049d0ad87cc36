"""GSM8K: problems of grade-school mathematics, solved step by step after worked examples."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

from kvjax.budgets.budgets import check_choice, check_count
from kvjax.messages import brief

from .prompts import first, frame_for, others_answers, split_tokens
from .records import TEXT, Record, find_file, read_records
from .task import Case, Task

GSM8K = ("gsm8k", "gsm8k_strict")
"""Names of the tasks: the last number of an answer counts, or the one behind `####`."""

_MAX_NEW = 256
_FIELDS = {"question": TEXT, "answer": TEXT}
_NUMBER = {
    "gsm8k": re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+"),
    "gsm8k_strict": re.compile(r"#### (-?[0-9.,]+)"),
}


def gsm8k(
    name: str,
    tokenizer: Any,
    *,
    data: str | Path,
    length: int | None = None,
    cases: int | None = None,
    chat: bool | None = None,
    shots: int = 8,
    examples: str | Path | None = None,
) -> Task:
    """GSM8K: the context is worked examples, the same for all cases, the question a problem.

    Args:
      name: one of `GSM8K`.
      tokenizer: of the model, from `transformers`.
      data: folder with `test.jsonl`, or the file; records have `question` and `answer`.
      length: most tokens of a prompt; None for any. Examples are not cut: give fewer.
      cases: how many problems; None for all.
      chat: whether the prompt stands in the chat template; None for no.
      shots: worked examples, those at the beginning of `examples`.
      examples: file with the same fields, such as `train.jsonl`. None for the data itself, whose
        first records are then no cases.

    Returns:
      The task. Its floor is the mean score of solutions of other problems.

    Raises:
      ValueError: an unknown name; data that is absent, damaged or too little; a prompt of more than
        `length` tokens.

    Example:
      >>> from kvjax.evaluation.tasks.gsm8k import gsm8k
      >>> from kvjax.models import load_tokenizer
      >>> tokenizer = load_tokenizer("smollm2")  # doctest: +SKIP
      >>> len(gsm8k("gsm8k", tokenizer, data="gsm8k", cases=20).cases)  # doctest: +SKIP
      20

    Deviations from the harness:
      - It shows 5 worked examples, drawn from the training set.

    References:
      Cobbe et al., Training Verifiers to Solve Math Word Problems, 2021, arXiv:2110.14168. Form of
      prompts and both scores: task `gsm8k` of EleutherAI's lm-evaluation-harness.
    """
    check_choice("name", name, GSM8K)
    if length is not None:
        check_count("length", length, 1)
    problems = read_records(find_file(data, ("test.jsonl",)), _FIELDS, _check)
    solved = problems if examples is None else read_records(Path(examples), _FIELDS, _check)
    worked = first(solved, shots, "shots")
    if examples is None:
        problems = problems[shots:]
    if not problems:
        raise ValueError(f"all {shots} records are worked examples: fewer shots leave problems")
    frame = frame_for(tokenizer, chat, plain=True)
    context = "".join(f"{_asked(record)} {record['answer']}\n\n" for record in worked)
    made = []
    for record in first(problems, cases):
        start, question = split_tokens(tokenizer, context, _asked(record))
        made.append(
            Case([*frame.before, *start], [*question, *frame.after], (record["answer"],), _MAX_NEW)
        )
    longest = max(len(case.prompt) for case in made)
    if length is not None and longest > length:
        raise ValueError(
            f"a prompt of {shots} worked examples and a problem has {longest} tokens, "
            f"more than {length}"
        )
    score = partial(score_gsm8k, name)
    return Task(name, tuple(made), score, "accuracy", others_answers(made, score))


def score_gsm8k(name: str, text: str, case: Case) -> float:
    """Whether the number that an answer ends with is that of the case's solution.

    An answer ends where the next problem begins.

    Example:
      >>> from kvjax.evaluation.tasks import Case
      >>> from kvjax.evaluation.tasks.gsm8k import score_gsm8k
      >>> case = Case([], [], ("9 * 2 = $18\\n#### 18",), 256)
      >>> score_gsm8k("gsm8k", "She makes $18.", case)
      1.0
      >>> score_gsm8k("gsm8k_strict", "She makes $18.", case)
      0.0
    """
    found = _NUMBER[name].findall(text.split("Question:")[0])
    if not found:
        return 0.0
    number = found[-1] if name == "gsm8k" else found[0]
    (right,) = (answer.rsplit("#### ", 1)[-1] for answer in case.answers)
    return float(_plain(number) == _plain(right))


def _check(record: Record) -> None:
    if re.search(r"#### -?[0-9.,]+\s*\Z", record["answer"]) is None:
        raise ValueError(f"answer must end with #### and a number, got {brief(record['answer'])}")


def _plain(number: str) -> str:
    # As the harness does it: commas and dollars first, and then a point at the end of what is left.
    return re.sub(r"[,$]", "", number.strip()).removesuffix(".")


def _asked(record: Record) -> str:
    return f"Question: {record['question']}\nAnswer:"
