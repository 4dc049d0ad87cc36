"""Means of scores, each with a confidence interval."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

_RESAMPLES = 2_000  # resamples of a bootstrap


@cache  # a table needs a few dozen intervals, thousands of times
def _wilson(right: int, cases: int) -> tuple[float, float]:
    """Returns the 95 % interval of a share, `right` of `cases`."""
    # Imported here: scipy takes a while to import, and only reports need it.
    from scipy.stats import binomtest

    low, high = binomtest(right, cases).proportion_ci(method="wilson")
    return float(low), float(high)


class Estimate(NamedTuple):
    """A mean over cases with a 95 % confidence interval.

    Args:
      mean: the mean.
      low, high: ends of the interval.
      cases: number of cases.

    Example:
      >>> from kvjax.evaluation import Estimate
      >>> score = Estimate.of([1.0, 1.0, 0.0, 1.0])
      >>> score.mean, round(score.low, 3), round(score.high, 3), score.cases
      (0.75, 0.301, 0.954, 4)
    """

    mean: float
    low: float
    high: float
    cases: int

    @classmethod
    def of(cls, scores: Sequence[float]) -> Estimate:
        """Estimates the mean, with Wilson's interval if all scores are 0 or 1, else a bootstrap's.

        With p the mean, n cases and z = 1.96, Wilson's interval is
        `(p + z²/2n ± z·√(p(1 − p)/n + z²/4n²)) / (1 + z²/n)`.

        References:
          Wilson, Probable Inference, the Law of Succession, and Statistical Inference, 1927.
        """
        values = np.asarray(scores, np.float64)
        if not np.isin(values, (0.0, 1.0)).all():
            return cls.resampled(values)
        interval = _wilson(int(values.sum()), len(values))
        return cls(float(values.mean()), *interval, len(values))

    @classmethod
    def resampled(
        cls, scores: Sequence[float] | np.ndarray, groups: Sequence[int] | None = None
    ) -> Estimate:
        """Estimates the mean with a bootstrap's interval: percentiles of 2,000 resamples.

        The resamples have a fixed seed.

        Args:
          scores: those of all cases.
          groups: a number for each case, equal for cases whose scores depend on each other, such
            as questions about one passage. Groups are then drawn first, and cases within them.
            None: cases are independent.
        """
        values = np.asarray(scores, np.float64)
        if groups is not None:
            return cls.ratio(values.tolist(), [1.0] * len(values), groups)
        # Equal values have an interval of no width; scipy's bootstrap refuses a single value.
        low = high = float(values[0])
        if np.ptp(values) > 0:
            from scipy.stats import bootstrap

            resampled = bootstrap(
                (values,), np.mean, n_resamples=_RESAMPLES, method="percentile",
                rng=np.random.default_rng(0),
            )  # fmt: skip
            low, high = map(float, resampled.confidence_interval)
        return cls(float(values.mean()), low, high, len(values))

    @classmethod
    def ratio(
        cls, parts: Sequence[float], wholes: Sequence[float], groups: Sequence[int]
    ) -> Estimate:
        """Estimates the mean of `parts` divided by the mean of `wholes`, as `resampled` does.

        Args:
          parts, wholes: two numbers for each case.
          groups: as in `resampled`.

        Example:
          >>> from kvjax.evaluation import Estimate
          >>> share = Estimate.ratio([1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [0, 0, 1])
          >>> share.mean, share.low, share.high, share.cases
          (0.5, 0.5, 0.5, 3)
        """
        part, whole = np.asarray(parts, np.float64), np.asarray(wholes, np.float64)
        weights = _drawn(np.asarray(groups))
        low, high = np.percentile((weights @ part) / (weights @ whole), (2.5, 97.5))
        return cls(float(part.sum() / whole.sum()), float(low), float(high), len(part))


def _drawn(groups: Int[np.ndarray, " N"]) -> Int[np.ndarray, "R N"]:
    """Returns how often each resample has each case: groups are drawn, and cases within them."""
    rng = np.random.default_rng(0)
    numbers, member = np.unique(groups, return_inverse=True)
    shares = np.full(len(numbers), 1 / len(numbers))
    times = rng.multinomial(len(numbers), shares, size=_RESAMPLES)
    weights = np.zeros((_RESAMPLES, len(groups)), int)
    for group in range(len(numbers)):
        cases = np.flatnonzero(member == group)
        shares = np.full(len(cases), 1 / len(cases))
        weights[:, cases] = rng.multinomial(len(cases) * times[:, group], shares)
    return weights
