"""Writes the tables of measurements into the pages from the folders of `kvjax eval` and `compare`.

    python benchmarks/results_page.py

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; what is between is replaced. The
folders are those that `benchmarks/smollm2.py` writes, and `compare_bundled`. `--check` changes
nothing and fails where a page is not what the folders say.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvjax.evaluation import Results, Row, read_results

HOME = Path(__file__).resolve().parents[1]
FOLDER = HOME / "benchmarks" / "results" / "smollm2"
METHODS = HOME / "docs" / "methods"
PAGES = (HOME / "README.md", HOME / "RESULTS.md", *sorted(METHODS.glob("*.md")))
CHOSEN = (
    "full", "streaming_llm", "h2o", "snapkv", "chelsea", "kvmerger", "kvcrush(snapkv)", "spindlekv",
    "clusterkv", "quest", "infinigen", "quantize", "chain(quantize, clusterkv)",
)  # fmt: skip
"""The methods of README.md; RESULTS.md has all of them."""

SITUATIONS = {
    # situation → arguments of `kvjax generate`, the row of the results, and what is said of it
    "The question is in the prompt, and everything else may go.": (
        "--method snapkv --budget 0.5", ("snapkv", 0.5), "{found} with {share} of the bytes",
    ),
    "The question comes later, or there are many.": (
        "--method clusterkv --budget 0.1", ("clusterkv", 0.1), "{found}; a step looks at a tenth",
    ),
    "The same, and memory is short.": (
        '--method "chain(quantize, clusterkv)" --budget 0.2', ("chain(quantize, clusterkv)", 0.2),
        "{found} with {share} of the bytes",
    ),
    "The same, and the host has memory.": (
        '--method "chain(clusterkv, offload)" --budget 0.1', ("clusterkv", 0.1),
        "as `clusterkv`; keys and values in host memory",
    ),
    "Memory is short, and no token may be lost: the highest fidelity.": (
        "--method quantize", ("quantize", None), "{found} with {share} of the bytes, in 8 bits",
    ),
    "The text has no end.": (
        "--method streaming_llm --budget 1024", ("streaming_llm", 0.5),
        "what the window holds: {found} at 0.5",
    ),
}  # fmt: skip
"""README.md's table of methods by situation; the figures are needles found, inside / after."""

FIRST = "full", "snapkv", "clusterkv", "quest", "quantize", "chain(quantize, clusterkv)"
"""The methods of the table that README.md begins with."""

_BATCH = 1  # of its times
Panel = tuple[str, int, str | None]


def percent(row: Row) -> str:
    """A score of answers in per cent, with its interval rounded outwards as in reports."""
    mean, low, high = (100 * value for value in row.score[:3])
    return f"{mean:.0f} ({math.floor(low)} to {math.ceil(high)})"


def nats(row: Row) -> str:
    """A loss: of the full cache as it is, of others as the difference."""
    if row.method == "full":
        return f"{row.score.mean:.3f}"
    mean, low, high = row.difference[:3]
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"


def error(row: Row) -> str:
    """Relative error of attention outputs, and the recall of the most attended tokens."""
    return f"{row.score.mean:.3f} / {100 * row.recall:.0f} %"


SHOWN: dict[str, Callable[[Row], str]] = {"perplexity": nats, "attention": error}


def heading(panel: Panel, lengths: bool) -> str:
    """Of a column."""
    task, length, question = panel
    parts = [f"`{task}`", f"{length:,}" if lengths else "", question or ""]
    return ", ".join(part for part in parts if part)


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    rule = "|" + "---|" * len(headings)
    return "\n".join(
        ["| " + " | ".join(headings) + " |", rule] + [f"| {' | '.join(row)} |" for row in rows]
    )


def scores(results: Sequence[Results], named: str = "") -> str:
    """Methods × budgets as rows, panels as columns, and the bytes of the cache.

    Of all methods, or of those whose expressions have the name `named`, and the full cache.
    """
    has_name = re.compile(rf"\b{named}\b").search
    found = {
        (row.panel, row.candidate): row
        for one in results
        for row in one.rows()
        if row.method == "full" or has_name(row.method)
    }
    panels = list(dict.fromkeys(panel for panel, _ in found))
    lengths = len({length for _, length, _ in panels}) > 1
    rows = []
    for method, budget in dict.fromkeys(candidate for _, candidate in found):
        own = [found.get((panel, (method, budget))) for panel in panels]
        cells = ["" if row is None else SHOWN.get(row.task, percent)(row) for row in own]
        shown = "" if budget is None else f"{budget:g}"
        rows.append([f"`{method}`", shown, share(own), *cells])
    headings = ["method", "budget", "bytes, %", *(heading(one, lengths) for one in panels)]
    return markdown(headings, rows)


def first(
    needles: Results, times: Sequence[Mapping[str, Any]], longer: Sequence[Mapping[str, Any]]
) -> str:
    """Bytes, milliseconds and answers of the methods in `FIRST`, of `smollm2.py` and `kvjax bench`.

    `longer` are times of one row after a longer prompt.
    """
    steps = {one["method"]: one["tpot_s"] for one in longer}
    rows = []
    for time in (one for one in times if one["batch"] == _BATCH and one["method"] in FIRST):
        own = {
            row.question: row for row in needles.rows()
            if row.task == "niah_single_2" and row.method == time["method"]
            and row.budget in (None, time["budget"])
        }  # fmt: skip
        if own:
            rows.append([
                f"`{time['method']}`", f"{time['cache_bytes'] / _BATCH / 1e6:.1f} MB",
                f"{1e3 * time['tpot_s']:.0f} ms", f"{1e3 * steps[time['method']]:.0f} ms",
                *(f"{100 * own[place].score.mean:.0f} %" for place in ("inside", "after")),
            ])  # fmt: skip
    headings = [
        "", "cache", "a step", "a step after 7,900 tokens", "found, question inside", "after",
    ]  # fmt: skip
    return markdown(headings, rows)


def situations(needles: Results) -> str:
    """Methods by situation, of `SITUATIONS`, with what they find."""
    found = {
        (row.candidate, row.question): row for row in needles.rows() if row.task == "niah_single_2"
    }
    lines = []
    for situation, (arguments, candidate, said) in SITUATIONS.items():
        own = [found[candidate, place] for place in ("inside", "after")]
        figures = " / ".join(f"{100 * row.score.mean:.0f}" for row in own) + " %"
        told = said.format(found=figures, share=f"{share(own)} %")
        lines.append([situation, f"`{arguments}`", told])
    headings = ["situation", "`kvjax generate` with", "SmolLM2 finds, question inside / after"]
    return markdown(headings, lines)


def share(rows: Iterable[Row | None]) -> str:
    """Bytes of the cache, in per cent of the full cache's."""
    known = [row.share for row in rows if row is not None and row.share is not None]
    return f"{100 * known[0]:.0f}" if known else ""


def choosing(results: Sequence[Results]) -> str:
    """The methods of `CHOSEN` as rows, panels as columns, the budgets beside each other."""
    found: dict[str, dict[Panel, list[Row]]] = {}
    rows = [row for one in results for row in one.rows()]
    for row in (row for row in rows if row.task != "attention" and row.method in CHOSEN):
        found.setdefault(row.method, {}).setdefault(row.panel, []).append(row)
    panels = list(dict.fromkeys(panel for own in found.values() for panel in own))

    def cell(rows: Sequence[Row]) -> str:
        if not rows:
            return ""
        if rows[0].task == "perplexity":
            means = [
                row.score.mean if row.method == "full" else row.difference.mean for row in rows
            ]
            return " / ".join(
                f"{mean:+.2f}" if rows[0].method != "full" else f"{mean:.2f}" for mean in means
            )
        return " / ".join(f"{100 * row.score.mean:.0f}" for row in rows)

    rows = []
    for method, own in found.items():
        some = next(iter(own.values()))
        sizes = " / ".join(share([row]) for row in some)
        rows.append([f"`{method}`", sizes, *(cell(own.get(panel, [])) for panel in panels)])
    return markdown(["method", "bytes, %", *(heading(panel, False) for panel in panels)], rows)


def defaults(rows: Sequence[dict[str, Any]]) -> str:
    """Of `defaults.py`."""
    headings = ["method", "budget", "error", "worst layer", "nats", "inside", "after"]
    return markdown(headings, [
        [
            f"`{row['method']}`", f"{row['budget']:g}", f"{row['error']:.3f}",
            f"{row['worst_layer']:.2f}", f"{row['nats']:.3f}", str(row["inside"]),
            str(row["after"]),
        ]
        for row in rows
    ])  # fmt: skip


def kvpress(rows: Sequence[dict[str, Any]]) -> str:
    """Of `vs_kvpress.py`."""

    def line(row: dict[str, Any]) -> list[str]:
        kept, first, token = (row.get(name, {}) for name in ("positions", "first_s", "per_token_s"))
        peak, right = row["peak_bytes"], row.get("answers", {}).get("right")
        return [
            f"`{row['method']}`", f"{row['tokens']:,}",
            f"{kept['equal']} of {kept['lists']}" if kept else "",
            f"{100 * kept['common']:.2f} %" if kept else "",
            *(
                f"{1e3 * times['kvpress']:,.0f} / {1e3 * times['kvjax']:,.0f} ms, "
                f"**{times['times_as_fast']:.2f}**"
                for times in (first, token)
            ),
            f"{peak['kvpress'] / 1e6:,.0f} / {peak['kvjax'] / 1e6:,.0f} MB",
            f"{right['kvpress']} / {right['kvjax']} of {row['answers']['cases']}" if right else "",
        ]  # fmt: skip

    headings = [
        "method", "tokens", "sets of positions that are equal", "positions in both",
        "first token", "per token", "peak memory", "needles",
    ]  # fmt: skip
    return markdown(headings, map(line, rows))


def foreseen(found: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> str:
    """Of `diagnose_order.py`: rank correlations."""
    budgets = list(
        dict.fromkeys(b for part in found.values() for own in part.values() for b in own)
    )
    rows = [
        [part, pair, *("" if own.get(b) is None else f"{own[b]:.2f}" for b in budgets)]
        for part, pairs in found.items()
        for pair, own in pairs.items()
    ]
    return markdown(["prompts", "what is ranked", *budgets], rows)


def foreseen_tasks(found: Sequence[Mapping[str, Any]]) -> str:
    """Of `diagnose_order.py --results`: rank correlations with the scores of tasks."""
    shown = {}
    for one in found:
        name = f"`{one['task']}`" + ("" if one["question"] is None else f", {one['question']}")
        shown[name] = {"error and loss": one["error and loss"]}
    return foreseen(shown)


def speed(rows: Sequence[dict[str, Any]]) -> str:
    """Of `kvjax bench`."""
    headings = [
        "method", "batch", "first token", "per token", "of full", "floor by bytes", "tokens/s",
        "cache", "compiling",
    ]  # fmt: skip
    return markdown(headings, [
        [
            f"`{row['method']}`", str(row["batch"]), f"{row['ttft_s']:.2f} s",
            f"{1e3 * row['tpot_s']:.1f} ms", f"{row['tpot_over_full']:.2f}",
            f"{1e3 * row['step_floor_s']:.1f} ms", f"{row['tokens_per_s']:.0f}",
            f"{row['cache_bytes'] / 1e6:.0f} MB", f"{row['compile_s']:.1f} s",
        ]
        for row in rows
    ])  # fmt: skip


def clusters(rows: Sequence[dict[str, Any]]) -> str:
    """Of `clusters.py`: errors by length, cluster size and what a KV head chooses by."""
    found = {
        (row["length"], row["tokens_per_cluster"], row["choice"], row["budget"]): row["error"]
        for row in rows
    }
    sizes, choices, budgets = (list(dict.fromkeys(key[i] for key in found)) for i in (1, 2, 3))
    lines = [
        [
            f"{length:,}",
            str(size),
            choice,
            *(f"{found[length, size, choice, b]:.3f}" for b in budgets),
        ]
        for length in sorted({key[0] for key in found})
        for size in sizes
        for choice in choices
        if (length, size, choice, budgets[0]) in found
    ]
    return markdown(["tokens", "tokens a cluster", "scores of a group", *map(str, budgets)], lines)


def cluster_needles(rows: Sequence[dict[str, Any]]) -> str:
    """Of `cluster_needles.py`."""
    found = {
        (row["method"], row["budget"], row["length"], row["question"]): row["right"] for row in rows
    }
    panels = sorted({key[2:] for key in found}, key=lambda panel: (panel[0], panel[1] != "inside"))
    lines = [
        [f"`{method}`", "" if budget is None else f"{budget:g}",
         *(str(found.get((method, budget, *panel), "")) for panel in panels)]
        for method, budget in dict.fromkeys(key[:2] for key in found)
    ]  # fmt: skip
    headings = [f"{length:,}, {question}" for length, question in panels]
    return markdown(["method", "budget", *headings], lines)


def cluster_cost(rows: Sequence[dict[str, Any]]) -> str:
    """Of `cluster_cost.py`."""
    headings = ["method", "tokens", "clustering", "of the prompt pass", "a step", "index"]
    return markdown(headings, [
        [
            f"`{row['method']}`", f"{row['length']:,}", f"{row['compress_s']:.2f} s",
            f"{row['percent']:.1f} %", f"{row['step_ms']:.1f} ms",
            f"{row['index_bytes'] / 1e6:.1f} MB",
        ]
        for row in rows
    ])  # fmt: skip


def cluster_recall(rows: Sequence[dict[str, Any]]) -> str:
    """Of `cluster_recall.py`: recall (and error) of clusters in chunks, and of plain k-means."""
    found: dict[tuple[int, float], dict[str, str]] = {}
    for row in rows:
        figures = f"{100 * row['recall']:.1f} % ({row['error']:.3f})"
        found.setdefault((row["length"], row["budget"]), {})[row["clusters"]] = figures
    headings = ["tokens", "budget", "in chunks", "over all keys"]
    return markdown(headings, [
        [f"{length:,}", f"{budget:g}", own["chunks"], own["plain"]]
        for (length, budget), own in found.items()
    ])  # fmt: skip


def rotation(rows: Sequence[dict[str, Any]]) -> str:
    """Shows errors of `rotation.py` (of the first layer, of the worst), by how rows are stored."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["model"], row["form"]), {})[row["way"]] = row
    ways = ("as they are", "rotated", "keys rotated", "relative", "relative, rotated")

    def cell(row: dict[str, Any] | None) -> str:
        if row is None:
            return ""
        return f"{row['error']:.4f} ({row['first_layer']}, {row['worst_layer']})"

    return markdown(["model", "form", "bytes", *ways], [
        [*key, f"{next(iter(own.values()))['bytes']:g}", *(cell(own.get(way)) for way in ways)]
        for key, own in found.items()
    ])  # fmt: skip


FILES: dict[str, tuple[str, Callable[[Any], str]]] = {
    # name of a file → what of it is a table, and how
    "defaults_smollm2": ("rows", defaults),
    "vs_kvpress_smollm2": ("rows", kvpress),
    "diagnose_order_smollm2": ("rank_correlation", foreseen),
    "diagnose_order_bundled": ("rank_correlation", foreseen),
    "diagnose_order_eval": ("rank_correlation", foreseen_tasks),
    "bench_smollm2": ("results", speed),
    "bench_smollm2_long": ("results", speed),
    "clusters_smollm2": ("rows", clusters),
    "cluster_needles_smollm2": ("rows", cluster_needles),
    "cluster_cost_smollm2": ("rows", cluster_cost),
    "cluster_recall_smollm2": ("rows", cluster_recall),
    "rotation": ("rows", rotation),
}


def tables() -> Iterator[tuple[str, str]]:
    """Name and text of every table of which there are finished results."""
    finished = [*FOLDER.glob("*/cells.jsonl"), *FOLDER.parent.glob("compare_*/cells.jsonl")]
    folders = {path.parent.name: read_results(path.parent) for path in finished}
    for name, results in folders.items():
        yield name, scores([results])
    chosen = [folders[name] for name in ("needles", "perplexity") if name in folders]
    if chosen:
        yield "choose", choosing(chosen)
    for path in METHODS.glob("*.md"):
        yield f"method_{path.stem}", scores(chosen, path.stem)
    if needles := folders.get("needles"):
        yield "situations", situations(needles)
        times = [FOLDER.parent / f"{name}.json" for name in ("bench_smollm2", "bench_smollm2_long")]
        if all(path.exists() for path in times):
            yield "first", first(needles, *(json.loads(p.read_text())["results"] for p in times))
    for name, (part, made) in FILES.items():
        path = FOLDER.parent / f"{name}.json"
        if path.exists():
            yield name, made(json.loads(path.read_text())[part])


def filled(page: str, made: dict[str, str]) -> str:
    """A page with its tables replaced."""

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in made:
            raise SystemExit(f"there is no table {name}: there are {', '.join(made)}")
        return f"<!-- table: {name} -->\n{made[name]}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", replace, page, flags=re.DOTALL)


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args()
    made = dict(tables())
    for path in PAGES:
        before = path.read_text(encoding="utf-8")
        after = filled(before, made)
        if args.check and before != after:
            page, folder = path.relative_to(HOME), FOLDER.relative_to(HOME)
            sys.exit(f"{page} is not what {folder} says: run this script")
        path.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
