"""Colours of all pictures of caches, a legend for them, and shaded spans of positions."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.patches import Patch, Polygon, Rectangle

from kvjax.attention.layer import Cache, LayerCache, layer_caches
from kvjax.checks import check_choice, check_count
from kvjax.messages import brief

COLOURS = {"gone": "#f2f2f2", "pale": "#b5b5b5", "kept": "#1f3b73", "other": "#E69F00"}


def legend(figure: Figure, **labels: str) -> Legend:
    """Draws a legend of the colours below the axes.

    Args:
      figure: figure of the axes, with constrained layout.
      labels: meaning of `kept`, `other`, `pale` and `gone`, as far as they occur.

    Raises:
      ValueError: there is another name, or no name.

    Example:
      >>> from matplotlib.figure import Figure
      >>> from kvjax import plot
      >>> shown = plot.legend(Figure(layout="constrained"), kept="live", other="pinned")
      >>> [text.get_text() for text in shown.get_texts()]
      ['live', 'pinned']
    """
    if not labels:
        raise ValueError(f"legend needs a label for one of {tuple(COLOURS)}, got none")
    for name in labels:
        check_choice("a label of legend", name, tuple(COLOURS))
    patches = [
        Patch(facecolor=COLOURS[name], edgecolor="#666666", linewidth=0.4, label=label)
        for name, label in labels.items()
    ]
    return figure.legend(handles=patches, loc="outside lower right", ncols=len(patches), fontsize=7)


def span(axes: Axes, first: int, last: int, label: str = "") -> Polygon | Rectangle:
    """Shades the positions from `first` to `last`, such as those of an answer.

    Args:
      axes: axes with positions along x.
      label: text above the axes, with an arrow, as a few of many positions are but a thin line.

    Raises:
      TypeError, ValueError: `axes` are not axes, or the positions are negative or not in order.

    Example:
      >>> from matplotlib.figure import Figure
      >>> from kvjax import plot
      >>> axes = Figure().subplots()
      >>> shade = plot.span(axes, 10, 12, "answer")
      >>> [text.get_text() for text in axes.texts]
      ['answer']
    """
    check_axes(axes)
    check_count("first", first, 0)
    check_count("last", last, first)
    if label:
        arrow = {"arrowstyle": "-|>", "mutation_scale": 7, "shrinkA": 0, "shrinkB": 0}
        axes.annotate(label, ((first + last) / 2, 1), xycoords=axes.get_xaxis_transform(),
                      xytext=(0, 9), textcoords="offset points", ha="center", fontsize=7,
                      arrowprops={"facecolor": "black", **arrow},
                      annotation_clip=False)  # fmt: skip
    return axes.axvspan(first - 0.5, last + 0.5, color=COLOURS["other"], alpha=0.3, linewidth=0)


def check_axes(axes: Axes) -> None:
    """Raises TypeError unless the argument is matplotlib axes."""
    if not isinstance(axes, Axes):
        raise TypeError(f"axes must be those of a matplotlib figure, got {brief(axes)}")


def parts_of(cache: Cache, row: int) -> list[LayerCache]:
    """Returns a layer's caches, one for each head group; raises unless they have the row."""
    parts = layer_caches(cache)
    if not parts or not all(isinstance(part, LayerCache) for part in parts):
        raise TypeError(f"cache must be that of a layer, from a context, got {brief(cache)}")
    check_count("row", row, 0, most=parts[0].kv.shape[0] - 1)
    return parts


def layers_of(caches: Sequence[Cache], row: int) -> list[list[LayerCache]]:
    """Returns `parts_of` for each layer."""
    if isinstance(caches, LayerCache) or not isinstance(caches, Sequence) or not len(caches):
        raise TypeError(f"caches must be a sequence of those of layers, got {brief(caches)}")
    return [parts_of(cache, row) for cache in caches]
