"""Pictures of a comparison: scores, perplexity, attention, and answers by depth and length."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, PercentFormatter

from kvjax.evaluation.cells.results import Results, Row
from kvjax.evaluation.tasks import MEASURES

from . import pictures
from .heat_maps import heat_map
from .measures import ERROR, NATS, RECALL, SCORE, Measure, Value
from .pictures import Panel, Picture
from .tables import panel_name

_ASIDE = 0.7  # of the distance between two budgets, over which the points of one are spread
_INTERVAL = {"elinewidth": 0.9, "capsize": 2.5, "capthick": 0.9}


def all_pictures(results: Results) -> list[Picture]:
    """What a comparison has of these, for each length and method.

    `scores_by_bytes_<length>`, `scores_by_budget_<length>`, `perplexity_<length>`,
    `perplexity_quarters_<length>`, `attention_<length>`, `attention_layers_<length>`,
    `heatmap_<method>`. Budgets as shares and as slots are apart from each other. What failed is a
    gap.
    """
    found = [picture for length in results.settings["lengths"] for picture in _of(results, length)]
    names = set()
    for number, method in enumerate(("full", *methods(results))):
        panels, size = heat_map(results, method)
        if panels:
            name = re.sub(r"[^\w.=-]+", "_", method).strip("_")[:100]
            name += f"_{number}" * (name in names)  # another method differs in signs alone
            names.add(name)
            title = f"{method}: score by depth and prompt tokens"
            found.append(Picture(f"heatmap_{name}", title, panels, size=size))
    return found


def methods(results: Results) -> list[str]:
    """The methods in the order of their styles."""
    every = dict.fromkeys(method for method, _ in results.settings["methods"])
    return [method for method in every if method != "full"]


def _of(results: Results, length: int) -> list[Picture]:
    """The pictures of one length that have lines."""
    panels = {key: rows for key, rows in results.panels().items() if key[1] == length}
    tasks: dict[str, list[tuple]] = {}
    for key in panels:
        tasks.setdefault(key[0], []).append(key)
    kinds = _kinds(row for rows in panels.values() for row in rows)

    def by_budget(keys: Iterable[tuple], measure: Measure) -> list[Panel]:
        return [
            Panel(
                f"{measure.of}{panel_name(key[0], key[2])}, budget as {kind}",
                partial(_by_budget, results, key, measure, kind),
            )
            for kind in kinds
            for key in keys
        ]

    def by_bytes(keys: Iterable[tuple], measure: Measure) -> list[Panel]:
        return [
            Panel(
                measure.of + panel_name(key[0], key[2]), partial(_by_bytes, results, key, measure)
            )
            for key in keys
        ]

    made: dict[str, tuple[str, list[list[Panel]]]] = {}
    asked = [keys for task, keys in tasks.items() if task not in MEASURES]
    if asked:
        made["scores_by_bytes"] = (
            "Score by bytes of the cache",
            [by_bytes(keys, SCORE) for keys in asked],
        )
        made["scores_by_budget"] = "Score by budget", [by_budget(keys, SCORE) for keys in asked]
    if keys := tasks.get("perplexity"):
        made["perplexity"] = (
            "Loss of held-out text",
            [[*by_bytes(keys, NATS), *by_budget(keys, NATS)]],
        )
        made["perplexity_quarters"] = (
            "Loss of held-out text by quarters of what follows the prompt",
            [_profiles(results, keys[0], "quarter", NATS.label, _quarters)],
        )
    if keys := tasks.get("attention"):
        made["attention"] = "Attention: error of its outputs, and recall of its tokens", [
            by_budget(keys, ERROR), by_budget(keys, RECALL)
        ]  # fmt: skip
        made["attention_layers"] = (
            "Error of attention outputs by layer",
            [_profiles(results, keys[0], "layer", ERROR.label, lambda row, full: row.layer_error)],
        )
    return [
        Picture(f"{name}_{length}", f"{title}, prompts of {length:,} tokens", rows,
            length, legend=methods(results))
        for name, (title, rows) in made.items()
        if any(rows)
    ]  # fmt: skip


def _kinds(rows: Iterable[Row]) -> list[str]:
    """The kinds of budget that there are; one at least."""
    own = {_kind(row) for row in rows} - {None}
    return [kind for kind in ("share", "slots") if kind in own] or ["share"]


def _kind(row: Row) -> str | None:
    if row.budget is None:
        return None
    return "slots" if isinstance(row.budget, int) else "share"


# Lines


def _by_budget(results: Results, key: tuple, measure: Measure, kind: str, axes: Axes) -> None:
    """A line per method over the budgets of one kind; without a budget it goes across."""
    full, own = _full_and_others(results, key)
    budgets = sorted({row.budget for row in own if _kind(row) == kind})
    places = range(max(1, len(budgets)))
    names = methods(results)
    _draw_full(axes, full, measure)
    for number, name in enumerate(names):
        rows = [row for row in own if row.method == name]
        # Shifted sideways, or the bars of equally good methods would hide each other.
        aside = _ASIDE * ((number + 0.5) / len(names) - 0.5)
        points = [(budgets.index(row.budget), row) for row in rows if _kind(row) == kind]
        points += [(place, row) for row in rows if row.budget is None for place in places]
        _line(axes, number, [(x + aside, measure.value(row)) for x, row in points])
    axes.set_xticks(places, map(str, budgets or ["of the method"]))
    axes.set_xlim(-0.5, len(places) - 0.5)
    axes.set_xlabel("budget: share of the prompt" if kind == "share" else "budget: slots a KV head")
    _finish(axes, measure, results.at_floor(key))


def _by_bytes(results: Results, key: tuple, measure: Measure, axes: Axes) -> None:
    """A line per method and kind of budget; points of budgets in slots are hollow."""
    full, own = _full_and_others(results, key)
    own = [row for row in own if row.share is not None]  # one that failed has no bytes
    _draw_full(axes, full, measure)
    for number, name in enumerate(methods(results)):
        for kind in ("share", "slots", None):
            rows = [row for row in own if row.method == name and _kind(row) == kind]
            points = [(row.share, measure.value(row)) for row in rows]
            _line(axes, number, sorted(points, key=lambda point: point[0]), kind == "slots")
    shares = [row.share for row in own] or [0.1]
    axes.set_xscale("log")
    axes.set_xticks([0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0])
    axes.set_xlim(min(0.5, *shares) * 0.8, max(1.15, *shares) * 1.05)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_minor_formatter(NullFormatter())
    hollow = "; hollow: budget in slots" * (len(_kinds(own)) > 1)
    axes.set_xlabel(f"bytes, share of the full cache's{hollow}")
    _finish(axes, measure, results.at_floor(key))


def _profiles(
    results: Results,
    key: tuple,
    what: str,
    label: str,
    values: Callable[[Row, Row | None], Sequence[float] | None],
) -> list[Panel]:
    """A panel per budget: a line per method over quarters or layers."""
    full, own = _full_and_others(results, key)

    def draw(rows: list[Row], axes: Axes) -> None:
        base = None if full is None else values(full, full)
        if base is not None:
            axes.plot(range(1, len(base) + 1), base, color="black", linewidth=1.2)
        for number, name in enumerate(methods(results)):
            for row in rows:
                found = values(row, full) if row.method == name else None
                if found is not None:
                    axes.plot(range(1, len(found) + 1), found, **pictures.style(number))
        axes.set_xlabel(what)
        axes.set_ylabel(label)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25)

    budgets = dict.fromkeys(row.budget for row in own)
    return [
        Panel(
            "budget of the method" if budget is None else f"budget {budget}",
            partial(draw, [row for row in own if row.budget == budget]),
        )
        for budget in budgets
    ]


def _quarters(row: Row, full: Row | None) -> list[float] | None:
    """The loss of each quarter minus that with the full cache."""
    if row.quarters is None or full is None or full.quarters is None:
        return None
    return [own - base for own, base in zip(row.quarters, full.quarters, strict=True)]


def _full_and_others(results: Results, key: tuple) -> tuple[Row | None, list[Row]]:
    rows = results.panels()[key]
    full = next((row for row in rows if row.method == "full"), None)
    return full, [row for row in rows if row.method != "full"]


def _draw_full(axes: Axes, full: Row | None, measure: Measure) -> None:
    """The full cache as a line across, its interval as a band."""
    found = None if full is None else measure.value(full)
    if found is not None:
        axes.axhspan(found[1], found[2], color="0.88", zorder=0)
        axes.axhline(found[0], color="black", linewidth=1.2)


def _line(
    axes: Axes, number: int, points: Sequence[tuple[float, Value | None]], hollow: bool = False
) -> None:
    """A method's points with their intervals; a failed one is left out and breaks the line."""
    if not points:
        return
    x = [at for at, _ in points]
    y, low, high = np.array([value or (math.nan,) * 3 for _, value in points]).T
    own = pictures.style(number)
    edge = {"markeredgecolor": "white", "markeredgewidth": 0.6}
    if hollow:
        edge = {"markerfacecolor": "white", "markeredgewidth": 1.4}
    # Of shares of 0 and 1, rounding may put an end of the interval on the wrong side.
    axes.errorbar(x, y, yerr=np.maximum((y - low, high - y), 0), **own, **edge, **_INTERVAL)


def _finish(axes: Axes, measure: Measure, at_floor: bool) -> None:
    measure.finish(axes)
    axes.set_ylabel(measure.label)
    axes.grid(alpha=0.25)
    if at_floor:
        axes.set_facecolor("0.95")
        axes.text(
            0.5, 0.96, "full cache at the floor: not ranked", transform=axes.transAxes,
            ha="center", va="top", fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "0.6", "boxstyle": "round"},
        )  # fmt: skip
