"""XSum: news articles, to be summarised in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kvjax.budgets.budgets import check_choice

from . import metrics
from .metrics import Metric, library
from .prompts import cut_middle, first, frame_for, others_answers, split_tokens
from .records import TEXT, find_file, read_records
from .task import Case, Task

_METRICS: Mapping[str, tuple[Metric, str]] = {
    "xsum": (metrics.rouge_2, "ROUGE-2"),
    "xsum_rouge_1": (metrics.rouge_1, "ROUGE-1"),
    "xsum_rouge_l": (metrics.rouge_l, "ROUGE-L"),
}

XSUM: tuple[str, ...] = tuple(_METRICS)
"""Names of the tasks, which differ in the metric; `xsum` is ROUGE-2."""

_BEFORE, _AFTER = "###\nArticle: ", "\n\nSummarize the above article in 1 sentence.\n"
_STOP, _MAX_NEW = "###", 64


def xsum(
    name: str,
    tokenizer: Any,
    *,
    data: str | Path,
    length: int | None = None,
    cases: int | None = None,
    chat: bool | None = None,
) -> Task:
    """XSum with the prompt and the metrics of H2O's experiments.

    Args:
      name: one of `XSUM`.
      tokenizer: of the model, from `transformers`.
      data: folder with `xsum.jsonl`, or the file; records have `document` and `summary`.
      length: most tokens of a prompt, chat template included; of a longer one the middle is left
        out. None for whole prompts.
      cases: how many of the first records; None for all.
      chat: whether the prompt stands in the chat template; None where the tokenizer has one.

    Raises:
      ValueError: an unknown name; data that is absent, damaged or too little; a length that leaves
        no room for the article; a package that is not installed.

    Example:
      >>> from kvjax.evaluation.tasks.xsum import XSUM, xsum
      >>> from kvjax.models import load_tokenizer
      >>> tokenizer = load_tokenizer("smollm2")  # doctest: +SKIP
      >>> xsum("xsum", tokenizer, data="xsum", cases=10).metric  # doctest: +SKIP
      'ROUGE-2'

    Deviations from H2O's experiments:
      - White space around an answer is left out: the package would count it as a word.

    References:
      Narayan et al., Don't Give Me the Details, Just the Summary!, 2018, arXiv:1808.08745. Prompt,
      length and package: github.com/FMInference/H2O, `h2o_hf`, which draws answers at temperature
      0.3.
    """
    check_choice("name", name, XSUM)
    library("rouge")
    records = read_records(find_file(data, ("xsum.jsonl",)), {"document": TEXT, "summary": TEXT})
    frame = frame_for(tokenizer, chat, plain=False)
    made = []
    for record in first(records, cases):
        parts = split_tokens(tokenizer, _BEFORE + record["document"], _AFTER)
        made.append(Case(*cut_middle(frame, *parts, length), (record["summary"],), _MAX_NEW))
    metric, label = _METRICS[name]
    score = partial(_score, metric)
    return Task(name, tuple(made), score, label, others_answers(made, score))


def _score(metric: Metric, text: str, case: Case) -> float:
    (summary,) = case.answers
    return metric(text.split(_STOP)[0].strip(), summary)
