"""What a comparison found: a row per cell, a row per cache, and averages."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .grid import Cell

_COMBINED = (  # figures of a candidate's caches, over all lengths
    "nll_difference", "recall", "attention_error", "cache_bytes", "full_cache_bytes",
    "ttft_s", "tpot_s",
)  # fmt: skip


class Proportion(NamedTuple):
    """`right` of `cases`, with a confidence interval of the true share.

    Example:
      >>> from kvjax.evaluation import Proportion
      >>> found = Proportion(right=19, cases=20)
      >>> found.share, [round(end, 3) for end in found.interval]
      (0.95, [0.764, 0.991])
    """

    right: int
    cases: int

    @property
    def share(self) -> float:
        """right / cases."""
        return self.right / self.cases

    @property
    def percent(self) -> str:
        """The share for people: 100 if all were right, 99.9 if one of a thousand was not."""
        whole = f"{100 * self.share:.0f}"
        if whole not in ("0", "100") or self.right in (0, self.cases):
            return whole
        return f"{min(max(100 * self.share, 0.1), 99.9):.1f}"

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % Wilson score interval.

        With p = right / cases, n = cases and z = 1.96:
        `(p + z²/2n ± z·√(p(1 − p)/n + z²/4n²)) / (1 + z²/n)`.

        References:
          Wilson, Probable Inference, the Law of Succession, and Statistical Inference, 1927.
        """
        # Imported here: scipy takes a while to import, and only reports need it.
        from scipy.stats import binomtest

        low, high = binomtest(self.right, self.cases).proportion_ci(method="wilson")
        return float(low), float(high)


class Row(NamedTuple):
    """A retrieval cell.

    Args:
      method, budget, length, task, depth: the cell.
      accuracy: cases whose answer was right; None if the cell failed.
      cache_bytes, full_cache_bytes: of one prompt's cache, and of the full cache.
      failed: why there is no result, in one line; None if there is one.
    """

    method: str
    budget: int | float | None
    length: int
    task: str
    depth: float
    accuracy: Proportion | None
    cache_bytes: int | None
    full_cache_bytes: int | None
    failed: str | None


class CacheRow(NamedTuple):
    """Figures of a candidate's cache at one length. None: a cell of it, or of full, failed.

    Args:
      method, budget, length: the candidate and the prompt's tokens.
      cache_bytes, full_cache_bytes: of one prompt's cache, and of the full cache.
      nll: nats per token of held-out text.
      nll_difference: nats per token more than with the full cache.
      perplexity_ratio: perplexity over that of the full cache, `exp(nll_difference)`.
      recall, attention_error: means over layers, prompts and heads.
      layer_recall, layer_error: the same per layer.
      ttft_s, tpot_s: medians over all cases of this length.
      failed: what failed and why, in one line; None if nothing did.
    """

    method: str
    budget: int | float | None
    length: int
    cache_bytes: int | None
    full_cache_bytes: int | None
    nll: float | None
    nll_difference: float | None
    perplexity_ratio: float | None
    recall: float | None
    attention_error: float | None
    layer_recall: list[float] | None
    layer_error: list[float] | None
    ttft_s: float | None
    tpot_s: float | None
    failed: str | None


class Average(NamedTuple):
    """A candidate over all lengths and depths. None: a cell of it failed.

    Args:
      method, budget: the candidate.
      accuracy: task → the cases of all lengths and depths together.
      nll_difference, recall, attention_error: means over lengths.
      perplexity_ratio: `exp(nll_difference)`.
      cache_bytes, full_cache_bytes: sums over lengths.
      ttft_s, tpot_s: means over lengths.
    """

    method: str
    budget: int | float | None
    accuracy: dict[str, Proportion | None]
    nll_difference: float | None
    perplexity_ratio: float | None
    recall: float | None
    attention_error: float | None
    cache_bytes: int | None
    full_cache_bytes: int | None
    ttft_s: float | None
    tpot_s: float | None


@dataclass(frozen=True)
class Results:
    """What `kvjax.evaluation.compare` found.

    Args:
      settings: everything that determines the results.
      records: every cell of the grid → what was measured, or `{"failed": reason}`.
    """

    settings: Mapping[str, Any]
    records: Mapping[Cell, Mapping[str, Any]]

    def failures(self) -> list[tuple[Cell, str]]:
        """The cells that failed, each with its reason in one line."""
        return [(cell, r["failed"]) for cell, r in self.records.items() if "failed" in r]

    def rows(self) -> list[Row]:
        """One row per retrieval cell."""
        return [
            Row(
                *cell[1:],
                accuracy=None if "failed" in found else Proportion(found["right"], found["cases"]),
                cache_bytes=found.get("cache_bytes"),
                full_cache_bytes=found.get("full_cache_bytes"),
                failed=found.get("failed"),
            )
            for cell, found in self.records.items()
            if cell.measure == "retrieval"
        ]

    def caches(self) -> list[CacheRow]:
        """One row per candidate and length."""
        return [
            self._cache(method, budget, length)
            for length in self.settings["lengths"]
            for method, budget in self.settings["methods"]
        ]

    def averages(self) -> list[Average]:
        """One row per candidate, over all lengths and depths."""
        rows, caches = self.rows(), self.caches()
        found = []
        for key in map(tuple, self.settings["methods"]):
            accuracy = {
                task: _pool([row.accuracy for row in rows if row[:2] == key and row.task == task])
                for task in self.settings["tasks"]
            }
            figures = {}
            for name in _COMBINED:
                values = [getattr(row, name) for row in caches if row[:2] == key]
                combine = sum if name.endswith("bytes") else statistics.fmean
                figures[name] = None if None in values else combine(values)
            ratio = _exp(figures["nll_difference"])
            found.append(Average(*key, accuracy=accuracy, perplexity_ratio=ratio, **figures))
        return found

    def dropped(self) -> dict[str, int]:
        """Method and budget → tokens that were lost in retrieval, where there are any."""
        found = Counter()
        for cell, record in self.records.items():
            found[cell.candidate] += record.get("dropped", 0)
        return dict(+found)

    def _cache(self, method: str, budget: int | float | None, length: int) -> CacheRow:
        key = method, budget, length
        own = {cell: found for cell, found in self.records.items() if cell[1:4] == key}
        answered = [found for found in own.values() if "right" in found]
        first = answered[0] if answered else {}
        figures = {**own[Cell("perplexity", *key)], **own[Cell("fidelity", *key)]}
        nll, recall, error = map(figures.get, ("nll", "recall", "error"))
        full = self.records[Cell("perplexity", "full", None, length)].get("nll")
        difference = None if None in (nll, full) else nll - full
        reasons = [f"{cell.measure}: {r['failed']}" for cell, r in own.items() if "failed" in r]
        times = {
            name: [seconds for found in answered for seconds in found[name]]
            for name in ("ttft_s", "tpot_s")
        }
        return CacheRow(
            *key,
            cache_bytes=first.get("cache_bytes"),
            full_cache_bytes=first.get("full_cache_bytes"),
            nll=nll,
            nll_difference=difference,
            perplexity_ratio=_exp(difference),
            recall=recall and statistics.fmean(recall),
            attention_error=error and statistics.fmean(error),
            layer_recall=recall,
            layer_error=error,
            **{name: statistics.median(all_) if all_ else None for name, all_ in times.items()},
            failed="; ".join(dict.fromkeys(reasons)) or None,
        )


def _pool(found: Sequence[Proportion | None]) -> Proportion | None:
    """The cases of several cells together; None if one of them failed."""
    return None if None in found else Proportion(*map(sum, zip(*found, strict=True)))


def _exp(value: float | None) -> float | None:
    return None if value is None else math.exp(value)
