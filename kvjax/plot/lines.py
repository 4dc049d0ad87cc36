"""Lines that compare methods: recall of each step, and bytes of each layer."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from kvjax.attention.layer import Cache
from kvjax.budgets.profile import shares
from kvjax.cache.nbytes import nbytes
from kvjax.checks import check_number
from kvjax.compose.by_head import HeadProfile
from kvjax.evaluation.report.plots import style
from kvjax.messages import brief

from .looks import COLOURS, check_axes, layers_of

# A disc and a larger ring, so that equal shares of two profiles are seen as two.
_MARKS = (
    {"marker": "o", "color": COLOURS["kept"], "markersize": 4},
    {"marker": "o", "color": COLOURS["other"], "markersize": 8, "markerfacecolor": "none"},
    {"marker": "x", "color": "#009E73", "markersize": 6},
)


def recall(
    axes: Axes, lines: Mapping[str, Sequence[float] | Float[np.ndarray, " N"]]
) -> list[Line2D]:
    """Draws the recall of each decode step, a line for each method.

    Args:
      axes: axes to draw on.
      lines: for each name, a number in [0, 1] per step, such as the mean of `Seen.recall`.

    Raises:
      TypeError, ValueError: `axes` are not axes, there are no lines, a line is empty, or a number
        is outside [0, 1].

    Example:
      >>> from matplotlib.figure import Figure
      >>> from kvjax import plot
      >>> lines = plot.recall(Figure().subplots(), {"clusterkv": [0.9, 0.8], "quest": [0.7, 0.8]})
      >>> lines[1].get_xydata().tolist()
      [[1.0, 0.7], [2.0, 0.8]]
    """
    check_axes(axes)
    values = {name: np.asarray(line, np.float64) for name, line in _named(lines).items()}
    for name, line in values.items():
        if line.ndim != 1 or not line.size or not ((line >= 0) & (line <= 1)).all():
            raise ValueError(f"lines must be numbers in [0, 1], got {brief(line)} for {name}")
    drawn = [
        axes.plot(1 + np.arange(line.size), line, label=name, markevery=0.25, **style(number))[0]
        for number, (name, line) in enumerate(values.items())
    ]
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("decode step")
    axes.set_ylabel("recall")
    axes.legend()
    return drawn


def layer_bytes(axes: Axes, caches: Mapping[str, Sequence[Cache]]) -> list[Line2D]:
    """Draws the bytes of each layer's cache in kB (10³ bytes), a line for each method.

    The bytes are those of all arrays, index structures and states included.

    Args:
      axes: axes to draw on.
      caches: for each name, the caches of a model's layers, such as `context.caches`.

    Raises:
      TypeError, ValueError: `axes` are not axes, or there are no caches.

    Example:
      >>> import kvjax
      >>> from kvjax import plot
      >>> from matplotlib.figure import Figure
      >>> size = {"batch": 1, "kv_heads": 2, "head_dim": 16, "max_prompt": 64, "max_new": 8}
      >>> caches = [kvjax.init_cache(kvjax.Full(), **size)] * 2
      >>> plot.layer_bytes(Figure().subplots(), {"full": caches})[0].get_ydata().tolist()
      [19.748, 19.748]
    """
    check_axes(axes)
    for layers in _named(caches).values():
        layers_of(layers, 0)
    drawn, most = [], 0.0
    for number, (name, layers) in enumerate(caches.items()):
        kilobytes = np.array([nbytes(cache) for cache in layers]) / 1e3
        spacing = max(len(kilobytes) // 8, 1)  # markers of many layers would hide the lines
        drawn += axes.plot(kilobytes, label=name, markevery=spacing, **style(number))
        most = max(most, kilobytes.max())
    axes.set_ylim(0, 1.1 * most)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("layer")
    axes.set_ylabel("kB of the cache")
    axes.legend()
    return drawn


def head_shares(axes: Axes, profiles: Mapping[str, HeadProfile], budget: float) -> list[Line2D]:
    """Draws which share of its tokens each KV head keeps at a budget, layer by layer.

    The safeguard is the default one of `ByHead`. The mean over all heads, a horizontal line, is the
    budget.

    Args:
      axes: axes to draw on.
      profiles: for each name a profile of the same model, such as those of several texts.
      budget: share of all tokens that is kept.

    Raises:
      TypeError, ValueError: `axes` are not axes, there are no profiles or some of unequal models,
        or a budget outside (0, 1].

    Example:
      >>> import kvjax, numpy as np
      >>> from kvjax import plot
      >>> from matplotlib.figure import Figure
      >>> profile = kvjax.kit.HeadProfile(np.array([[[0.8, 1.0], [0.0, 1.0]]]))
      >>> (drawn,) = plot.head_shares(Figure().subplots(), {"a text": profile}, 0.4)
      >>> drawn.get_ydata().round(4).tolist()
      [0.72, 0.08]
    """
    check_axes(axes)
    check_number("budget", budget, above=0, most=1)
    for name, profile in _named(profiles).items():
        if not isinstance(profile, HeadProfile):
            raise TypeError(
                f"profiles must be kvjax.kit.HeadProfile, got {brief(profile)} for {name}"
            )
    sizes = {profile.table.shape[:2] for profile in profiles.values()}
    if len(sizes) > 1:
        raise ValueError(f"profiles must be of one model, got (layers, heads) of {sorted(sizes)}")
    ((layers, heads),) = sizes
    drawn = []
    for (name, profile), mark in zip(profiles.items(), itertools.cycle(_MARKS)):
        each = shares(profile.table, budget).ravel()
        drawn += axes.plot(each, label=name, linestyle="none", **mark)
    for layer in range(1, layers):
        axes.axvline(layer * heads - 0.5, color="0.85", linewidth=0.8, zorder=0)
    axes.axhline(budget, color="0.6", linewidth=0.8, zorder=0)
    axes.set_ylim(0, None)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    centres = [layer * heads + (heads - 1) / 2 for layer in range(layers)]
    every = max(layers // 15, 1)
    axes.set_xticks(centres[::every], [str(layer) for layer in range(0, layers, every)])
    axes.set_xlabel("layer, by KV head")
    axes.set_ylabel("share kept")
    axes.legend()
    return drawn


def _named(lines: Mapping) -> Mapping:
    """Returns the argument; raises unless it is a dict with at least one entry."""
    if not isinstance(lines, Mapping):
        raise TypeError(f"data to compare must be a dict by name, got {brief(lines)}")
    if not lines:
        raise ValueError("data to compare must have at least one entry, got an empty dict")
    return lines
