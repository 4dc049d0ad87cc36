"""Draws RESULTS.md's picture of needles: those that SmolLM2 finds, by method and budget.

    python benchmarks/results_picture.py --out benchmarks/results/smollm2/choose.png

The question is inside of what is compressed (left) or asked afterwards (right). The
results are those of `benchmarks/every_method.py`: RULER's `niah_single_2` at 2,048 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common import parser_of
from matplotlib import pyplot
from matplotlib.axes import Axes

from kvjax.evaluation import Results, Row, read_results

FOLDER = Path(__file__).resolve().parent / "results" / "smollm2" / "needles"
TASK, LENGTH = "niah_single_2", 2048
# Okabe and Ito's colours, and a marker each, so that prints in grey can be read too.
LINES = {
    "clusterkv": ("#0072B2", "o"), "quest(spread=None)": ("#56B4E9", "v"),
    "kvmerger": ("#CC79A7", "P"), "snapkv": ("#D55E00", "s"), "h2o": ("#E69F00", "D"),
    "streaming_llm": ("#009E73", "^"),
}  # fmt: skip
NAMES = {"inside": "question part of the prompt", "after": "question asked afterwards"}


def rows(results: Results, question: str, method: str) -> list[Row]:
    """Of one method, by budget."""
    found = [
        row
        for row in results.rows()
        if row.panel == (TASK, LENGTH, question) and row.method == method
    ]
    return sorted(found, key=lambda row: row.budget or 0)


def draw(axes: Axes, results: Results, question: str) -> None:
    """One panel."""
    full = rows(results, question, "full")[0].score
    axes.axhline(100 * full.mean, color="black", linewidth=1)
    ends = {"full cache": 100 * full.mean}
    found = {method: rows(results, question, method) for method in LINES}
    budgets = sorted({100 * row.budget for own in found.values() for row in own})  # pyright: ignore[reportOperatorIssue]  # these have budgets
    for method, (colour, marker) in LINES.items():
        own = found[method]
        at = [100 * row.budget for row in own]  # pyright: ignore[reportOperatorIssue]  # these have budgets
        means = [100 * row.score.mean for row in own]
        axes.fill_between(
            at, [100 * row.score.low for row in own], [100 * row.score.high for row in own],
            color=colour, alpha=0.12, linewidth=0,
        )  # fmt: skip
        axes.plot(at, means, color=colour, marker=marker, linewidth=1.8)
        ends[method] = means[-1]
    for name, (height, place) in zip(ends, apart(list(ends.values())), strict=True):
        colour = LINES.get(name, ("black", ""))[0]
        axes.annotate(
            name, (budgets[-1], height), (budgets[-1] + 3, place), color=colour, va="center",
            annotation_clip=False, fontsize=9,
        )  # fmt: skip
    axes.set(
        title=NAMES[question], xlabel="budget, % of the prompt's tokens", xticks=budgets,
        ylim=(-3, 103), xlim=(5, 52),
    )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)


def apart(heights: Sequence[float], distance: float = 6.5) -> list[tuple[float, float]]:
    """Heights, and places for their labels that do not overlap."""
    order = sorted(range(len(heights)), key=lambda number: heights[number])
    places = dict.fromkeys(order, 0.0)
    least = 0.0
    for number in order:
        places[number] = max(heights[number], least)
        least = places[number] + distance
    most = 103.0
    for number in reversed(order):
        places[number] = min(places[number], most)
        most = places[number] - distance
    return [(height, places[number]) for number, height in enumerate(heights)]


def main() -> None:
    """Draws it."""
    parser = parser_of(__doc__, "out")
    args = parser.parse_args()
    results = read_results(FOLDER)
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    for axes, question in zip(panels, NAMES, strict=True):
        draw(axes, results, question)
    panels[0].set_ylabel("needles found, %")
    figure.savefig(args.out, dpi=130)


if __name__ == "__main__":
    main()
