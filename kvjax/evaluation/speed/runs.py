"""Calls of `generate` in rounds, all methods in each, and what they took."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
from jax.typing import DTypeLike

from kvjax.generation.generate import generate
from kvjax.generation.model import FunctionalModel
from kvjax.generation.writing import Generation
from kvjax.protocol import KVTransform

from .machine import Machine, measure_machine, with_peak


class Run(NamedTuple):
    """One call of `generate`, and by how much the process grew meanwhile."""

    result: Generation
    grown: int | None


class Times(NamedTuple):
    """Seconds of the fastest round: up to the first token, and per further one."""

    ttft: float
    tpot: float

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Times:
        """Of these runs."""
        return cls(min(x.result.ttft_s for x in runs), min(x.result.tpot_s for x in runs))


class Runs:
    """Calls of `generate` that tell how far they are.

    Args:
      model: as for `generate`.
      new_tokens: that each call writes, of every row.
      dtype: of keys and values.
      total: calls that there will be.
      on_progress: is told those that are done, all of them, and what comes next.
    """

    def __init__(
        self,
        model: FunctionalModel,
        new_tokens: int,
        dtype: DTypeLike,
        total: int,
        on_progress: Callable[[int, int, str], None] | None,
    ) -> None:
        self._model, self._new, self._dtype = model, new_tokens, dtype
        self._done, self._total, self._on_progress = 0, total, on_progress
        self._machines: list[Machine] = []

    def report(self, what: str) -> None:
        """Tells what is measured next."""
        if self._on_progress is not None:
            self._on_progress(self._done, self._total, what)

    def of_batch(
        self, methods: Mapping[str, KVTransform], prompts: list[list[int]], rounds: int
    ) -> dict[str, list[Run]]:
        """Each method's runs: one that compiles, and one per round.

        Compiled code of other batches is dropped. The machine is measured in every round too.
        """
        jax.clear_caches()
        found: dict[str, list[Run]] = {name: [] for name in methods}
        for _ in range(1 + rounds):
            self.report("the machine")
            self._machines.append(measure_machine(self._dtype))
            for name, tx in methods.items():
                found[name].append(self._once(name, tx, prompts))
        return found

    def machine(self) -> Machine:
        """What the machine did in its best rounds."""
        return Machine(*map(max, zip(*self._machines, strict=True)))

    def _once(self, name: str, transform: KVTransform, prompts: list[list[int]]) -> Run:
        self.report(f"{name} · {len(prompts)} row{'s' * (len(prompts) > 1)}")
        run = functools.partial(
            generate, self._model, prompts, transform=transform, max_new_tokens=self._new,
            end_tokens=(), dtype=self._dtype,
        )  # fmt: skip
        found = Run(*with_peak(run))
        self._done += 1
        return found
