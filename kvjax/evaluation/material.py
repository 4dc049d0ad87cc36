"""The prompts and texts of a comparison."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.generation.checks import Sized, check_prompts
from kvjax.protocol import Full

from .grid import Grid
from .retrieval import Case, Haystack

WINDOWS = 8
"""Rows of held-out text."""

_CONTINUATION = 128  # most tokens of a row that are predicted after the prompt


class Material:
    """The prompts and texts of a grid.

    Raises ValueError if the text is too short, or a length too small for a task.
    """

    def __init__(self, grid: Grid, tokenizer: Any, text: str) -> None:
        self.grid, self.tokenizer = grid, tokenizer
        self._haystack = Haystack(tokenizer, text)
        self._tokens = self._haystack.filler
        longest = grid.lengths[-1]
        if len(self._tokens) < longest:
            raise ValueError(
                f"the text must have at least {longest} tokens for the longest prompts, "
                f"got {len(self._tokens)}"
            )
        # One number for all cells, so that all tasks share compiled code.
        self.new_tokens = max(
            case.reply_tokens
            for cell in itertools.product(grid.tasks, grid.lengths, grid.depths)
            for case in self.cases(*cell)
        )

    def check(self, model: Sized) -> None:
        """Raises ValueError if a model, of which the configuration is enough, cannot read it."""
        grid = self.grid
        case = self.cases(grid.tasks[0], grid.lengths[-1], grid.depths[0])[0]
        check_prompts(model, [case.prompt], (Full(),), self.new_tokens)
        if self._tokens.max() >= model.vocab_size:
            raise ValueError(
                f"the model has {model.vocab_size} tokens, got {self._tokens.max()} in the text"
            )

    def cases(self, task: str, length: int, depth: float) -> list[Case]:
        """The cases of one task, length and depth; their seeds follow from the grid's alone."""
        seeds = [
            int(np.random.SeedSequence((self.grid.seed, number)).generate_state(1)[0])
            for number in range(self.grid.cases)
        ]
        return [self._haystack.case(task, length=length, depth=depth, seed=seed) for seed in seeds]

    def fidelity_prompts(self, length: int) -> list[list[int]]:
        """One prompt of the first task per depth."""
        return [
            self.cases(self.grid.tasks[0], length, depth)[0].prompt for depth in self.grid.depths
        ]

    def windows(self, length: int) -> tuple[Int[np.ndarray, "B N"], int]:
        """Windows of held-out text, `[8, length]`, and how many tokens of each are the prompt."""
        room = length - len(self._haystack.start)
        starts = np.linspace(0, len(self._tokens) - room, WINDOWS).astype(int)
        rows = [[*self._haystack.start, *self._tokens[start : start + room]] for start in starts]
        return np.array(rows, np.int32), length - min(_CONTINUATION, length // 4)

    def sample(self) -> list[int]:
        """The first tokens of the text, as many as the shortest prompts have."""
        return self._tokens[: self.grid.lengths[0]].tolist()

    def fingerprint(self) -> str:
        """A hash of the text's tokens."""
        return hashlib.sha256(self._tokens.tobytes()).hexdigest()[:16]
