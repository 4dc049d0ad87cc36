"""The prompts and texts of a comparison."""

from __future__ import annotations

import functools
import hashlib
import os
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.evaluation.cells.grid import MOST_MEASURED, Grid, Unit
from kvjax.evaluation.tasks import (
    DATASETS,
    NATS,
    OWN_TASKS,
    RULER_QA,
    RULER_TASKS,
    SQUAD,
    STATEMENT,
    Frame,
    Haystack,
    Task,
    dataset,
    retrieval,
    ruler,
    squad,
)
from kvjax.generation.prompt_checks import Sized, check_prompts
from kvjax.protocol import Full

_CONTINUATION = 128  # maximum tokens of a row that are predicted after the prompt
_SAMPLE = 2048  # tokens of the text on which methods are calibrated
_METRICS = {"perplexity": NATS, "attention": "attention error"}
_GOLDEN = (5**0.5 - 1) / 2  # any number of its multiples, modulo 1, is spread evenly


class Material:
    """Prompts and texts of a grid.

    Args:
      grid: the cells that are wanted.
      tokenizer: tokenizer of the model, from `transformers`.
      text: filler of the tasks that hide something, and text for the perplexity.
      data: folder of the data sets, or the file of one.

    Raises:
      ValueError: the text is too short, a length is too small for a task, or data is absent or
        damaged.
    """

    def __init__(
        self, grid: Grid, tokenizer: Any, text: str, data: str | os.PathLike[str] | None = None
    ) -> None:
        self.grid, self.tokenizer, self._text, self._data = grid, tokenizer, text, data
        self._haystack = Haystack(tokenizer, text)
        self.tokens = self._haystack.filler
        longest = grid.lengths[-1]
        if len(self.tokens) < longest and not set(grid.tasks) <= {*DATASETS, RULER_QA, SQUAD}:
            raise ValueError(
                f"the text must have at least {longest} tokens for the longest prompts, "
                f"got {len(self.tokens)}"
            )
        # A cache of this object, so that the cases are freed with it.
        self.task = functools.cache(self._task)
        # All cases are made now, so that errors come before anything is measured.
        for name in grid.answers:
            for length in grid.lengths:
                self.task(name, length)

    def _task(self, name: str, length: int) -> Task:
        """Makes a task's cases at one length; the grid's seed determines them."""
        grid = self.grid
        size = {"length": length, "cases": grid.cases}
        if name in (*OWN_TASKS, STATEMENT):
            return retrieval(name, self._haystack, depths=grid.depths, seed=grid.seed, **size)
        if name in (*RULER_TASKS, RULER_QA, SQUAD):
            frame = Frame.of(self.tokenizer, chat=bool(grid.chat))
            if name == SQUAD:
                return squad(self.tokenizer, data=self._data, frame=frame, **size)
            return ruler(
                name, self.tokenizer, self._text, seed=grid.seed, frame=frame, data=self._data,
                **size,
            )  # fmt: skip
        return dataset(name, self.tokenizer, data=self._data, chat=grid.chat, **size)

    def check(self, model: Sized) -> None:
        """Raises ValueError if a model cannot read the prompts; its configuration is enough."""
        grid, length = self.grid, self.grid.lengths[-1]
        for name in grid.answers:
            most_new = self.most_new(name, length)
            for case in self.task(name, length).cases:
                check_prompts(model, [case.prompt], (Full(),), most_new)
        # Without tasks that ask questions, attention is measured on windows of the text too.
        if "perplexity" in grid.tasks or not grid.answers:
            check_prompts(model, self.windows(length)[0][:1].tolist(), (Full(),), 0)
        if self.tokens.max() >= model.vocab_size:
            raise ValueError(
                f"the model has {model.vocab_size} tokens, got {self.tokens.max()} in the text"
            )

    def asked(self) -> dict[str, Any]:
        """Returns the dimensions of the grid in the form that is written to files."""
        tasks = {name: self._describe(name) for name in self.grid.tasks}
        return {**self.grid.asked(), "tasks": tasks}

    def _describe(self, name: str) -> dict[str, Any]:
        """Returns the metric of a task, and its floor, the score without the context."""
        if name in _METRICS:
            return {"metric": _METRICS[name], "floor": None}
        task = self.task(name, self.grid.lengths[0])
        return {"metric": task.metric, "floor": task.floor}

    def most_new(self, name: str, length: int, first: int = 0, stop: int | None = None) -> int:
        """Returns the maximum new tokens of a task's cases `first` to `stop - 1`."""
        task = self.task(name, length)
        most = max(case.max_new for case in task.cases[first:stop])
        # Right answers whose loss is measured have the tokens that they have.
        limit = None if task.score is None else self.grid.max_new
        return most if limit is None else min(most, limit)

    def count(self, name: str, length: int) -> int:
        """Returns the number of cases of a task."""
        if name in MOST_MEASURED:
            return min(self.grid.cases, MOST_MEASURED[name])
        return len(self.task(name, length).cases)

    def attention_prompts(self, length: int) -> tuple[list[list[int]], int]:
        """Returns the prompts on which attention is measured, and the number of new tokens."""
        count = self.count("attention", length)
        if not self.grid.answers:
            rows, prompt = self.windows(length)
            return rows[:count, :prompt].tolist(), 1
        name = self.grid.answers[0]
        cases = self.task(name, length).cases[:count]
        return [case.prompt for case in cases], self.most_new(name, length, stop=count)

    def windows(self, length: int) -> tuple[Int[np.ndarray, "B N"], int]:
        """Returns windows of the text, `[B, length]`, and the number of prompt tokens in each.

        The beginning of window i does not depend on the number of windows.
        """
        room = length - len(self._haystack.start)
        shares = (_GOLDEN * np.arange(self.count("perplexity", length))) % 1
        starts = (shares * (len(self.tokens) - room + 1)).astype(int)
        rows = [[*self._haystack.start, *self.tokens[start : start + room]] for start in starts]
        return np.array(rows, np.int32), length - min(_CONTINUATION, length // 4)

    def digest(self, unit: Unit) -> str:
        """Returns a hash of a unit's prompts and right answers."""
        cases = slice(unit.first, unit.stop)
        if unit.task == "perplexity":
            rows, prompt = self.windows(unit.length)
            content = rows[cases].tolist(), prompt
        elif unit.task == "attention":
            prompts, most_new = self.attention_prompts(unit.length)
            content = prompts[cases], most_new
        else:
            content = self.task(unit.task, unit.length).cases[cases]
        return hashlib.sha256(repr(content).encode()).hexdigest()[:16]

    def sample(self, most: int | None = None) -> list[int]:
        """Returns the first 2,048 tokens of the text, or at most `most`, for any grid."""
        return self.tokens[:_SAMPLE][:most].tolist()

    def fingerprint(self) -> str:
        """Returns a hash of the text's tokens."""
        return hashlib.sha256(self.tokens.tobytes()).hexdigest()[:16]
