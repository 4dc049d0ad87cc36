"""What pictures of a comparison draw upwards: scores, losses, errors, recall."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullLocator, PercentFormatter

from kvjax.evaluation.cells.results import Row

_NATS_TICKS = (-1, -0.1, -0.01, 0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)

Value = tuple[float, float, float]  # a figure and the ends of its interval


class Measure(NamedTuple):
    """What is drawn upwards.

    Args:
      label: of the axis.
      value: of a row; None where there is none.
      finish: makes the axis.
      of: what a title says before the task.
    """

    label: str
    value: Callable[[Row], Value | None]
    finish: Callable[[Axes], None]
    of: str = ""


def _score_axis(axes: Axes) -> None:
    highest = axes.dataLim.y1 if np.isfinite(axes.dataLim.y1) else 1.0
    top = 1.06 if highest > 0.5 else max(0.1, 1.2 * highest)
    axes.set_ylim(-0.03 * top, top)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol="", decimals=0))


def _nats_axis(axes: Axes) -> None:
    """Linear up to 0.01, logarithmic beyond: methods differ by factors of a hundred."""
    axes.set_yscale("symlog", linthresh=0.01, linscale=0.4)
    axes.margins(y=0.08)  # of the new scale
    axes.yaxis.set_major_locator(FixedLocator(_NATS_TICKS))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))


def _error_axis(axes: Axes) -> None:
    axes.set_ylim(0, None)


def _score(row: Row) -> Value | None:
    return None if row.score is None else row.score[:3]


def _nats(row: Row) -> Value | None:
    return None if row.difference is None else row.difference[:3]


def _recall(row: Row) -> Value | None:
    return None if row.recall is None else (row.recall,) * 3


SCORE = Measure("score, with 95 % interval", _score, _score_axis)
NATS = Measure("nats per token more than full", _nats, _nats_axis)
ERROR = Measure("relative error", _score, _error_axis, "error of ")
RECALL = Measure("recall in %", _recall, _score_axis, "recall of ")
