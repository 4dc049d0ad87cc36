"""Scores of a method by depth and length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes

from kvjax.evaluation.cells.results import Results, Row

from .pictures import Panel
from .tables import panel_name, percent

_FIELD = 0.62, 0.4  # inches of a field, width and height


def heat_map(results: Results, method: str) -> tuple[list[list[Panel]], tuple[float, float]]:
    """A row of panels for each task whose cases have depths, one per question.

    Returns:
      The panels, and the inches of one.
    """
    lengths = results.settings["lengths"]
    budgets = [budget for name, budget in results.settings["methods"] if name == method]
    columns = [(budget, length) for budget in budgets for length in lengths]
    tasks: dict[str, list[Row]] = {}
    for row in results.rows():
        tasks.setdefault(row.task, []).append(row)
    lines, most = [], 0
    for task, rows in tasks.items():
        bins = depth_bins(rows)
        if not bins:
            continue
        most = max(most, len(bins))
        found = {(*row.panel, *row.candidate): row for row in rows}
        line = []
        for question in dict.fromkeys(row.question for row in rows):
            own = [
                found.get((task, length, question, method, budget)) for budget, length in columns
            ]
            line.append(Panel(panel_name(task, question), partial(_draw, columns, bins, own)))
        lines.append(line)
    width, height = _FIELD
    return lines, (max(2.8, 0.9 + width * len(columns)), 1.1 + height * most)


def _draw(
    columns: list[tuple[int | float | None, int]],
    bins: list[tuple[str, float, float]],
    rows: list[Row | None],
    axes: Axes,
) -> None:
    """Depths downwards, budgets and lengths to the right; a field without cases is hatched."""
    found = [[None] * len(bins) if row is None else by_depth(row, bins) for row in rows]
    shares = np.array([[math.nan if one is None else one[0] for one in line] for line in found])
    axes.patch.set(facecolor="0.9", edgecolor="0.6", hatch="///")
    axes.pcolormesh(shares.T, vmin=0, vmax=1, cmap="cividis", edgecolors="white")
    axes.set_ylim(len(bins), 0)  # the first depth is at the top
    for x, (row, line) in enumerate(zip(rows, found, strict=True)):
        if x and columns[x][0] != columns[x - 1][0]:
            axes.axvline(x, color="white", linewidth=5)
        for y, one in enumerate(line):
            absent = "-" if row is None or row.failed is None else "failed"
            text = absent if one is None else f"{percent(one[0])}\nof {one[1]}"
            colour = "black" if one is None or one[0] >= 0.5 else "white"
            axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", color=colour, fontsize=7)
    ticks = [
        f"{length:,}" if budget is None else f"{length:,}\n{budget}" for budget, length in columns
    ]
    axes.set_xticks(np.arange(len(columns)) + 0.5, ticks)
    axes.set_yticks(np.arange(len(bins)) + 0.5, [name for name, _, _ in bins])
    axes.set_xlabel("prompt tokens" if columns[0][0] is None else "prompt tokens, budget below")
    axes.set_ylabel("depth (0: start)")


def by_depth(row: Row, bins: Sequence[tuple[str, float, float]]) -> list[tuple[float, int] | None]:
    """Mean score and cases of each bin of `depth_bins`; None where there is no case."""

    def of(first: float, last: float) -> tuple[float, int] | None:
        inside = [one for depth, one in (row.depths or {}).items() if first <= depth <= last]
        cases = sum(one.cases for one in inside)
        return (sum(one.mean * one.cases for one in inside) / cases, cases) if cases else None

    return [of(first, last) for _, first, last in bins]


def depth_bins(rows: Iterable[Row], most: int = 5) -> list[tuple[str, float, float]]:
    """Names, first and last depths of bins: the depths themselves, or so many equal parts."""
    depths = sorted({depth for row in rows for depth in row.depths or ()})
    if len(depths) <= most:
        return [(f"{depth:g}", depth, depth) for depth in depths]
    ends = [number / most for number in range(most + 1)]
    return [
        # A depth on an end belongs to the part above it, 1 to the last part.
        (f"{low:g}-{high:g}", low, high if high == 1 else math.nextafter(high, 0))
        for low, high in itertools.pairwise(ends)
    ]
