"""ZeroSCROLLS: ten tasks on long English texts, from files of the benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kvjax.budgets.budgets import check_choice, check_count
from kvjax.messages import brief

from . import metrics
from .metrics import Metric, library
from .prompts import cut_end, first, frame_for, others_answers, split_tokens
from .records import INDEX, TEXT, Record, find_file, read_records
from .task import Case, Frame, Task

_PREFIX = "zeroscrolls_"
_ROUGE = metrics.rouge_geometric_mean, "ROUGE (geometric mean)"
_F1 = metrics.f1, "F1"
_TASKS: Mapping[str, tuple[Metric, str, int]] = {  # metric, its name, most new tokens
    "gov_report": (*_ROUGE, 1024),
    "summ_screen_fd": (*_ROUGE, 512),
    "qmsum": (*_ROUGE, 512),
    "squality": (*_ROUGE, 512),
    "qasper": (*_F1, 128),
    "narrative_qa": (*_F1, 64),
    "musique": (*_F1, 32),
    "quality": (metrics.choice, "accuracy", 10),
    "space_digest": (metrics.exponential_similarity, "exponential similarity", 36),
    "book_sum_sort": (metrics.concordance, "concordance index", 256),
}

ZEROSCROLLS: tuple[str, ...] = tuple(_PREFIX + name for name in _TASKS)
"""Names of the tasks, which begin with `zeroscrolls_`, as LongBench has some of the same names."""

_FIELDS = {
    "id": TEXT, "input": TEXT, "output": TEXT, "query_start_index": INDEX,
    "truncation_seperator": TEXT,
}  # fmt: skip


def zeroscrolls(
    name: str,
    tokenizer: Any,
    *,
    data: str | Path,
    length: int | None = None,
    cases: int | None = None,
    chat: bool | None = None,
) -> Task:
    """A task of ZeroSCROLLS, with the prompts that its files hold.

    What stands before the query is the context. The end of a long context is left out, and the
    question begins with the record's separator, which says so.

    Args:
      name: one of `ZEROSCROLLS`.
      tokenizer: of the model, from `transformers`.
      data: folder with `<task>.jsonl` or, as the benchmark's archives have it,
        `<task>/validation.jsonl`, where `<task>` is the name without its beginning; or the file.
        Records of one `id` are one case with several answers. The benchmark does not publish the
        answers of its test split.
      length: most tokens of a prompt, chat template included; None for whole prompts.
      cases: how many of the first; None for all.
      chat: whether the prompt stands in the chat template; None where the tokenizer has one.

    Raises:
      ValueError: an unknown name; data that is absent, damaged or too little; a length that leaves
        no room for the context; a package that is not installed.

    Example:
      >>> from kvjax.evaluation.tasks.zeroscrolls import zeroscrolls
      >>> from kvjax.models import load_tokenizer
      >>> tokenizer = load_tokenizer("smollm2")  # doctest: +SKIP
      >>> zeroscrolls("zeroscrolls_quality", tokenizer, data="zero").metric  # doctest: +SKIP
      'accuracy'

    Deviations from the paper:
      - The benchmark takes the geometric mean of the three mean ROUGE scores of a task, here it is
        taken of every case, and the mean of those is the score. It is never more.
      - F1 is that of LongBench, in which letters with and without accents differ. The benchmark
        writes all letters in ASCII first.

    References:
      Shaham et al., ZeroSCROLLS: A Zero-Shot Benchmark for Long Text Understanding, 2023,
      arXiv:2305.14196; lengths of answers: github.com/tau-nlp/zero_scrolls, `experiments/api`.
    """
    check_choice("name", name, ZEROSCROLLS)
    if length is not None:
        check_count("length", length, 1)
    task = name.removeprefix(_PREFIX)
    metric, label, max_new = _TASKS[task]
    if metric is metrics.rouge_geometric_mean:
        library("rouge_score.rouge_scorer")
    path = find_file(data, (f"{task}.jsonl", f"{task}/validation.jsonl"))
    frame = frame_for(tokenizer, chat, plain=False)
    made = []
    for records in first(_by_id(path), cases):
        prompt = _prompt(tokenizer, frame, records[0], length)
        answers = tuple(record["output"] for record in records)
        made.append(Case(*prompt, answers, max_new))
    score = partial(_score, metric)
    return Task(name, tuple(made), score, label, others_answers(made, score))


def _score(metric: Metric, text: str, case: Case) -> float:
    return max(metric(text, answer) for answer in case.answers)


def _prompt(
    tokenizer: Any, frame: Frame, record: Record, length: int | None
) -> tuple[list[int], list[int]]:
    start = record["query_start_index"]
    context, query = record["input"][:start], record["input"][start:]
    parts = split_tokens(tokenizer, context, query)
    if length is not None and len(frame.before) + len(frame.after) + sum(map(len, parts)) > length:
        parts = split_tokens(tokenizer, context, record["truncation_seperator"] + query)
    return cut_end(frame, *parts, length)


def _by_id(path: Path) -> list[list[Record]]:
    """The records of each `id`."""
    groups: dict[str, list[Record]] = {}
    for record in read_records(path, _FIELDS, _check):
        groups.setdefault(record["id"], []).append(record)
    return list(groups.values())


def _check(record: Record) -> None:
    start, size = record["query_start_index"], len(record["input"])
    if not 0 < start < size:
        raise ValueError(
            f"query_start_index must lie inside the input of {size} characters, got {brief(start)}"
        )
