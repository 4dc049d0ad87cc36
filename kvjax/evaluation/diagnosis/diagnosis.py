"""Diagnosis of methods on a given text: fidelity of the attention, and the smallest cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from kvjax.budgets.budgets import check_budget
from kvjax.cache.nbytes import memory_bytes
from kvjax.checks import check_choice, check_number
from kvjax.compose.bind import bind
from kvjax.devices import automatic
from kvjax.evaluation.cells.grid import Candidate, Grid
from kvjax.evaluation.codebook_reserve import overflow_share
from kvjax.evaluation.fidelity.fidelity import Fidelity, check_run, judge
from kvjax.evaluation.fidelity.full_run import FullRun
from kvjax.generation.calibration import CALIBRATION_TOKENS, calibrated
from kvjax.generation.documents import Document
from kvjax.generation.model import FunctionalModel, LanguageModel, as_functional
from kvjax.messages import brief
from kvjax.protocol import KVTransform
from kvjax.registry import METHODS, parse

Rows = Sequence[Sequence[int]]
Where = Literal["inside", "after"]
BUDGETS = (0.1, 0.2, 0.5)
NEW_TOKENS = 8
ERROR = 0.1
COMPOSED = "by_head(kvzip)", "kvcrush(snapkv)", "cam(streaming_llm)", "quantize"
"""Compositions that are considered beside the methods that run by themselves."""


@dataclass(frozen=True)
class Finding:
    """Fidelity and cache bytes of a method with a budget.

    Args:
      candidate: the method and its budget.
      fidelity: recall and error by layer, row and KV head.
      cache_bytes: bytes of the compressed prompts in the memory of the devices.
      full_cache_bytes: bytes of the full cache for as many tokens.
      overflow: share of the kept vectors that found neither an entry nor room in a codebook.

    Example:
      >>> import numpy as np
      >>> from kvjax.evaluation import Fidelity, Finding, Grid
      >>> fidelity = Fidelity(recall=np.full((2, 1, 2), 0.5), error=np.array([[0.25], [0.5]]),
      ...                     head_error=np.full((2, 1, 2), 0.375))
      >>> candidate = Grid.of(methods=["h2o"], budgets=[0.1]).candidates[1]
      >>> finding = Finding(candidate, fidelity, cache_bytes=1024, full_cache_bytes=8192)
      >>> finding.name, finding.error, finding.recall, finding.share  # means over the layers
      ('h2o 0.1', 0.375, 0.5, 0.125)
    """

    candidate: Candidate
    fidelity: Fidelity
    cache_bytes: int
    full_cache_bytes: int
    overflow: float = 0.0

    name = property(lambda self: self.candidate.name)
    share = property(lambda self: self.cache_bytes / self.full_cache_bytes)
    error = property(lambda self: float(self.fidelity.error.astype(np.float64).mean()))
    recall = property(lambda self: float(self.fidelity.recall.astype(np.float64).mean()))

    def as_json(self) -> dict[str, Any]:
        """Returns all figures; those of layers and heads are means over the rows."""
        recall, error, head_error = (x.astype(np.float64) for x in self.fidelity)
        return {
            **self.candidate.named(),
            "error": _number(self.error),
            "recall": _number(self.recall),
            "cache_bytes": self.cache_bytes,
            "full_cache_bytes": self.full_cache_bytes,
            "overflow": round(self.overflow, 6),
            "error_by_layer": [_number(x) for x in error.mean(1)],
            "error_by_head": [[_number(x) for x in heads] for heads in head_error.mean(1)],
            "recall_by_head": [[_number(x) for x in heads] for heads in recall.mean(1)],
        }


def _number(value: float) -> float | None:
    """Rounds to six decimals; None for infinity and NaN, which JSON does not have."""
    return round(float(value), 6) if math.isfinite(value) else None


@dataclass(frozen=True)
class Diagnosis:
    """Effect of methods on the attention over some prompts: the result of `diagnose`.

    Args:
      findings: a finding for each method and budget, the full cache first.
      where: whether the question was compressed with the prompt (`"inside"`) or came `"after"`.
      prompt_tokens, question_tokens: totals over all rows. Tokens of a question inside count as
        question tokens too.
      new_tokens: number of decode steps that errors are averaged over.
      left_out: methods of the default that these budgets or this model do not suit → the reason.

    Example:
      >>> import numpy as np
      >>> from kvjax.evaluation import Diagnosis, Fidelity, Finding, Grid
      >>> def finding(candidate, error, cache_bytes):
      ...     fidelity = Fidelity(np.ones((1, 1, 1)), np.array([[error]]), np.array([[[error]]]))
      ...     return Finding(candidate, fidelity, cache_bytes, full_cache_bytes=1000)
      >>> candidates = Grid.of(methods=["h2o"], budgets=[0.1, 0.5]).candidates  # full comes first
      >>> diagnosis = Diagnosis(
      ...     tuple(map(finding, candidates, (0.0, 0.25, 0.05), (1000, 100, 500))), "after",
      ...     prompt_tokens=512, question_tokens=16, new_tokens=8)
      >>> diagnosis.smallest(error=0.1).name, diagnosis.smallest(error=0.01)
      ('h2o 0.5', None)
    """

    findings: tuple[Finding, ...]
    where: Where
    prompt_tokens: int
    question_tokens: int
    new_tokens: int
    left_out: Mapping[str, str] = field(default_factory=dict)

    def smallest(self, error: float = ERROR) -> Finding | None:
        """Returns the smallest cache with at most this error; the lower error decides a tie.

        None if no method has such an error with a cache smaller than the full one.

        Raises:
          TypeError, ValueError: the error is not a number above 0.
        """
        check_number("error", error, 0.0)
        full = self.findings[0]
        accurate = [
            finding
            for finding in self.findings[1:]
            if finding.error <= error and finding.cache_bytes < full.cache_bytes
        ]
        return min(accurate, key=lambda finding: (finding.cache_bytes, finding.error), default=None)

    def as_json(self, error: float = ERROR) -> dict[str, Any]:
        """Returns all figures, with the recommended method for an error."""
        best = self.smallest(error)
        return {
            "question": self.where,
            "prompt_tokens": self.prompt_tokens,
            "question_tokens": self.question_tokens,
            "new_tokens": self.new_tokens,
            "findings": [finding.as_json() for finding in self.findings],
            "wanted_error": error,
            "recommended": None if best is None else best.candidate.named(),
            "left_out": dict(self.left_out),
        }


@automatic()
def diagnose(
    model: LanguageModel | FunctionalModel,
    prompts: Rows,
    questions: Rows,
    *,
    where: Where = "inside",
    methods: Sequence[str] | None = None,
    budgets: Sequence[int | float] = BUDGETS,
    new_tokens: int = NEW_TOKENS,
    document: Document | None = None,
    calibrate: Callable[[KVTransform], KVTransform] | None = None,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> Diagnosis:
    """Measures the effect of methods on a model's attention over given texts.

    The model reads the prompts once. Recall and error of the attention outputs are those of
    `measure_fidelities`, at the first tokens that the run with the full cache writes.

    Args:
      model: as for `kvjax.generate`.
      prompts: token ids of each row.
      questions: token ids that follow each prompt.
      where: whether the questions are compressed with the prompts (`"inside"`), or follow as a
        further turn after compression (`"after"`), when methods could not take them into account.
      methods: names and compositions for `kvjax.parse`. `full` is always added. None: every method
        that runs by itself, those of `kvjax.register` included, and `COMPOSED`, but for those that
        the budgets or the model do not suit, which are `left_out`.
      budgets: budgets for every method that takes one.
      new_tokens: number of decode steps to average over.
      document: as in `kvjax.read`.
      calibrate: returns a method with what it needs of the model; by default `kvjax.calibrated`,
        with the beginnings of the prompts as the sample.
      on_progress: called before each part of the work and at the end with the parts done, all
        parts, and a name for the next part.

    Raises:
      TypeError, ValueError: raised before anything is computed, if `Grid.of` or
        `measure_fidelities` raises, or if no method is given beside the full cache.

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
    left_out: dict[str, str] = {}
    if methods is None:
        methods = suitable(functional.num_layers, budgets, left_out)
        optional = set(methods)
    else:
        optional = set()
    candidates = grid_of(methods, budgets).candidates
    transforms = [candidate.transform for candidate in candidates]
    check_run(functional, transforms, prompts, questions, new_tokens)
    compressed, following = _turns(prompts, questions, where)
    report = on_progress or (lambda done, total, what: None)
    total = len(candidates) + 1
    lengths = [sum(map(len, rows)) for rows in (prompts, questions)]
    report(0, total, f"reading {sum(lengths):,} tokens")
    sample = [row[:CALIBRATION_TOKENS] for row in compressed]
    calibrate = calibrate or (lambda tx: calibrated(tx, model, sample, document=document))
    calibrations: list[tuple[Candidate, KVTransform]] = []
    for candidate in candidates:
        try:
            calibrations.append((candidate, calibrate(candidate.transform)))
        except (TypeError, ValueError) as error:
            if candidate.method not in optional:
                raise
            left_out[candidate.method] = str(error)
    transforms = [transform for _, transform in calibrations]
    run = FullRun(
        functional, compressed, transforms, new_tokens=new_tokens, questions=following,
        document=document,
    )  # fmt: skip
    findings = []
    for done, (candidate, transform) in enumerate(calibrations, 1):
        report(done, total, candidate.name)
        context = run.context(transform)
        finding = Finding(
            candidate, judge(run, context), memory_bytes(context.held)["device"],
            context.full_nbytes, overflow_share(context.caches),
        )  # fmt: skip
        findings.append(finding)
    report(total, total, "done")
    return Diagnosis(tuple(findings), where, lengths[0], lengths[1], new_tokens, left_out)


def suitable(
    num_layers: int, budgets: Sequence[int | float], left_out: dict[str, str]
) -> tuple[str, ...]:
    """Returns the methods that are considered by default, without those that cannot be bound.

    Args:
      num_layers: of the model.
      budgets: as in `diagnose`.
      left_out: gets the other methods and what they were refused for.

    Raises:
      TypeError, ValueError: a budget that suits no method.

    Example:
      >>> from kvjax.evaluation.diagnosis.diagnosis import suitable
      >>> left_out = {}
      >>> methods = suitable(2, [64], left_out)
      >>> "kvzip" in methods, left_out["by_head(kvzip)"][:52]
      (True, 'ByHead takes one method whose budget is a share of t')
    """
    for budget in budgets:
        check_budget(budget, 1, "one slot")
    methods = []
    for method in (*METHODS, *COMPOSED):
        try:
            for budget in budgets:
                bind(parse(method, budget), num_layers)
        except (TypeError, ValueError) as error:
            left_out[method] = str(error)
        else:
            methods.append(method)
    return tuple(methods)


def grid_of(methods: Sequence[str], budgets: Sequence[int | float]) -> Grid:
    """Checks methods and budgets, and returns their grid; one must differ from the full cache."""
    grid = Grid.of(methods=methods, budgets=budgets)
    if len(grid.candidates) == 1:
        raise ValueError(f"methods must name one beside full, got {brief(methods)}")
    return grid


def _turns(prompts: Rows, questions: Rows, where: Where) -> tuple[Rows, Rows | None]:
    """Returns the rows to compress and the rows that follow, None if questions are inside."""
    if where == "after":
        return prompts, questions
    return [[*prompt, *question] for prompt, question in zip(prompts, questions, strict=True)], None
