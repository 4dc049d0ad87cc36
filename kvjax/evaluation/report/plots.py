"""Pictures of a comparison: scores and losses by cache bytes, and scores by depth and length."""

from __future__ import annotations

import io
import itertools
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullFormatter, NullLocator
from matplotlib.ticker import PercentFormatter as Percent

from kvjax.evaluation.cells.results import Results, Row
from kvjax.evaluation.tasks import MEASURES

from .tables import panel_name, percent

# Okabe and Ito's colours, which colour-blind readers can distinguish. Each has its own marker and
# dash, so that prints in grey can be read too.
_COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#332288",
    "#882255", "#117733",
)  # fmt: skip
_MARKERS = "os^DvPX<*h"
_DASHES = (
    "-", (0, (5, 2)), (0, (5, 1, 1, 1)), (0, (1, 1)), (0, (9, 2)), (0, (3, 1)),
    (0, (7, 1, 1, 1, 1, 1)), (0, (2, 2)), (0, (6, 1, 2, 1)), (0, (4, 4)),
)  # fmt: skip
_DEPTH_BINS = 5
_NATS_TICKS = (-1, -0.1, -0.01, 0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)

LOOK: dict[Any, Any] = {
    "font.sans-serif": ["DejaVu Sans", "Arial"], "font.size": 8,
    "axes.titlesize": 9, "axes.labelsize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "axes.prop_cycle": cycler("color", _COLOURS[:7]),
    "lines.markersize": 4, "figure.constrained_layout.use": True, "savefig.dpi": 150,
    "svg.fonttype": "none", "svg.hashsalt": "kvjax",
}  # fmt: skip
"""Settings of these pictures, for `matplotlib.rc_context` or `matplotlib.rcParams.update`.

With them, equal pictures give equal SVG files.
"""

_LITERAL = {**LOOK, "text.parse_math": False}  # a name of a method may contain dollar signs


def style(number: int) -> dict[str, Any]:
    """Returns colour, marker and dash of line `number`; the first hundred lines all differ.

    Later lines have smaller markers, so that a marker below them in the same place stays visible.
    """
    turn, colour = divmod(number, len(_COLOURS))
    # Every further turn through the colours pairs them with other markers and dashes.
    shape = (colour + turn) % len(_COLOURS)
    return {
        "color": _COLOURS[colour], "marker": _MARKERS[shape], "linestyle": _DASHES[shape],
        "markersize": max(5.5, 9.0 - 0.25 * number), "linewidth": 1.6,
    }  # fmt: skip


@matplotlib.rc_context(_LITERAL)
def png(figure: Figure) -> bytes:
    """Returns the content of a PNG file of the figure."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


@matplotlib.rc_context(_LITERAL)
def figures(results: Results) -> dict[str, Figure]:
    """Draws the pictures of a comparison; returns them by name.

    The names are `scores_by_bytes_<length>`, `<task>_<length>` of losses such as
    `perplexity_<length>`, and `heatmap_<method>`. A picture without data is left out.
    """
    panels, drawn = results.panels(), {}
    for length in results.settings["lengths"]:
        keys = [key for key in panels if key[1] == length]
        answers = [key for key in keys if key[0] not in MEASURES and not results.is_loss(key[0])]
        losses = [key for key in keys if results.is_loss(key[0])]
        suffix = f"by bytes of the cache, prompts of {length:,} tokens"
        if answers:
            drawn[f"scores_by_bytes_{length}"] = _by_bytes(results, answers, f"Score {suffix}")
        for task in dict.fromkeys(task for task, _, _ in losses):
            of_task = [key for key in losses if key[0] == task]
            title = f"Loss, {panel_name(task, None)}, {suffix}"
            drawn[f"{task}_{length}"] = _by_bytes(results, of_task, title)
    for number, method in enumerate(["full", *_methods(results)]):
        figure = _heat_map(results, method)
        if figure is not None:
            name = "heatmap_" + re.sub(r"[^\w.=-]+", "_", method).strip("_")[:100]
            # Names of two methods may differ only in the signs that were replaced above.
            drawn[f"{name}_{number}" if name in drawn else name] = figure
    return drawn


def _methods(results: Results) -> list[str]:
    """Returns the methods, without the full cache, in the order of their line styles."""
    names = dict.fromkeys(method for method, _ in results.settings["methods"])
    return [name for name in names if name != "full"]


def _panels(
    count: int, size: tuple[float, float], title: str, below: float = 0.0
) -> tuple[Figure, list[Axes]]:
    """Makes a figure with `count` panels, two per row.

    Args:
      count: number of panels.
      size: width and height of a panel in inches.
      title: title of the figure.
      below: inches of free room below the panels.
    """
    columns = min(count, 2)
    rows = math.ceil(count / columns)
    width = max(6.4, columns * size[0])
    figure = Figure((width, 0.6 + rows * size[1] + below), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[count:]:
        unused.remove()
    figure.suptitle(textwrap.fill(title, int(12 * width)))
    return figure, axes[:count]


def _by_bytes(results: Results, keys: Sequence[tuple], title: str) -> Figure:
    """Draws a panel for each key: a line per method over its budgets, the full cache as a band."""
    names = [textwrap.fill(name, 60) for name in ("full cache", *_methods(results))]
    columns = 3 if max(map(len, names)) < 20 else 1
    lines = sum(name.count("\n") + 1 for name in names) // columns + 1
    figure, panels = _panels(len(keys), (4.4, 3.1), title, below=0.18 * lines)
    for axes, key in zip(panels, keys, strict=True):
        _draw_by_bytes(axes, results, key)
    handles, _ = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=columns)
    return figure


def _draw_by_bytes(axes: Axes, results: Results, key: tuple) -> None:
    rows, at_floor, loss = results.panels()[key], results.at_floor(key), results.is_loss(key[0])

    def estimate(row: Row) -> tuple[float, float, float] | None:
        figure = row.difference if loss else row.score
        return None if figure is None else figure[:3]

    full = next((estimate(row) for row in rows if row.method == "full"), None)
    # An empty line makes the entry of the legend, even if the full cache has no score.
    axes.plot([], [], color="black", linewidth=1.2, label="full cache")
    if full is not None:
        axes.axhspan(full[1], full[2], color="0.88", zorder=0)
        axes.axhline(full[0], color="black", linewidth=1.2)
    shares = [0.5, 1.0]
    for number, method in enumerate(_methods(results)):
        estimates = (
            (row.share, estimate(row))
            for row in rows
            if row.method == method and row.share is not None
        )
        points = sorted((share, *figure) for share, figure in estimates if figure is not None)
        share, value, low, high = np.array(points, float).reshape(-1, 4).T
        shares += share.tolist()
        # For scores of 0 and 1, rounding may put an end of the interval on the wrong side.
        interval = np.maximum((value - low, high - value), 0)
        axes.errorbar(
            share, value, interval, label=method, elinewidth=0.9, capsize=2.5, capthick=0.9,
            markeredgecolor="white", **style(number),
        )  # fmt: skip
    axes.set_title(panel_name(key[0], key[2]))
    axes.set_xscale("log")
    axes.set_xticks([0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0])
    axes.set_xlim(0.8 * min(shares), 1.15 * max(shares))
    axes.xaxis.set_major_formatter(Percent(1.0, decimals=0))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("bytes, share of the full cache's")
    axes.grid(alpha=0.25)
    if loss:
        _nats_axis(axes)
    else:
        highest = axes.dataLim.y1 if np.isfinite(axes.dataLim.y1) else 1.0
        # Low scores get a smaller range, in which they can be told apart.
        top = 1.06 if highest > 0.5 else max(0.1, 1.2 * highest)
        axes.set_ylim(-0.03 * top, top)
        axes.yaxis.set_major_formatter(Percent(1.0, symbol="", decimals=0))
        axes.set_ylabel("score, with 95 % interval")
    if at_floor:
        axes.set_facecolor("0.95")
        axes.text(0.5, 0.96, "full cache at the floor: not ranked", transform=axes.transAxes,
                  ha="center", va="top")  # fmt: skip


def _nats_axis(axes: Axes) -> None:
    """Makes the axis linear up to 0.01 and logarithmic beyond: methods differ a hundredfold."""
    axes.set_yscale("symlog", linthresh=0.01, linscale=0.4)
    axes.margins(y=0.08)
    axes.yaxis.set_major_locator(FixedLocator(_NATS_TICKS))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.set_ylabel("nats per token more than full")


def _heat_map(results: Results, method: str) -> Figure | None:
    """Draws scores by depth and length, a panel for each task and question with depths."""
    budgets = [budget for name, budget in results.settings["methods"] if name == method]
    columns = [(budget, length) for budget in budgets for length in results.settings["lengths"]]
    rows, bins = results.rows(), {}
    for task in dict.fromkeys(row.task for row in rows):
        if task_bins := depth_bins(row for row in rows if row.task == task):
            bins[task] = task_bins
    keys = list(dict.fromkeys((row.task, row.question) for row in rows if row.task in bins))
    if not keys:
        return None
    method_rows = {
        (row.task, row.question, row.budget, row.length): row
        for row in rows
        if row.method == method
    }
    size = max(2.8, 0.9 + 0.62 * len(columns)), 1.1 + 0.4 * max(map(len, bins.values()))
    title = f"{method}: score by depth and prompt tokens"
    figure, panels = _panels(len(keys), size, title)
    for axes, key in zip(panels, keys, strict=True):
        shown = [method_rows.get((*key, *column)) for column in columns]
        draw_heat_map(axes, columns, bins[key[0]], shown)
        axes.set_title(panel_name(*key))
    return figure


def draw_heat_map(
    axes: Axes,
    columns: Sequence[tuple[int | float | None, int]],
    bins: Sequence[tuple[str, float, float]],
    rows: Sequence[Row | None],
) -> None:
    """Draws depths downwards, budgets and lengths to the right; hatches fields without cases."""
    scores = np.full((len(bins), len(columns)), math.nan)
    for x, row in enumerate(rows):
        for y, (_, first, last) in enumerate(bins):
            depths = {} if row is None else row.depths or {}
            inside = [score for depth, score in depths.items() if first <= depth <= last]
            cases = sum(score.cases for score in inside)
            text = "-" if row is None or row.failed is None else "failed"
            if cases:
                scores[y, x] = sum(score.mean * score.cases for score in inside) / cases
                text = f"{percent(scores[y, x])}\nof {cases}"
            colour = "white" if scores[y, x] < 0.5 else "black"  # low scores are dark fields
            axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", color=colour, fontsize=7)
        if x and columns[x][0] != columns[x - 1][0]:
            axes.axvline(x, color="white", linewidth=5)
    # Fields without cases are NaN and not drawn, so that the hatched background shows.
    axes.patch.set(facecolor="0.9", edgecolor="0.6", hatch="///")
    axes.pcolormesh(scores, vmin=0, vmax=1, cmap="cividis", edgecolors="white")
    axes.set_ylim(len(bins), 0)  # the first depth is at the top
    ticks = [
        f"{length:,}" if budget is None else f"{length:,}\n{budget}" for budget, length in columns
    ]
    axes.set_xticks(np.arange(len(columns)) + 0.5, ticks)
    axes.set_yticks(np.arange(len(bins)) + 0.5, [name for name, _, _ in bins])
    axes.set_xlabel("prompt tokens" if columns[0][0] is None else "prompt tokens, budget below")
    axes.set_ylabel("depth (0: start)")


def depth_bins(rows: Iterable[Row]) -> list[tuple[str, float, float]]:
    """Returns name, first and last depth of each bin.

    Up to 5 depths are bins themselves; more depths are grouped into 5 equal parts.
    """
    depths = sorted({depth for row in rows for depth in row.depths or ()})
    if len(depths) <= _DEPTH_BINS:
        return [(f"{depth:g}", depth, depth) for depth in depths]
    ends = [number / _DEPTH_BINS for number in range(_DEPTH_BINS + 1)]
    return [
        # A depth on a border belongs to the part above it; a depth of 1 belongs to the last part.
        (f"{low:g}-{high:g}", low, high if high == 1 else math.nextafter(high, 0))
        for low, high in itertools.pairwise(ends)
    ]
