"""Pictures of a comparison, drawn with matplotlib and without a display."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter

from .files import writing
from .results import Average, Proportion, Results

# Okabe and Ito's colours, which colour-blind readers can tell apart. Each has a marker and a dash
# of its own, so that prints in grey can be read too. Later methods have smaller markers, so that a
# marker in the same place below them is visible.
_STYLES = cycler(
    color=[
        "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#332288",
        "#882255", "#117733",
    ],
    marker="os^DvPX<*h",
    markersize=np.linspace(11, 6, 10),
    linestyle=[
        "-", (0, (5, 2)), (0, (5, 1, 1, 1)), (0, (1, 1)), (0, (9, 2)), (0, (3, 1)),
        (0, (7, 1, 1, 1, 1, 1)), (0, (2, 2)), (0, (6, 1, 2, 1)), (0, (4, 4)),
    ],
)  # fmt: skip


def draw(results: Results, folder: Path) -> None:
    """Writes all pictures of a comparison to a folder.

    `accuracy_vs_budget.png` and `bytes_vs_accuracy.png` with a line per method, and for each method
    `heatmap_<method>.png`, depth × length for every task and budget. A failed cell is a gap.
    """
    _save(accuracy_vs_budget(results), folder / "accuracy_vs_budget.png")
    _save(bytes_vs_accuracy(results), folder / "bytes_vs_accuracy.png")
    for method in _methods(results):
        name = re.sub(r"[^\w.=-]+", "_", method).strip("_")
        _save(heatmap(results, method), folder / f"heatmap_{name}.png")


def _save(figure: Figure, path: Path) -> None:
    with writing(path):
        figure.savefig(path, dpi=150)


def accuracy_vs_budget(results: Results) -> Figure:
    """A panel per task: accuracy over all lengths and depths against the budget."""
    given = {budget for _, budget in results.settings["methods"] if budget is not None}
    budgets = sorted(given, key=lambda budget: (isinstance(budget, int), budget))
    places = range(max(1, len(budgets)))

    def points(rows: list[Average], number: int) -> tuple[list[float], list[Average]]:
        # Shifted sideways, or the bars of equally good methods would hide each other.
        aside = 0.08 * (number - (len(_methods(results)) - 2) / 2)
        if rows[0].budget is None:
            return [x + aside for x in places], rows * len(places)
        return [budgets.index(row.budget) + aside for row in rows], rows

    figure = _lines(results, "Right answers by budget", points)
    for axes in figure.axes:
        axes.set_xticks(range(len(budgets)), map(str, budgets))
        axes.set_xlim(-0.5, len(places) - 0.5)
        axes.set_xlabel("budget (share of the prompt, or slots per KV head)")
    return figure


def bytes_vs_accuracy(results: Results) -> Figure:
    """A panel per task: accuracy against the cache's bytes, as a share of the full cache's."""
    averages = results.averages()
    # A candidate with a failed cell may have no bytes, and then it has no point.
    share = {
        row[:2]: row.cache_bytes / row.full_cache_bytes
        for row in averages
        if row.cache_bytes is not None
    }

    def points(rows: list[Average], number: int) -> tuple[list[float], list[Average]]:
        rows = [row for row in rows if row[:2] in share]
        return [share[row[:2]] for row in rows], rows

    figure = _lines(results, "Right answers by bytes", points)
    for axes, full in zip(figure.axes, averages[0].accuracy.values(), strict=True):
        if full is not None:
            axes.plot(1.0, full.share, marker="*", markersize=12, color="black", linestyle="")
        axes.set_xscale("log")
        axes.set_xticks([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0])
        axes.set_xlim(min(share.values(), default=0.1) * 0.8, 1.15)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("bytes of the cache, share of the full cache's (log scale)")
    return figure


def heatmap(results: Results, method: str) -> Figure:
    """A method's accuracy by depth and length: a row of panels per task, a column per budget."""
    tasks, depths, lengths = (results.settings[name] for name in ("tasks", "depths", "lengths"))
    budgets = [budget for name, budget in results.settings["methods"] if name == method]
    width = max(4.8, 1.6 + len(budgets) * (1.0 + 0.72 * len(lengths)))
    height = 1.0 + len(tasks) * (1.0 + 0.52 * len(depths))
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(len(tasks), len(budgets), squeeze=False, sharex=True, sharey=True)
    found = {row[:5]: row.accuracy for row in results.rows()}
    for line, task in zip(panels, tasks, strict=True):
        for axes, budget in zip(line, budgets, strict=True):
            image = _fields(axes, [
                [found[method, budget, length, task, depth] for length in lengths]
                for depth in depths
            ])  # fmt: skip
            axes.set_xticks(np.arange(len(lengths)) + 0.5, [f"{x:,}" for x in lengths], fontsize=8)
            axes.set_yticks(np.arange(len(depths)) + 0.5, [f"{y:g}" for y in depths], fontsize=8)
            title = _label(task) if budget is None else f"{_label(task)}, budget {budget}"
            axes.set_title(title, fontsize=9)
        line[0].set_ylabel("depth (0 = start)")
    for axes in panels[-1]:
        axes.set_xlabel("prompt tokens")
    figure.colorbar(image, ax=panels, shrink=0.8, pad=0.02, label="accuracy")
    figure.suptitle(f"{method}: answers by depth and length", fontsize=11)
    return figure


def _fields(axes: Axes, grid: list[list[Proportion | None]]) -> Any:
    """One heat map, accuracy and cases written into each field; hatched where a cell failed."""
    shares = [[math.nan if one is None else one.share for one in line] for line in grid]
    axes.patch.set(facecolor="0.9", edgecolor="0.6", hatch="///")
    image = axes.pcolormesh(shares, vmin=0, vmax=1, cmap="cividis", edgecolors="white")
    axes.set_ylim(len(grid), 0)  # the first depth is at the top
    for y, line in enumerate(grid):
        for x, one in enumerate(line):
            text = "failed" if one is None else f"{one.percent}%\n{one.right}/{one.cases}"
            colour = "black" if one is None or one.share >= 0.5 else "white"
            axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", color=colour, fontsize=8)
    return image


def _lines(
    results: Results,
    title: str,
    points: Callable[[list[Average], int], tuple[list[float], list[Average]]],
) -> Figure:
    """A panel per task with a line per method; the full cache is a line across and a band.

    `points` takes a method's averages and its number, and returns x and the averages to draw there.
    """
    settings, averages = results.settings, results.averages()
    tasks, methods = settings["tasks"], _methods(results)[1:]
    figure = Figure(figsize=(1.2 + 4.6 * len(tasks), 4.8), layout="constrained")
    panels = figure.subplots(1, len(tasks), squeeze=False, sharey=True)[0]
    for task, axes in zip(tasks, panels, strict=True):
        axes.set_title(_label(task))
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_prop_cycle(_STYLES)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if (full := averages[0].accuracy[task]) is not None:
            axes.axhspan(*full.interval, color="0.88", zorder=0)
            axes.axhline(full.share, color="black", linewidth=1.2, label="full cache")
        for number, method in enumerate(methods):
            x, rows = points([row for row in averages if row.method == method], number)
            _line(axes, x, [row.accuracy[task] for row in rows], method)
    panels[0].set_ylabel("right answers, with 95 % interval")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(5, len(labels)), frameon=False
    )
    lengths = ", ".join(f"{length:,}" for length in settings["lengths"])
    per_point = settings["cases"] * len(settings["lengths"]) * len(settings["depths"])
    figure.suptitle(
        f"{title}\nprompts of {lengths} tokens, {len(settings['depths'])} depths, "
        f"{per_point:,} cases a point; the question is inside the compressed prompt", fontsize=9,
    )  # fmt: skip
    return figure


def _line(axes: Axes, x: list[float], found: list[Proportion | None], method: str) -> None:
    """A method's points with their intervals; failed ones are left out and break the line."""
    points = [(math.nan,) * 3 if one is None else (one.share, *one.interval) for one in found]
    y, low, high = np.array(points).reshape(-1, 3).T
    axes.errorbar(
        # For shares of 0 and 1, rounding may put an end of the interval on the wrong side.
        x, y, yerr=np.maximum((y - low, high - y), 0), label=method if found else None,
        markeredgecolor="white", linewidth=1.8, elinewidth=1, capsize=3,
    )  # fmt: skip


def _methods(results: Results) -> list[str]:
    return list(dict.fromkeys(method for method, _ in results.settings["methods"]))


def _label(task: str) -> str:
    return task.replace("_", " ")
