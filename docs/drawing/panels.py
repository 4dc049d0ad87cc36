"""Figures, fields and lines that look alike in all pictures.

Dark is more and light is less, so that prints in grey say the same; colours are Okabe and Ito's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .material import Material

GONE, PALE, KEPT, OTHER = "#f2f2f2", "#b5b5b5", "#1f3b73", "#E69F00"
LINES = (("#0072B2", "-"), ("#D55E00", (0, (5, 2))), ("#009E73", (0, (1, 1))),
         ("#CC79A7", (0, (5, 1, 1, 1))))  # fmt: skip
LOOK = {
    "font.sans-serif": ["DejaVu Sans", "Arial"], "font.size": 8,
    "axes.titlesize": 9, "axes.labelsize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "savefig.dpi": 150, "svg.fonttype": "none", "svg.hashsalt": "kvjax",
}  # fmt: skip


def new_figure(height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """A figure as wide as a page, and its axes."""
    figure = Figure(figsize=(7.2, height), layout="constrained")
    return figure, figure.subplots(rows, columns, sharex=rows > 1)


def draw_field(axes: Axes, marks: np.ndarray, label: str, group: int) -> None:
    """Rows of marks, a line between groups of rows."""
    axes.imshow(marks, aspect="auto", interpolation="nearest", vmin=0, vmax=2,
                cmap=ListedColormap([GONE, KEPT, OTHER]))  # fmt: skip
    part_rows(axes, label, group)
    axes.set_xlabel("position of the token")


def part_rows(axes: Axes, label: str, group: int) -> None:
    """A line between groups of rows, and their numbers."""
    rows = round(axes.get_ylim()[0] - axes.get_ylim()[1])
    for y in range(group, rows, group):
        axes.axhline(y - 0.5, color="white", linewidth=2)
    axes.set_yticks(np.arange(group / 2 - 0.5, rows, group), range(rows // group))
    axes.set_ylabel(label)


def shade_answer(axes: Axes, material: Material, top: float | None = -0.5) -> None:
    """Shades the positions of what the question asks for; names them at the height `top`."""
    first, last = material.answer
    if top is not None:
        axes.annotate("answer", ((first + last) / 2, top), xytext=(0, 5), ha="center", fontsize=7,
                      textcoords="offset points", annotation_clip=False)  # fmt: skip
    axes.axvspan(first - 0.5, last + 0.5, color=OTHER, alpha=0.25, linewidth=0)


def legend(figure: Figure, **labels: str) -> None:
    """What the colours mean: `kept`, `other` and `gone`."""
    colours = {"kept": KEPT, "other": OTHER, "gone": PALE}
    patches = [Patch(facecolor=colours[name], label=label) for name, label in labels.items()]
    figure.legend(handles=patches, loc="outside lower right", ncols=len(patches), fontsize=7)


def draw_stems(heads: list, label: str, title: str, log: bool = False) -> Figure:
    """A line at each slot's position, one panel per head."""
    figure, panels = new_figure(3.4, rows=len(heads))
    top = max(float(height.max()) for _, height in heads)
    for head, (axes, (at, height)) in enumerate(zip(panels, heads, strict=True)):
        axes.vlines(at, 0.7 if log else 0, height, color=KEPT, linewidth=0.8, rasterized=True)
        if log:
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter("{x:g}")
        axes.set_ylim(0.7 if log else 0, top * 1.1)
        axes.set_ylabel(f"head {head}")
    panels[0].set_title(f"{title}: {label}")
    panels[-1].set_xlabel("position of the token")
    return figure
