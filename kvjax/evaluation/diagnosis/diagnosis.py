"""What methods would do to a model's attention on a given text, and the smallest cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvjax.cache.nbytes import memory_bytes
from kvjax.checks import check_choice, check_number
from kvjax.devices import automatic
from kvjax.evaluation.cells.grid import METHODS, Candidate, Grid
from kvjax.evaluation.fidelity.fidelity import Fidelity, check_run, judge
from kvjax.evaluation.fidelity.full_run import FullRun
from kvjax.generation.calibration import CALIBRATION_TOKENS, calibrated
from kvjax.generation.model import FunctionalModel, LanguageModel, as_functional
from kvjax.messages import brief

Rows = Sequence[Sequence[int]]
Where = Literal["inside", "after"]
BUDGETS = (0.1, 0.2, 0.5)
NEW_TOKENS = 8
ERROR = 0.1


@dataclass(frozen=True)
class Finding:
    """What a method with a budget keeps of the full cache's attention, and what its cache takes.

    Args:
      candidate: the method and its budget.
      fidelity: recall and error by layer, row and KV head.
      cache_bytes: of the compressed prompts, in the memory of the devices.
      full_cache_bytes: of the full cache for as many tokens.
      dropped: tokens that found no free slot.
    """

    candidate: Candidate
    fidelity: Fidelity
    cache_bytes: int
    full_cache_bytes: int
    dropped: int

    name = property(lambda self: self.candidate.name)
    share = property(lambda self: self.cache_bytes / self.full_cache_bytes)
    error = property(lambda self: float(self.fidelity.error.astype(np.float64).mean()))
    recall = property(lambda self: float(self.fidelity.recall.astype(np.float64).mean()))

    def as_json(self) -> dict[str, Any]:
        """All figures, those of layers and heads as means over the rows."""
        recall, error, head_error = (x.astype(np.float64) for x in self.fidelity)
        return {
            **self.candidate.named(),
            "error": _number(self.error),
            "recall": _number(self.recall),
            "cache_bytes": self.cache_bytes,
            "full_cache_bytes": self.full_cache_bytes,
            "dropped": self.dropped,
            "error_by_layer": [_number(x) for x in error.mean(1)],
            "error_by_head": [[_number(x) for x in heads] for heads in head_error.mean(1)],
            "recall_by_head": [[_number(x) for x in heads] for heads in recall.mean(1)],
        }


def _number(value: float) -> float | None:
    """Six decimals; None for what JSON has no number for."""
    return round(float(value), 6) if math.isfinite(value) else None


@dataclass(frozen=True)
class Diagnosis:
    """What methods do to the attention over some prompts.

    Args:
      findings: of each method and budget, the full cache first.
      where: whether the question was `"inside"` what was compressed, or came `"after"`.
      prompt_tokens, question_tokens: of all rows; a question inside counts as one all the same.
      new_tokens: decode steps that errors are means over.
    """

    findings: tuple[Finding, ...]
    where: Where
    prompt_tokens: int
    question_tokens: int
    new_tokens: int

    def smallest(self, error: float = ERROR) -> Finding | None:
        """The smallest cache whose error is no more than this, of equal ones that of less error.

        None where no method's cache is smaller than the full one and stays below.

        Raises:
          TypeError, ValueError: an error that is no number above 0.
        """
        check_number("error", error, 0.0)
        full = self.findings[0]
        good = [
            finding
            for finding in self.findings[1:]
            if finding.error <= error and finding.cache_bytes < full.cache_bytes
        ]
        return min(good, key=lambda finding: (finding.cache_bytes, finding.error), default=None)

    def as_json(self, error: float = ERROR) -> dict[str, Any]:
        """Everything, with the recommendation for an error."""
        best = self.smallest(error)
        return {
            "question": self.where,
            "prompt_tokens": self.prompt_tokens,
            "question_tokens": self.question_tokens,
            "new_tokens": self.new_tokens,
            "findings": [finding.as_json() for finding in self.findings],
            "wanted_error": error,
            "recommended": None if best is None else best.candidate.named(),
        }


@automatic()
def diagnose(
    model: LanguageModel | FunctionalModel,
    prompts: Rows,
    questions: Rows,
    *,
    where: Where = "inside",
    methods: Sequence[str] = METHODS,
    budgets: Sequence[int | float] = BUDGETS,
    new_tokens: int = NEW_TOKENS,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> Diagnosis:
    """What methods do to a model's attention on given texts.

    The model reads the prompts once. Recall and error of the attention outputs are those of
    `measure_fidelities`, at the first tokens that the full cache's run writes.

    Args:
      model: as for `kvjax.generate`.
      prompts: token ids of each row.
      questions: token ids that follow each prompt.
      where: whether the questions are compressed with the prompts (`"inside"`), or are a further
        turn after the prompts were compressed (`"after"`), which methods did not foresee.
      methods: names and compositions as `kvjax.parse` reads them. `full` is always there.
      budgets: each for every method that takes one.
      new_tokens: decode steps to average over.
      on_progress: called before each part of the work and at the end with the parts done, all
        parts, and a name for what is done next.

    Raises:
      TypeError, ValueError: before anything is computed: what `Grid.of` and `measure_fidelities`
        raise, and where there is no method beside the full cache.

    Example:
      >>> import kvjax
      >>> from kvjax.evaluation import diagnose
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=1, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128))
      >>> diagnosis = diagnose(
      ...     model, [list(range(56))], [[4, 2]], where="after", methods=["streaming_llm", "h2o"],
      ...     budgets=[8, 32])
      >>> best = diagnosis.smallest(error=10.0)
      >>> best.candidate.budget, best.cache_bytes < best.full_cache_bytes
      (8, True)
    """
    check_choice("where", where, ("inside", "after"))
    functional = as_functional(model)
    candidates = grid_of(methods, budgets).candidates
    transforms = [candidate.transform for candidate in candidates]
    check_run(functional, transforms, prompts, questions, new_tokens)
    read, asked = _turns(prompts, questions, where)
    report = on_progress or (lambda done, total, what: None)
    total = len(candidates) + 1
    lengths = [sum(map(len, rows)) for rows in (prompts, questions)]
    report(0, total, f"reading {sum(lengths):,} tokens")
    sample = [row[:CALIBRATION_TOKENS] for row in read]
    transforms = [calibrated(tx, model, sample) for tx in transforms]
    run = FullRun(functional, read, transforms, new_tokens=new_tokens, questions=asked)
    findings = []
    for done, (candidate, transform) in enumerate(zip(candidates, transforms, strict=True), 1):
        report(done, total, candidate.name)
        context = run.context(transform)
        finding = Finding(
            candidate, judge(run, context), memory_bytes(context.caches)["device"],
            context.full_nbytes, context.dropped,
        )  # fmt: skip
        findings.append(finding)
    report(total, total, "done")
    return Diagnosis(tuple(findings), where, lengths[0], lengths[1], new_tokens)


def grid_of(methods: Sequence[str], budgets: Sequence[int | float]) -> Grid:
    """Methods and budgets, checked; there must be a method beside the full cache."""
    grid = Grid.of(methods=methods, budgets=budgets)
    if len(grid.candidates) == 1:
        raise ValueError(f"methods must name one beside full, got {brief(methods)}")
    return grid


def _turns(prompts: Rows, questions: Rows, where: Where) -> tuple[Rows, Rows | None]:
    """What is compressed, and what follows it: None where the question is part of the first."""
    if where == "after":
        return prompts, questions
    return [[*prompt, *question] for prompt, question in zip(prompts, questions, strict=True)], None
