"""How pictures of a comparison look: styles, panels put together, legends; PNG and SVG."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvjax.files import writing
from kvjax.messages import printable

# Okabe and Ito's colours, which colour-blind readers can tell apart. Each has a marker and a dash
# of its own, so that prints in grey can be read too.
_COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#332288",
    "#882255", "#117733",
)  # fmt: skip
_MARKERS = "os^DvPX<*h"
_DASHES = (
    "-", (0, (5, 2)), (0, (5, 1, 1, 1)), (0, (1, 1)), (0, (9, 2)), (0, (3, 1)),
    (0, (7, 1, 1, 1, 1, 1)), (0, (2, 2)), (0, (6, 1, 2, 1)), (0, (4, 4)),
)  # fmt: skip
_LETTER = 0.0085  # width of one in inches, for each point of its size; few are wider
_LOOK = {
    "font.sans-serif": ["DejaVu Sans", "Arial"],  # SVG repeats the list with every text
    "figure.dpi": 130, "savefig.dpi": "figure",
    "text.parse_math": False,  # a name may hold dollars
    "svg.fonttype": "none",  # letters stay letters, which a reader can search for
    "svg.hashsalt": "kvjax",  # the same picture is the same file
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9,
    "axes.labelsize": 8, "xtick.labelsize": 8, "ytick.labelsize": 8,
}  # fmt: skip

FULL = "full cache, with the interval of its score"
"""What the legend says of the black line and the grey band."""


class Panel(NamedTuple):
    """One set of axes: its title, and what draws into it."""

    title: str
    draw: Callable[[Axes], None]


class Picture(NamedTuple):
    """Panels that belong together.

    Args:
      name: of the file, without its ending.
      title: in words, of any length.
      panels: rows of panels.
      length: of the prompts; None where the panels show all lengths.
      size: inches of a panel, width and height.
      legend: the methods whose lines are drawn, in the order of their styles.
    """

    name: str
    title: str
    panels: Sequence[Sequence[Panel]]
    length: int | None = None
    size: tuple[float, float] = (4.4, 3.1)
    legend: Sequence[str] = ()


def style(number: int) -> dict[str, Any]:
    """Colour, marker and dash of the line `number`, other ones for each of the first hundred.

    Later lines have smaller markers, so that a marker in the same place below them is visible.
    """
    turn, place = divmod(number, len(_COLOURS))
    other = (place + turn) % len(_COLOURS)
    return {
        "color": _COLOURS[place], "marker": _MARKERS[other], "linestyle": _DASHES[other],
        "markersize": max(5.5, 9.0 - 0.25 * number), "linewidth": 1.6,
    }  # fmt: skip


def _style_of(number: int | None) -> dict[str, Any]:
    return {"color": "black", "linewidth": 1.2} if number is None else style(number)


def save(picture: Picture, folder: Path) -> None:
    """Writes all panels of a picture to `<name>.png`."""
    path = folder / f"{picture.name}.png"
    with matplotlib.rc_context(_LOOK):
        figure = _together(picture)
        with writing(path):
            figure.savefig(path)


def panel_svg(panel: Panel, size: tuple[float, float]) -> str:
    """One panel by itself, without its title, as SVG."""
    with matplotlib.rc_context(_LOOK):
        figure = Figure(figsize=size)
        figure.subplots_adjust(left=0.13, right=0.98, bottom=0.14, top=0.97)
        panel.draw(figure.subplots())
        return _svg(figure)


def picture_svg(picture: Picture) -> str:
    """All panels of a picture, without its title and legend, as SVG."""
    with matplotlib.rc_context(_LOOK):
        width, height = picture.size
        rows, columns = len(picture.panels), max(map(len, picture.panels))
        figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
        _fill(figure, picture)
        return _svg(figure)


def swatch_svg(number: int | None) -> str:
    """The line of a legend, as SVG; None is the full cache's."""
    with matplotlib.rc_context(_LOOK):
        figure = Figure(figsize=(0.5, 0.18))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(0, 2)
        axes.plot([0.1, 1, 1.9], [0, 0, 0], markevery=[1], **_style_of(number))
        return _svg(figure)


def wrapped(text: str, inches: float, points: float) -> str:
    """The text in lines that fit, with names broken that are longer."""
    return textwrap.fill(printable(text), max(8, int(inches / (_LETTER * points))))


def _together(picture: Picture) -> Figure:
    """All panels with title and legend."""
    width, height = picture.size
    rows, columns = len(picture.panels), max(map(len, picture.panels))
    whole = max(6.4, columns * width)
    names = [wrapped(name, whole - 0.8, 8) for name in (FULL, *picture.legend)]
    widest = max(len(line) for name in names for line in name.splitlines())
    beside = max(1, int(whole / (widest * 8 * _LETTER + 0.7)))
    lines = sum(name.count("\n") + 1 for name in names)
    below = (0.3 + 0.2 * math.ceil(lines / beside)) * bool(picture.legend)
    figure = Figure(figsize=(whole, 0.6 + rows * height + below), layout="constrained")
    _fill(figure, picture)
    figure.suptitle(wrapped(picture.title, whole, 10), fontsize=10)
    if picture.legend:
        numbers = (None, *range(len(picture.legend)))
        lines = [Line2D([], [], **_style_of(number)) for number in numbers]
        figure.legend(
            lines, names, loc="outside lower center", ncols=beside, frameon=False, fontsize=8
        )
    return figure


def _fill(figure: Figure, picture: Picture) -> None:
    rows, columns = len(picture.panels), max(map(len, picture.panels))
    grid = figure.subplots(rows, columns, squeeze=False)
    for line, panels in zip(grid, picture.panels, strict=True):
        for axes, panel in zip(line, panels, strict=False):
            panel.draw(axes)
            axes.set_title(wrapped(panel.title, picture.size[0] - 0.5, 9))
        for axes in line[len(panels) :]:
            axes.remove()


def _svg(figure: Figure) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()
