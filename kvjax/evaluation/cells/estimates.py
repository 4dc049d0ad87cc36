"""Means of scores, each with a confidence interval."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

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
    def resampled(cls, scores: Sequence[float]) -> Estimate:
        """Estimates the mean with a bootstrap's interval: percentiles of 2,000 resamples.

        The resamples have a fixed seed.
        """
        values = np.asarray(scores, np.float64)
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
