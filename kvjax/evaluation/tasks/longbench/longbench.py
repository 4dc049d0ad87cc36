"""LongBench: 21 tasks in English and Chinese, with their own prompts, lengths and metrics."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kvjax.budgets.budgets import check_choice
from kvjax.evaluation.tasks import metrics
from kvjax.evaluation.tasks.metrics import Metric, library
from kvjax.evaluation.tasks.prompts import (
    cut_middle,
    first,
    frame_for,
    others_answers,
    split_tokens,
)
from kvjax.evaluation.tasks.records import (
    MOST_BYTES,
    TEXT,
    TEXTS,
    Record,
    find_file,
    parse_records,
    read_records,
)
from kvjax.evaluation.tasks.task import Case, Task
from kvjax.messages import brief, one_line

from . import chinese
from .tables import MAX_NEW, PROMPTS

LONGBENCH: tuple[str, ...] = tuple(PROMPTS)
"""Names of the tasks."""

_FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")  # examples that models go on to add to
_PLAIN = (*_FIRST_LINE, "lcc", "repobench-p")  # no chat template

_CLASSES = "all_classes"  # what a classification needs beside the answers

_HUB, _ARCHIVE = "THUDM/LongBench", "data.zip"

_METRICS: Mapping[Metric, str] = {
    metrics.f1: "F1", chinese.f1_zh: "F1", metrics.rouge_l: "ROUGE-L",
    chinese.rouge_l_zh: "ROUGE-L", metrics.classification: "accuracy", metrics.count: "accuracy",
    metrics.retrieval: "accuracy", metrics.code_similarity: "edit similarity",
}  # fmt: skip
_PACKAGES: Mapping[Metric, tuple[str, ...]] = {
    chinese.f1_zh: ("jieba",), metrics.rouge_l: ("rouge",),
    chinese.rouge_l_zh: ("rouge", "jieba"),
}  # fmt: skip
_METRIC_OF: Mapping[str, Metric] = {
    "narrativeqa": metrics.f1, "qasper": metrics.f1, "multifieldqa_en": metrics.f1,
    "multifieldqa_zh": chinese.f1_zh, "hotpotqa": metrics.f1, "2wikimqa": metrics.f1,
    "musique": metrics.f1, "dureader": chinese.rouge_l_zh, "gov_report": metrics.rouge_l,
    "qmsum": metrics.rouge_l, "multi_news": metrics.rouge_l, "vcsum": chinese.rouge_l_zh,
    "trec": metrics.classification, "triviaqa": metrics.f1, "samsum": metrics.rouge_l,
    "lsht": metrics.classification, "passage_count": metrics.count,
    "passage_retrieval_en": metrics.retrieval, "passage_retrieval_zh": metrics.retrieval,
    "lcc": metrics.code_similarity, "repobench-p": metrics.code_similarity,
}  # fmt: skip


def longbench(
    name: str,
    tokenizer: Any,
    *,
    data: str | Path | None = None,
    length: int | None = None,
    cases: int | None = None,
    chat: bool | None = None,
) -> Task:
    """A task of LongBench, with the benchmark's prompts.

    What a prompt has up to the end of its text is the context, what follows the question: the
    question itself, or the request for a summary.

    Args:
      name: one of `LONGBENCH`.
      tokenizer: of the model, from `transformers`.
      data: folder with `<name>.jsonl`, or with `data/<name>.jsonl` as the hub's archive has it; or
        the file. None for that archive, which is downloaded.
      length: most tokens of a prompt, chat template included; of a longer one the middle is left
        out. None for whole prompts.
      cases: how many of the first records; None for all.
      chat: whether the prompt stands in the chat template. None for what the benchmark does: where
        the tokenizer has one, except for tasks of examples and of code.

    Returns:
      The task. `100 ·` its mean score is the benchmark's figure. Its floor is the mean score of
      answers that belong to other cases.

    Raises:
      ValueError: an unknown name; data that is absent, damaged or too little; a length that leaves
        no room for the context; a package that is not installed.

    Example:
      >>> from kvjax.evaluation.tasks.longbench.longbench import longbench
      >>> from kvjax.models import load_tokenizer
      >>> tokenizer = load_tokenizer("smollm2")  # doctest: +SKIP
      >>> task = longbench("multi_news", tokenizer, data="longbench", length=2048)  # doctest: +SKIP
      >>> len(task.cases), task.metric  # doctest: +SKIP
      (200, 'ROUGE-L')

    Deviations from the paper:
      - The benchmark cuts a prompt to a number of tokens, decodes it, puts it into the chat
        template and encodes it again. Here tokens are cut and never decoded, and the template
        counts. Prompts differ at the cut, where a character or a word may be halved.
      - A question is never cut.
      - Special tokens that a text spells out are read as text.
      - Answers of `samsum` end at a line end: the benchmark stops there, here the rest is left out.

    References:
      Bai et al., LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding, 2023,
      arXiv:2308.14508; github.com/THUDM/LongBench.
    """
    check_choice("name", name, LONGBENCH)
    metric = _METRIC_OF[name]
    for package in _PACKAGES.get(metric, ()):
        library(package)
    frame = frame_for(tokenizer, chat, name in _PLAIN)
    before, after = PROMPTS[name].split("{context}")
    fields = _fields(name)
    made = []
    for record in first(_records(name, data, fields), cases):
        question = after.replace("{input}", record["input"])
        parts = split_tokens(tokenizer, before + record["context"], question)
        made.append(
            Case(
                *cut_middle(frame, *parts, length),
                answers=tuple(record["answers"]),
                max_new=MAX_NEW[name],
                details={field: record[field] for field in fields if field == _CLASSES},
            )
        )
    score = partial(score_longbench, name)
    return Task(name, tuple(made), score, _METRICS[metric], others_answers(made, score))


def score_longbench(name: str, text: str, case: Case) -> float:
    """The score of an answer to a case of the task `name`, 0 to 1: the best over its references.

    Example:
      >>> from kvjax.evaluation.tasks import Case
      >>> from kvjax.evaluation.tasks.longbench.longbench import score_longbench
      >>> score_longbench("triviaqa", "Paris\\nPassage: more", Case([], [], ("Paris", "Lyon"), 32))
      1.0
    """
    if name in _FIRST_LINE:
        text = text.lstrip("\n").split("\n")[0]
    metric = _METRIC_OF[name]
    return max(metric(text, answer, **case.details) for answer in case.answers)


def _fields(name: str) -> dict[str, str]:
    fields = {"context": TEXT, "input": TEXT, "answers": TEXTS}
    if _METRIC_OF[name] is metrics.classification:
        fields[_CLASSES] = TEXTS
    return fields


def _check(name: str, record: Record) -> None:
    of = record.get("dataset", name)  # LongBench-E has the same tasks with this ending
    if of not in (name, f"{name}_e"):
        raise ValueError(f"it is a record of {brief(of)}, expected one of {name}")
    numbered = (re.search(r"\d", answer) for answer in record["answers"])
    if _METRIC_OF[name] is metrics.retrieval and not all(numbered):
        raise ValueError(f"answers must name a number, got {brief(record['answers'])}")


def _records(name: str, data: str | Path | None, fields: Mapping[str, str]) -> list[Record]:
    member, check = f"data/{name}.jsonl", partial(_check, name)
    if data is not None:
        return read_records(find_file(data, (f"{name}.jsonl", member)), fields, check)
    archive = _download()
    where = f"{member} of {archive}"
    try:
        with zipfile.ZipFile(archive) as files, files.open(member) as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"cannot read {where}: {one_line(error)}") from error
    if len(content) > MOST_BYTES:
        raise ValueError(f"cannot read {where}: it has more than {MOST_BYTES:,} bytes")
    return parse_records(content, where, fields, check)


def _download() -> Path:
    # Imported here: most callers have a folder, and the client takes a while to import.
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(_HUB, _ARCHIVE, repo_type="dataset"))
    except Exception as error:  # the client's failures have no common base
        raise ValueError(
            "LongBench cannot be downloaded from Hugging Face, give the folder of its data: "
            f"{one_line(error)}"
        ) from error
