"""Every measured figure in the pages is what the files of results say."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in (
        *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("models/*/README.md"),
        *ROOT.glob("notebooks/README.md"),
    )
    if path.name != "CHANGELOG.md"
)  # fmt: skip
CHECKED = re.compile(
    r"^```.*?^```|`[^`\n]*`|\]\([^)]*\)"
    r"|<!-- table: .*?<!-- end -->|<!-- \w+(?: of \w+)?: [^\n]*?<!-- / -->",
    re.MULTILINE | re.DOTALL,
)
"""What is run, and what `results_page.py` writes."""
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
NUMBERS = rf"{NUMBER}(?:(?: to | and | or | / |, ){NUMBER})*"
SETTING = re.compile(
    rf"arXiv {NUMBER}|(?:Python|JAX) {NUMBERS}|[Bb]udgets? (?:of )?{NUMBERS}(?: %)?"
    rf"|reserves? of {NUMBERS}(?: %)?|\bat {NUMBER} %|95 % (?:Wilson|intervals)"
)
"""Names of papers and versions, and what a method or a study was given."""
MEASURED = re.compile(
    rf"{NUMBERS} ?(?:%|(?:ms|s|MB|GB|TB|nats|times|seconds|minutes|hours)\b)"
    rf"|{NUMBER} of (?:the )?{NUMBER}|(?<![\d.])\d+\.\d\d+(?![\d.])"
)
PUBLISHED = "docs/results/published.md"  # with the source of each figure
EXCEPTIONS = {
    "RESULTS.md": {
        "below 0.70": "a critical value", "of 0.05": "its level", "below 0.38": "a critical value",
    },
    "docs/design/evaluation.md": {"0.05 above the score": "a limit of the code"},
    "docs/design/generation.md": {"0 times NaN": "a product"},
    "docs/design/methods.md": {
        "8.5 %": "follows from the budgets' formula", "21 %": "the same",
        "4 % and 11 %": "the same", "16 % and 20 %": "the same",
    },
    "docs/guides/choosing.md": {
        "4 to 8 %": "published", "Llama-2-7B 20 %": "published", "14 to 29 %": "published",
    },
    "docs/guides/devices.md": {"8 devices of 80 GB": "a setting"},
    "docs/guides/gpu.md": {
        "Since 0.11 JAX": "a version",
        "171 of the 172": "counts of gpu_tests_h200.txt, which is text",
    },
    "docs/releasing.md": {"79 of 139 seconds": "two installs, timed by hand"},
    "docs/results/documents.md": {"more than 5 %": "a limit of the script"},
    "docs/results/smollm2.md": {
        "Intervals are 95 %": "how they are computed",
        "15.9 hours of processes": "seconds of commands.json",
        "3.7 hours for rows": "seconds of commands.json",
    },
    "docs/results/studies.md": {"the last 64 of 1,024": "a setting"},
    "models/demo/README.md": {"2.2 MB": "the size of a file that is here"},
    "notebooks/README.md": {"98 MB": "the size of another package's file"},
}  # fmt: skip
"""Figures without a mark, with the reason."""
IN_DOCSTRINGS = re.compile(
    rf"{NUMBERS} ?(?:%|(?:ms|s|MB|GB|TB|nats)\b|times (?:as|what|longer|faster|slower)\b)"
)
DOCSTRINGS = {
    "kvjax/evaluation/cells/estimates.py": {"95 %": "how intervals are computed"},
    "kvjax/transforms/pyramidkv.py": {
        "8.5 %": "follows from the budgets' formula", "21 %": "the same",
    },
    "pallas_kernels/grouping/greedy_cover.py": {
        "8.6 GB": "follows from sizes", "32 times as": "the same",
    },
}  # fmt: skip
"""Figures in docstrings, which have no marks, with the reason."""


@pytest.mark.slow
def test_tables_and_figures_are_those_of_the_results():
    command = [sys.executable, ROOT / "benchmarks" / "results_page.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_paired_differences_are_of_the_same_texts():
    folder = ROOT / "benchmarks" / "results" / "smollm2" / "perplexity"
    losses: dict[str, dict[int, float]] = {}
    for line in (folder / "cells.jsonl").read_text().splitlines():
        record = json.loads(line)
        task, _, _, first, _, method, budget = record["cell"]
        if task == "perplexity" and budget == 0.2:
            scores = enumerate(record["found"]["scores"], first)
            losses.setdefault(method, {}).update(scores)
    chelsea, snapkv = (
        np.array([loss for _, loss in sorted(losses[method].items())])
        for method in ("chelsea", "snapkv")
    )
    mean, deviation = (chelsea - snapkv).mean(), (chelsea - snapkv).std()
    text = (ROOT / "docs" / "results" / "claims.md").read_text("utf-8")
    shown = re.search(r"`chelsea` 0.2 - `snapkv` 0.2: (\S+) \((\S+) to (\S+)\)", text)
    assert shown is not None
    figure, low, high = map(float, shown.groups())
    assert figure == round(mean, 3)
    # A bootstrap's interval of 30 texts is close to the normal one.
    assert high - low == pytest.approx(2 * 1.96 * deviation / len(chelsea) ** 0.5, rel=0.1)


def test_columns_of_tables_do_not_depend_on_the_order_of_rows(monkeypatch):
    """A run that goes on appends its rows, whatever their budgets and lengths."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    results_page = importlib.import_module("results_page")
    read = [
        {"tokens": tokens, "budget": budget, "method": "quest", "recall": 0.1, "error": budget}
        for tokens, budget in ((8000, 256), (8000, 512), (32000, 512), (32000, 256))
    ]
    lines = results_page.selected_recall(read).splitlines()
    assert [line.split("|")[3:5] for line in lines[2:]] == [
        [" 10 % / 256.00 ", " 10 % / 512.00 "]
    ] * 2
    steps = [
        {"tokens": tokens, "method": method, "milliseconds": tokens, "of_full": (1.0, 1.0, 1.0)}
        for method, tokens in (("full", 2048), ("full", 7900), ("quest", 7900), ("quest", 2048))
    ]
    lines = results_page.step_times(steps).splitlines()
    assert [line.split("|")[2:5:2] for line in lines[2:]] == [[" 2048.0 ", " 7900.0 "]] * 2


def without_published(text: str) -> str:
    """Empties the columns of tables that are headed `published`; lines stay where they are."""
    lines, columns = [], []
    for line in text.split("\n"):
        cells = line.split("|")
        if not line.startswith("|"):
            columns = []
        elif not lines or not lines[-1].startswith("|"):
            columns = [i for i, cell in enumerate(cells) if cell.strip() == "published"]
        lines.append("|".join("" if i in columns else cell for i, cell in enumerate(cells)))
    return "\n".join(lines)


def unmarked(page: Path) -> list[str]:
    """Figures that look measured and are not made from a file, each with its line."""
    text = CHECKED.sub(lambda match: "\n" * match[0].count("\n"), page.read_text("utf-8"))
    text = without_published(text)
    for snippet in EXCEPTIONS.get(str(page.relative_to(ROOT)), {}):
        assert snippet in text, f"{snippet!r} is no longer there"
        text = text.replace(snippet, "\n" * snippet.count("\n"))
    lines = SETTING.sub("", text).splitlines()
    return [f"{line.strip()}: {m[0]}" for line in lines for m in MEASURED.finditer(line)]


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page != ROOT / PUBLISHED],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_figures_in_prose_are_made_from_files(page):
    assert unmarked(page) == []


def test_an_unmarked_figure_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "A step takes 0.56 of the time, 3.1 ms, 2.9 times as long, and finds 49 of 50, 7 % more.\n"
        "At a budget of 20 % (arXiv 2306.14048): `0.56`, <!-- figure: a {x:.2f} -->0.56<!-- / -->."
        "\n\n| claim | published | here |\n|---|---|---|\n| faster | 2.5 times | 1.19 times |\n"
    )
    found = [line.rpartition(": ")[2] for line in unmarked(page)]
    assert found == ["0.56", "3.1 ms", "2.9 times", "49 of 50", "7 %", "1.19 times"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_mark_begins_a_line_of_prose(page):
    """A comment at the beginning of a line ends a paragraph."""
    text = page.read_text("utf-8")
    assert re.findall(r"^ *<!-- (?:figure|inside|after|nats|paired)\b.*", text, re.MULTILINE) == []


@pytest.mark.parametrize("room", ["kvjax", "pallas_kernels", "models"])
def test_docstrings_leave_measured_figures_to_the_pages(room):
    for file in sorted((ROOT / room).rglob("*.py")):
        name = str(file.relative_to(ROOT))
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            text = re.sub(r">>>.*|`[^`\n]*`", "", ast.get_docstring(node) or "")
            found = set(IN_DOCSTRINGS.findall(SETTING.sub("", text)))
            assert found <= set(DOCSTRINGS.get(name, {})), name
