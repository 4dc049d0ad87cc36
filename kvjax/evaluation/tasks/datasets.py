"""Tasks of data sets by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvjax.budgets.budgets import check_choice

from .gsm8k import GSM8K, gsm8k
from .longbench.longbench import LONGBENCH, longbench
from .task import Task
from .xsum import XSUM, xsum
from .zeroscrolls import ZEROSCROLLS, zeroscrolls

DATASETS: tuple[str, ...] = (*LONGBENCH, *GSM8K, *XSUM, *ZEROSCROLLS)
"""Names of all tasks whose cases come from files."""


def dataset(
    name: str,
    tokenizer: Any,
    *,
    data: str | Path | None = None,
    length: int | None = None,
    cases: int | None = None,
    chat: bool | None = None,
) -> Task:
    """The task of a data set.

    Args:
      name: one of `DATASETS`.
      tokenizer: of the model, from `transformers`.
      data: folder of the benchmark's files, or the task's file. LongBench alone can do without: it
        is downloaded from the hub.
      length: most tokens of a prompt, chat template included; None for whole prompts.
      cases: how many of the first; None for all.
      chat: whether prompts stand in the chat template; None for what the benchmark does.

    Raises:
      ValueError: an unknown name; data that is absent, damaged or too little; a length that is too
        small; a package that is not installed.

    Example:
      >>> from kvjax.evaluation.tasks.datasets import DATASETS, dataset
      >>> len(DATASETS)
      36
      >>> dataset("gsm8k", None)
      Traceback (most recent call last):
      ...
      ValueError: gsm8k needs data: the folder or the file of its records
    """
    check_choice("task", name, DATASETS)
    if name in LONGBENCH:
        return longbench(name, tokenizer, data=data, length=length, cases=cases, chat=chat)
    if data is None:
        raise ValueError(f"{name} needs data: the folder or the file of its records")
    make: Callable[..., Task] = gsm8k if name in GSM8K else xsum if name in XSUM else zeroscrolls
    return make(name, tokenizer, data=data, length=length, cases=cases, chat=chat)
