"""Means of scores, each with a confidence interval."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

_RESAMPLES = 2_000  # of a bootstrap


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
    def interval(self) -> tuple[float, float]:
        """The 95 % Wilson score interval.

        With p = right / cases, n = cases and z = 1.96:
        `(p + z²/2n ± z·√(p(1 − p)/n + z²/4n²)) / (1 + z²/n)`.

        References:
          Wilson, Probable Inference, the Law of Succession, and Statistical Inference, 1927.
        """
        return _wilson(self.right, self.cases)


@cache  # a table asks thousands of times for a few dozen of them
def _wilson(right: int, cases: int) -> tuple[float, float]:
    # Imported here: scipy takes a while to import, and only reports need it.
    from scipy.stats import binomtest

    low, high = binomtest(right, cases).proportion_ci(method="wilson")
    return float(low), float(high)


class Estimate(NamedTuple):
    """A mean over cases with a 95 % confidence interval.

    Example:
      >>> from kvjax.evaluation import Estimate
      >>> found = Estimate.of([1.0, 1.0, 0.0, 1.0])
      >>> found.mean, round(found.low, 3), round(found.high, 3), found.cases
      (0.75, 0.301, 0.954, 4)
    """

    mean: float
    low: float
    high: float
    cases: int

    @classmethod
    def of(cls, scores: Sequence[float]) -> Estimate:
        """Of scores: Wilson's interval where all of them are 0 or 1, else a bootstrap's."""
        values = np.asarray(scores, np.float64)
        if not np.isin(values, (0.0, 1.0)).all():
            return cls.resampled(values)
        interval = Proportion(int(values.sum()), len(values)).interval
        return cls(float(values.mean()), *interval, len(values))

    @classmethod
    def resampled(cls, scores: Sequence[float]) -> Estimate:
        """With a bootstrap's interval: percentiles of 2,000 resamples, drawn with a fixed seed."""
        values = np.asarray(scores, np.float64)
        low = high = float(values[0])
        if np.ptp(values) > 0:
            from scipy.stats import bootstrap

            found = bootstrap(
                (values,), np.mean, n_resamples=_RESAMPLES, method="percentile",
                rng=np.random.default_rng(0),
            )  # fmt: skip
            low, high = map(float, found.confidence_interval)
        return cls(float(values.mean()), low, high, len(values))
