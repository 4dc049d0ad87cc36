"""Draws heat maps of the papers' needle: how much of a hidden sentence each method finds.

    python benchmarks/statement_picture.py --out benchmarks/results/qwen/statement.png

A panel is a method; the sentence's depth goes downwards, lengths and budgets to the right. Results
are those of `benchmarks/every_method.py qwen --only statement_qwen`, one prompt a field.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from common import parser_of
from matplotlib import pyplot
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

from kvjax.evaluation import read_results

FOLDER = Path(__file__).resolve().parent / "results" / "qwen" / "statement_qwen"
METHODS = (
    "snapkv", "pyramidkv", "h2o", "streaming_llm", "chelsea", "chelsea(outlier_threshold=0.8)",
    "kvmerger(epsilon=0.75)", "kvmerger", "kvcrush(snapkv)", "spindlekv",
    "cam(streaming_llm)", "clusterkv",
)  # fmt: skip
PERCENT = Normalize(0, 100)


def main() -> None:
    """Draws it."""
    args = parser_of(__doc__, "out").parse_args()
    scores_by_depth = {
        (row.method, row.budget, row.length): row.depths
        for row in read_results(FOLDER).rows()
        if row.depths is not None
    }
    columns = sorted({key[1:] for key in scores_by_depth if key[0] == "snapkv"})
    depths = sorted({depth for by_depth in scores_by_depth.values() for depth in by_depth})
    figure, panels = pyplot.subplots(
        2, len(METHODS) // 2, figsize=(14, 5.4), sharex=True, sharey=True, layout="constrained"
    )
    for axes, method in zip(panels.flat, METHODS, strict=True):
        by_depth = [scores_by_depth[method, *column] for column in columns]
        scores = [[100 * column[depth].mean for column in by_depth] for depth in depths]
        axes.pcolormesh(scores, norm=PERCENT, cmap="cividis", edgecolors="white")
        axes.set_title(method.replace("(", "\n("), fontsize=9)
        ticks = [f"{length:,}\n{budget:g}" for budget, length in columns]
        axes.set_xticks(np.arange(len(columns)) + 0.5, ticks, fontsize=6)
        axes.set_yticks(np.arange(len(depths)) + 0.5, [f"{depth:g}" for depth in depths])
    panels[0, 0].invert_yaxis()
    figure.supxlabel("prompt tokens, and budget below", fontsize=9)
    figure.supylabel("depth of the sentence (0: start)", fontsize=9)
    figure.colorbar(
        ScalarMappable(PERCENT, "cividis"),
        ax=panels,
        label="words of the sentence found, %",
        shrink=0.8,
    )
    figure.savefig(args.out, dpi=100)


if __name__ == "__main__":
    main()
