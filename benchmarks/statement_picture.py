"""Draws heat maps of the papers' needle: how much of a hidden sentence each method finds.

    python benchmarks/statement_picture.py --out benchmarks/results/qwen/statement.png

A panel is a method; the sentence's depth goes downwards, lengths and budgets to the right. Results
are those of `benchmarks/every_method.py qwen --only statement_qwen`, one prompt a field.
"""

from __future__ import annotations

from pathlib import Path

from common import parser_of
from matplotlib import pyplot

from kvjax.evaluation import read_results
from kvjax.evaluation.report.plots import depth_bins, draw_heat_map

FOLDER = Path(__file__).resolve().parent / "results" / "qwen" / "statement_qwen"
METHODS = (
    "snapkv", "pyramidkv", "h2o", "streaming_llm", "chelsea", "chelsea(outlier_threshold=0.8)",
    "kvmerger(epsilon=0.75)", "kvmerger", "kvcrush(snapkv)", "spindlekv",
    "cam(streaming_llm)", "clusterkv",
)  # fmt: skip


def main() -> None:
    """Draws it."""
    args = parser_of(__doc__, "out").parse_args()
    rows = read_results(FOLDER).rows()
    bins = depth_bins(rows)
    figure, panels = pyplot.subplots(
        3, len(METHODS) // 3, figsize=(14, 9), sharey=True, layout="constrained"
    )
    for axes, method in zip(panels.flat, METHODS, strict=True):
        by_column = {(row.budget, row.length): row for row in rows if row.method == method}
        columns = sorted(by_column)
        draw_heat_map(axes, columns, bins, [by_column[column] for column in columns])
        axes.set_title(method)
    figure.savefig(args.out, dpi=80)


if __name__ == "__main__":
    main()
