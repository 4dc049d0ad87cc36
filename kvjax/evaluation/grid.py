"""What a comparison covers: methods × budgets × lengths × depths as one value."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvjax.budgets.budgets import check_budget, check_count
from kvjax.compose.chain import bind
from kvjax.messages import brief
from kvjax.protocol import KVTransform
from kvjax.registry import parse

from .retrieval import TASKS

METHODS = ("full", "streaming_llm", "h2o", "snapkv", "chelsea", "kvmerger", "kvcrush(snapkv)")
ALL_METHODS = (
    *METHODS, "pyramidkv", "pyramidinfer", "cam(streaming_llm)", "clusterkv", "quest", "infinigen",
    "layer_budget", "spindlekv",
)  # fmt: skip
BUDGETS = (0.1, 0.2)
LENGTHS = (512, 2048)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
DEFAULT_TASKS = ("needle", "multi_needle")
CASES = 4
MOST_DEPTHS = 1_000
"""The most depths: each is a cell for every method, budget, length and task."""

MOST_CASES = 100_000
"""The most cases of a cell."""


@dataclass(frozen=True)
class Candidate:
    """A method with its budget.

    Args:
      method: as it was written, `"snapkv"`, `"every(snapkv, steps=64)"`.
      budget: slots or share of the prompt; None where the method takes none or names its own.
      transform: what the two make.
    """

    method: str
    budget: int | float | None
    transform: KVTransform

    @classmethod
    def of(cls, method: str, budget: int | float) -> Candidate:
        """A method with a budget, or with None where budgets change nothing."""
        transform = parse(method, budget)
        with contextlib.suppress(ValueError):
            if parse(method) == transform:
                budget = None
        return cls(method, budget, transform)

    def named(self) -> dict[str, Any]:
        """Method and budget as `--json` prints them."""
        return {"method": self.method, "budget": self.budget}


class Cell(NamedTuple):
    """One unit of work.

    Args:
      measure: "retrieval", "perplexity" or "fidelity".
      method, budget: of the candidate.
      length: tokens of each prompt.
      task, depth: of retrieval; None for the others.
    """

    measure: str
    method: str
    budget: int | float | None
    length: int
    task: str | None = None
    depth: float | None = None

    @property
    def candidate(self) -> str:
        """Method and budget for people."""
        return self.method if self.budget is None else f"{self.method} {self.budget}"

    def __str__(self) -> str:
        """What a progress display says of it."""
        what = self.measure if self.task is None else self.task.replace("_", " ")
        where = "" if self.depth is None else f" · depth {self.depth:g}"
        return f"{self.candidate} · {what} · {self.length:,} tokens{where}"


@dataclass(frozen=True)
class Grid:
    """Everything that is compared; `Grid.of` checks it.

    Args:
      candidates: methods with budgets, the full cache first.
      tasks: of `kvjax.evaluation.TASKS`.
      lengths: prompt tokens, question included.
      depths: shares of the text that come before the sentence that is asked for.
      cases: per task, length and depth; every candidate sees the same ones.
      seed: of the cases.
    """

    candidates: tuple[Candidate, ...]
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    cases: int
    seed: int

    @classmethod
    def of(
        cls,
        *,
        methods: Sequence[str] = METHODS,
        budgets: Sequence[int | float] = BUDGETS,
        lengths: Sequence[int] = LENGTHS,
        depths: Sequence[float] = DEPTHS,
        tasks: Sequence[str] = DEFAULT_TASKS,
        cases: int = CASES,
        seed: int = 0,
    ) -> Grid:
        """A grid of these methods and budgets; duplicates count once.

        Args:
          methods: names and compositions as `kvjax.parse` reads them. `full` is always there.
          budgets: each for every method that takes one.
          lengths, depths, tasks, cases, seed: as the fields.

        Raises:
          TypeError, ValueError: what `kvjax.parse` raises, an empty list, an unknown task, a number
            out of range, more than `MOST_DEPTHS` or `MOST_CASES`.

        Example:
          >>> from kvjax.evaluation import Grid
          >>> grid = Grid.of(methods=["h2o", "snapkv(budget=64)"], budgets=[0.1, 0.2])
          >>> [(one.method, one.budget) for one in grid.candidates]
          [('full', None), ('h2o', 0.1), ('h2o', 0.2), ('snapkv(budget=64)', None)]
        """
        given = {
            "methods": methods, "budgets": budgets, "lengths": lengths,
            "depths": depths, "tasks": tasks,
        }  # fmt: skip
        for name, values in given.items():
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
            if task not in TASKS:
                raise ValueError(f"unknown task {brief(task)}; there are {', '.join(TASKS)}")
        for depth in depths:
            if isinstance(depth, bool) or not isinstance(depth, int | float | np.number):
                raise TypeError(f"depth must be a number, got {brief(depth)}")
            if not 0 <= depth <= 1:
                raise ValueError(f"depth must lie between 0 and 1, got {depth}")
        if len(set(budgets)) < len(set(map(repr, budgets))):
            raise ValueError("budgets 1 (slot) and 1.0 (the whole prompt) cannot be told apart")
        for length in lengths:
            check_count("length", length, 1)
        for budget in budgets:
            check_budget(budget, 1, "one slot")
        check_count("cases", cases, 1, MOST_CASES)
        check_count("seed", seed, 0, most=math.inf)
        every = itertools.product(["full", *(method.strip() for method in methods)], budgets)
        return cls(
            candidates=tuple(dict.fromkeys(itertools.starmap(Candidate.of, every))),
            tasks=tuple(dict.fromkeys(tasks)),
            lengths=tuple(sorted({int(length) for length in lengths})),
            depths=tuple(sorted({float(depth) for depth in depths})),
            cases=int(cases),
            seed=int(seed),
        )

    def check_model(self, num_layers: int) -> None:
        """Raises what `kvjax.bind` raises for a model of so many layers."""
        for one in self.candidates:
            bind(one.transform, num_layers)

    def settings(self) -> dict[str, Any]:
        """The grid in the form that is written to files."""
        rest = dict(vars(self))
        return {"methods": [(one.method, one.budget) for one in rest.pop("candidates")], **rest}

    def groups(self) -> Iterator[tuple[Candidate, list[Cell]]]:
        """Each candidate at each length with its cells, which share compiled code."""
        for length, one in itertools.product(self.lengths, self.candidates):
            key = one.method, one.budget, length
            retrieval = [
                Cell("retrieval", *key, task, depth)
                for task, depth in itertools.product(self.tasks, self.depths)
            ]
            yield one, [*retrieval, Cell("perplexity", *key), Cell("fidelity", *key)]
