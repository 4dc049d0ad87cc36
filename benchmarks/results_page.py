"""Writes the tables of SmolLM2 into `RESULTS.md` and `README.md` from the folders of `kvjax eval`.

    python benchmarks/results_page.py

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; what is between is replaced. The
folders are those that `benchmarks/smollm2.py` writes. `--check` changes nothing and fails where a
page is not what the folders say.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvjax.evaluation import Results, Row, read_results

HOME = Path(__file__).resolve().parents[1]
FOLDER = HOME / "benchmarks" / "results" / "smollm2"
PAGES = ("README.md", "RESULTS.md")
Panel = tuple[str, int, str | None]


def percent(row: Row) -> str:
    """A score of answers with its interval, in per cent."""
    mean, low, high = (100 * value for value in row.score[:3])
    return f"{mean:.0f} ({low:.0f} to {high:.0f})"


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


def table(results: Sequence[Results], panels: Sequence[Panel], budgets: Sequence[float]) -> str:
    """Methods × budgets as rows, panels as columns, and the bytes of the cache."""
    found = {(row.panel, row.candidate): row for one in results for row in one.rows()}
    candidates = [
        candidate
        for candidate in dict.fromkeys(candidate for _, candidate in found)
        if candidate[1] in (None, *budgets)
    ]
    lengths = len({length for _, length, _ in panels}) > 1
    headings = ["method", "budget", "bytes", *(heading(panel, lengths) for panel in panels)]
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    for method, budget in candidates:
        rows = [found.get((panel, (method, budget))) for panel in panels]
        cells = ["" if row is None else SHOWN.get(row.task, percent)(row) for row in rows]
        if not any(cells):
            continue
        share = next(row.share for row in rows if row is not None and row.share is not None)
        shown = "" if budget is None else f"{budget:g}"
        lines.append(
            "| " + " | ".join([f"`{method}`", shown, f"{100 * share:.0f} %", *cells]) + " |"
        )
    return "\n".join(lines)


def tables() -> Iterator[tuple[str, str]]:
    """Name and text of every table of which there are results."""
    folders = {path.name: read_results(path) for path in sorted(FOLDER.iterdir()) if path.is_dir()}

    def panels(*names: str, lengths: Sequence[int] | None = None) -> list[Panel]:
        every = dict.fromkeys(panel for name in names for panel in folders[name].panels())
        return [panel for panel in every if lengths is None or panel[1] in lengths]

    groups = {
        "choose": (("needles", "perplexity"), (0.2,)),
        "needles": (("needles",), (0.1, 0.2, 0.5)),
        "words": (("words",), (0.1, 0.2, 0.5)),
        "perplexity": (("perplexity",), (0.1, 0.2, 0.5)),
        "multi_news": (("multi_news",), (0.1, 0.2, 0.5)),
        "lengths_needles": (("lengths_needles",), (0.1, 0.2, 0.5)),
        "lengths_perplexity": (("lengths_perplexity",), (0.1, 0.2, 0.5)),
    }
    for name, (parts, budgets) in groups.items():
        if all(part in folders for part in parts):
            yield name, table([folders[part] for part in parts], panels(*parts), budgets)


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
    for name in PAGES:
        path = HOME / name
        before = path.read_text(encoding="utf-8")
        after = filled(before, made)
        if args.check and before != after:
            sys.exit(f"{name} is not what {FOLDER.relative_to(HOME)} says: run this script")
        path.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
