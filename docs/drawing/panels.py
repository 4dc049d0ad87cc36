"""Figures and lines of the pictures that `kvjax.plot` does not draw."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from kvjax.plot.looks import COLOURS

LINES = (("#0072B2", "-"), ("#D55E00", (0, (5, 2))), ("#009E73", (0, (1, 1))),
         ("#CC79A7", (0, (5, 1, 1, 1))))  # fmt: skip


def new_figure(height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """A figure as wide as a page, and its axes."""
    figure = Figure(figsize=(7.2, height), layout="constrained")
    return figure, figure.subplots(rows, columns, sharex=rows > 1)


def draw_stems(heads: list, label: str, title: str) -> Figure:
    """A line at each slot's position, one panel per head."""
    figure, panels = new_figure(3.4, rows=len(heads))
    top = max(float(height.max()) for _, height in heads)
    for head, (axes, (at, height)) in enumerate(zip(panels, heads, strict=True)):
        axes.vlines(at, 0, height, color=COLOURS["kept"], linewidth=0.8, rasterized=True)
        axes.set_ylim(0, top * 1.1)
        axes.set_ylabel(f"head {head}")
    panels[0].set_title(f"{title}: {label}")
    panels[-1].set_xlabel("position of the token")
    return figure
