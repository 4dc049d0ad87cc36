"""The grid of a comparison: methods × budgets × tasks × lengths × questions as one value."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvjax.budgets.budgets import check_budget
from kvjax.checks import check_choice, check_count, check_flag
from kvjax.compose.bind import bind
from kvjax.evaluation.tasks import ANSWERS, MEASURES
from kvjax.messages import brief
from kvjax.protocol import KVTransform
from kvjax.registry import parse

METHODS = (
    "full", "streaming_llm", "h2o", "snapkv", "chelsea", "kvmerger", "kvcrush(snapkv)", "clusterkv",
    "quest", "quantize",
)  # fmt: skip
ALL_METHODS = (
    "full", "streaming_llm", "h2o", "snapkv", "kvzip", "by_head(kvzip)", "own_queries", "chelsea",
    "kvmerger", "kvcrush(snapkv)", "pyramidkv", "pyramidinfer", "cam(streaming_llm)", "clusterkv",
    "quest", "infinigen", "layer_budget", "spindlekv",
)  # fmt: skip
BUDGETS = (0.1, 0.2)
LENGTHS = (512, 2048)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
DEFAULT_TASKS = ("needle", "multi_needle", *MEASURES)
QUESTIONS = ("inside", "after")
CASES = 20
MOST_DEPTHS = 1_000
"""Maximum number of depths over which the cases of a task are spread."""

MOST_CASES = 100_000
"""Maximum number of cases of a task."""

MOST_MEASURED = {"perplexity": 30, "attention": 4}
"""Maximum number of cases of measures without questions: windows of the text, and prompts of the
first task."""

CandidateKey = tuple[str, int | float | None]
"""Method and budget of a candidate."""


@dataclass(frozen=True)
class Candidate:
    """A method with its budget.

    Args:
      method: the method as text, such as `"snapkv"` or `"every(snapkv, steps=64)"`.
      budget: slots or share of the prompt; None if the method takes none or names its own.
      transform: the transform of method and budget.
    """

    method: str
    budget: int | float | None
    transform: KVTransform

    @classmethod
    def of(cls, method: str, budget: int | float) -> Candidate:
        """Makes a candidate of a method; its budget is None if budgets change nothing."""
        # A method that ignores the budget gives the same transform for another budget.
        transform, other_budget = parse(method, budget), 0.25 if budget == 0.5 else 0.5
        with contextlib.suppress(ValueError):
            if parse(method, other_budget) == transform:
                return cls(method, None, transform)
        return cls(method, budget, transform)

    @property
    def key(self) -> CandidateKey:
        """Method and budget."""
        return self.method, self.budget

    @property
    def name(self) -> str:
        """Method and budget as text for people."""
        return candidate_name(self.method, self.budget)

    def named(self) -> dict[str, Any]:
        """Returns method and budget as `--json` prints them."""
        return {"method": self.method, "budget": self.budget}


def candidate_name(method: str, budget: int | float | None) -> str:
    """Formats method and budget for people."""
    return method if budget is None else f"{method} {budget}"


class Unit(NamedTuple):
    """Prompts that are read together, once for all methods.

    Args:
      task: a name in `kvjax.evaluation.TASKS`.
      length: tokens of each prompt; in tasks from data sets, the maximum.
      question: `"inside"`: the question is compressed with the text; `"after"`: it is asked after
        the text before it was read and compressed. None in tasks without questions.
      first, stop: the task's cases, `first` to `stop - 1`.

    Example:
      >>> from kvjax.evaluation import Unit
      >>> print(Unit("multi_needle", 2048, "after", first=0, stop=8))
      multi needle · 2,048 tokens · question after · cases 1-8
    """

    task: str
    length: int
    question: str | None
    first: int
    stop: int

    def __str__(self) -> str:
        """Returns the text for a progress display."""
        task = self.task.replace("_", " ")
        question = "" if self.question is None else f" · question {self.question}"
        return f"{task} · {self.length:,} tokens{question} · cases {self.first + 1}-{self.stop}"


class Cell(NamedTuple):
    """One unit of work: a method on the prompts of a `Unit`, whose fields come first.

    `Results.records` has a measurement for each cell.

    Args:
      task, length, question, first, stop: the prompts, as in `Unit`.
      method: the method as text for `kvjax.parse`.
      budget: slots or share of the prompt; None if the method takes none or names its own.

    Example:
      >>> from kvjax.evaluation import Cell, Unit
      >>> unit = Unit("needle", 512, "inside", first=0, stop=4)
      >>> cell = Cell(*unit, method="snapkv", budget=0.1)
      >>> cell.candidate, cell.unit == unit
      ('snapkv 0.1', True)
    """

    task: str
    length: int
    question: str | None
    first: int
    stop: int
    method: str
    budget: int | float | None

    @property
    def unit(self) -> Unit:
        """The prompts of the cell."""
        return Unit(*self[:5])

    @property
    def key(self) -> CandidateKey:
        """Method and budget."""
        return self.method, self.budget

    @property
    def candidate(self) -> str:
        """Method and budget as text for people."""
        return candidate_name(*self.key)

    def __str__(self) -> str:
        """Returns the text for a message."""
        return f"{self.candidate} · {self.unit}"


@dataclass(frozen=True)
class Grid:
    """The grid of a comparison; `Grid.of` checks it.

    Args:
      candidates: methods with budgets, the full cache first.
      tasks: names in `kvjax.evaluation.TASKS`.
      lengths: prompt tokens, question included.
      questions: places of the question, `"inside"`, `"after"` or both.
      depths: shares of the text before the part that is asked for. Tasks whose depth can be chosen
        spread their cases over them: case i has depth i modulo their number.
      cases: number of cases per task, length and question; at most 30 of `perplexity` and 4 of
        `attention`. Every candidate sees the same cases.
      seed: seed of the cases.
      chat: whether prompts of published tasks are messages in the model's chat template; None
        follows each benchmark. Prompts of `kvjax.evaluation.tasks.OWN_TASKS` and `statement` never
        are.
      max_new: maximum new tokens of an answer; None: the number of each task.

    Example:
      >>> from kvjax.evaluation import Grid
      >>> grid = Grid.of(methods=["snapkv"], budgets=[0.1], tasks=["needle"], questions=["inside"])
      >>> for unit in grid.units("needle", 512, cases=4, rows=2):
      ...     print(unit)
      needle · 512 tokens · question inside · cases 1-2
      needle · 512 tokens · question inside · cases 3-4
    """

    candidates: tuple[Candidate, ...]
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    questions: tuple[str, ...]
    depths: tuple[float, ...]
    cases: int
    seed: int
    chat: bool | None
    max_new: int | None

    @classmethod
    def of(
        cls,
        *,
        methods: Sequence[str] = METHODS,
        budgets: Sequence[int | float] = BUDGETS,
        lengths: Sequence[int] = LENGTHS,
        questions: Sequence[str] = QUESTIONS,
        depths: Sequence[float] = DEPTHS,
        tasks: Sequence[str] = DEFAULT_TASKS,
        cases: int = CASES,
        seed: int = 0,
        chat: bool | None = None,
        max_new: int | None = None,
    ) -> Grid:
        """Makes a grid of methods and budgets; duplicates count once.

        Args:
          methods: names and compositions for `kvjax.parse`. `full` is always added.
          budgets: budgets for every method that takes one.
          lengths, questions, depths, tasks, cases, seed, chat, max_new: as the fields.

        Raises:
          TypeError, ValueError: `kvjax.parse` raises, a list is empty, a task is unknown, a number
            is out of range, or there are more than `MOST_DEPTHS` or `MOST_CASES`.

        Example:
          >>> from kvjax.evaluation import Grid
          >>> grid = Grid.of(methods=["h2o", "snapkv(budget=64)"], budgets=[0.1, 0.2])
          >>> [candidate.key for candidate in grid.candidates]
          [('full', None), ('h2o', 0.1), ('h2o', 0.2), ('snapkv(budget=64)', None)]
        """
        for name, values in (
            ("methods", methods), ("budgets", budgets), ("lengths", lengths),
            ("questions", questions), ("depths", depths), ("tasks", tasks),
        ):  # fmt: skip
            if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray):
                raise TypeError(f"{name} must be a sequence, got {brief(values)}")
            if not len(values):
                raise ValueError(f"{name} must not be empty")
        if len(depths) > MOST_DEPTHS:
            raise ValueError(f"there may be {MOST_DEPTHS} depths at most, got {len(depths)}")
        for method in methods:
            if not isinstance(method, str):
                raise TypeError(f"a method must be text such as 'snapkv', got {brief(method)}")
        for task in tasks:
            check_choice("task", task, (*ANSWERS, *MEASURES))
        for question in questions:
            check_choice("question", question, QUESTIONS)
        for depth in depths:
            if isinstance(depth, bool) or not isinstance(depth, int | float | np.number):
                raise TypeError(f"depth must be a number, got {brief(depth)}")
            if not 0 <= depth <= 1:
                raise ValueError(f"depth must lie between 0 and 1, got {depth}")
        # 1 == 1.0, so that the two would be one key of the results.
        if len(set(budgets)) < len(set(map(repr, budgets))):
            raise ValueError("budgets 1 (slot) and 1.0 (the whole prompt) cannot be told apart")
        for length in lengths:
            check_count("length", length, 1)
        for budget in budgets:
            check_budget(budget, 1, "one slot")
        check_count("cases", cases, 1, MOST_CASES)
        check_count("seed", seed, 0, most=math.inf)
        if max_new is not None:
            check_count("max_new", max_new, 1)
        if chat is not None:
            check_flag("chat", chat)
        pairs = itertools.product(["full", *(method.strip() for method in methods)], budgets)
        return cls(
            candidates=tuple(dict.fromkeys(itertools.starmap(Candidate.of, pairs))),
            tasks=tuple(dict.fromkeys(tasks)),
            lengths=tuple(sorted({int(length) for length in lengths})),
            questions=tuple(place for place in QUESTIONS if place in questions),
            depths=tuple(sorted({float(depth) for depth in depths})),
            cases=int(cases),
            seed=int(seed),
            chat=chat,
            max_new=max_new,
        )

    def check_model(self, num_layers: int) -> None:
        """Raises the errors of `kvjax.bind` for a model with `num_layers` layers."""
        for candidate in self.candidates:
            bind(candidate.transform, num_layers)

    @property
    def answers(self) -> tuple[str, ...]:
        """Tasks that ask questions."""
        return tuple(task for task in self.tasks if task in ANSWERS)

    def settings(self) -> dict[str, Any]:
        """Returns the settings that determine a result besides its cell, as written to files."""
        return {
            "seed": self.seed, "depths": self.depths, "chat": self.chat, "max_new": self.max_new,
        }  # fmt: skip

    def asked(self) -> dict[str, Any]:
        """Returns the dimensions of the grid in the form that is written to files."""
        return {
            "methods": [candidate.key for candidate in self.candidates], "lengths": self.lengths,
            "questions": self.questions, "cases": self.cases,
        }  # fmt: skip

    def units(self, task: str, length: int, cases: int, rows: int) -> Iterator[Unit]:
        """Yields the units of a task, with `rows` prompts that are read together."""
        questions = self.questions if task in ANSWERS else (None,)
        for question, first in itertools.product(questions, range(0, cases, rows)):
            yield Unit(task, length, question, first, min(first + rows, cases))
