"""Draws how much of the answers a small cache keeps, by its bytes: prose and needles.

    python benchmarks/kept_answers_picture.py --model qwen --out kept_answers_qwen.png

The results are those of `kept_answers.py` with the same model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from common import parser_of
from matplotlib import pyplot
from matplotlib.axes import Axes

FOLDER = Path(__file__).resolve().parent / "results"
MODELS = {"smollm2": "SmolLM2-135M", "qwen": "Qwen2.5-Coder-0.5B"}
PANELS = {"recovery": "prose, % recovered", "several": "one needle of four, % found"}
# Okabe and Ito's colours, and a marker each, so that prints in grey can be read too. A composition
# belongs to the first line whose expression is found in its text.
LINES = {
    "own_queries by head, 3 and 2 bits": (r"by_head\(chain\(own.*key_bits=3", "#0072B2", "o"),
    "own_queries by head, 4 and 2 bits": (r"by_head\(chain\(own.*key_bits=4", "black", "*"),
    "own_queries by head, 4 bits": (r"by_head\(chain\(own.*bits=4, group", "#009E73", "X"),
    "kvzip by head, 3 and 2 bits": (r"by_head\(chain\(kvzip.*key_bits=3", "#D55E00", "s"),
    "own_queries by head": (r"by_head\(own", "#56B4E9", "^"),
    "kvzip by head": (r"by_head\(kvzip", "#E69F00", "D"),
    "every token, in fewer bits": (r"^quantize", "grey", "P"),
    "snapkv, h2o": (r"^(snapkv|h2o)", "#CC79A7", "v"),
}


def draw(axes: Axes, rows: list[dict[str, Any]], panel: str, most: float) -> None:
    """Draws one panel, up to `most` per cent."""
    drawn: dict[str, list[dict[str, Any]]] = {name: [] for name in LINES}
    for row in rows:
        names = (name for name, (text, _, _) in LINES.items() if re.search(text, row["method"]))
        if (name := next(names, None)) is not None and "bytes" in row:
            drawn[name].append(row)
    percent = 1 if panel == "recovery" else 100
    for name, (_, colour, marker) in LINES.items():
        points = sorted(drawn[name], key=lambda row: row["bytes"])
        at = [100 * row["bytes"] for row in points]
        means = [percent * row[panel]["mean"] for row in points]
        low, high = ([percent * row[panel][end] for row in points] for end in ("low", "high"))
        if name == "snapkv, h2o":
            axes.plot(at, means, color=colour, marker=marker, linestyle="", label=name)
        else:
            axes.fill_between(at, low, high, color=colour, alpha=0.1, linewidth=0)
            axes.plot(at, means, color=colour, marker=marker, label=name)
    full = next(row for row in rows if row["method"] == "full")
    axes.axhline(percent * full[panel]["mean"], color="grey", linewidth=0.8, label="full cache")
    ticks = [1.5, 3, 6, 12, 25, 50]
    axes.set(xscale="log", xticks=ticks, xticklabels=map("{:g}".format, ticks), ylim=(-3, most))
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("bytes at rest, % of the full cache in bfloat16")


def main() -> None:
    """Draws it."""
    parser = parser_of(__doc__, "out")
    parser.add_argument("--model", choices=MODELS, required=True)
    args = parser.parse_args()
    rows = json.loads((FOLDER / f"kept_answers_{args.model}.json").read_text())["rows"]
    # A cache that beats the full one by chance recovers more than all.
    most = max(105, *(row["recovery"]["high"] for row in rows if "bytes" in row))
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.4), sharey=True, layout="constrained")
    for axes, (panel, title) in zip(panels, PANELS.items(), strict=True):
        draw(axes, rows, panel, most)
        axes.set_title(f"{MODELS[args.model]}: {title}", fontsize=10)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
