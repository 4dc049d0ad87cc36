"""Tables keep the names of their rows, every column, and the terminal's width."""

from __future__ import annotations

import io
import itertools

import pytest
from rich.console import Console

from kvjax.cli.tables import Row, name_column, number_column, print_table
from tests.cli.commands import output

SLOW = pytest.param(60, marks=pytest.mark.slow)
WIDTHS = pytest.mark.parametrize("width", [40, 60, 65, 80, 120])
LONG = "chain(every(snapkv(window=16), steps=64), quantize)"


def console(width: int) -> Console:
    return Console(width=width, record=True, highlight=False, file=io.StringIO())


def check(text: str, width: int, names: list[str], headings: list[str]) -> None:
    """Every table has all names at the beginning of its rows, and each heading is there."""
    lines = text.splitlines()
    assert max(map(len, lines)) <= width and "…" not in text
    tables = sum("──" in line for line in lines)
    assert tables >= 1 and tables == sum(
        line.split()[:1] == ["method"] and "──" in below
        for line, below in itertools.pairwise(lines)
    )
    for name in names:
        assert sum(line.lstrip().startswith(f"{name[:12]}") for line in lines) >= tables, name
    words = text.split()
    for heading in headings:
        assert all(word in words for word in heading.split()), heading


@WIDTHS
@pytest.mark.parametrize("names", [1, 2])
def test_what_does_not_fit_goes_into_further_tables(width, names):
    headings = [f"heading{number}\nof {'x' * number}" for number in range(12)]
    columns = [name_column(), number_column("budget"), *map(number_column, headings)]
    methods = ["full", "snapkv", LONG, "h2o(group_reduce='[red]')"]
    rows = [Row([name, "0.1", *(f"{n}.5 MB" for n in range(12))], ends=True) for name in methods]
    shown = console(width)
    print_table(shown, columns, rows, names=names, pad_edge=False)
    text = shown.export_text()
    check(text, width, methods, ["method", *headings])
    assert text.count("0.1") == 4 * (text.count("budget"))
    assert "[red]" in "".join(text.split()), "no markup"
    assert all(f"{n}.5 MB" in text for n in range(12))


def test_one_table_where_it_fits():
    columns = [name_column(), *map(number_column, "abc")]
    shown = console(60)
    print_table(shown, columns, [Row([LONG, "1", "2", "3"]), Row(["full", "4", "5", "6"])])
    text = shown.export_text()
    assert text.count("method") == 1
    check(text, 60, ["full", LONG], ["a b c"])


@pytest.mark.parametrize("width", [40, 80])
def test_plan(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    methods = f"full,snapkv,{LONG}"
    text = output(capsys, "plan", "--model", "smollm2-135m", "--tokens", 4096, "--method", methods)
    check(text, width, ["full", "snapkv", LONG], ["GB per request", "that fit", "step of 32"])


@pytest.mark.parametrize("width", [40, 120])
def test_methods(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    text = output(capsys, "methods")
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    first = [line.split()[:1] for line in text.splitlines()]
    assert ["snapkv"] in first and ["streaming_llm"] in first and ["codebook"] in first
    assert "group_reduce='mean'" in text and "2404.14469" in text


@pytest.mark.parametrize("width", [40, SLOW])
def test_diagnose(capsys, monkeypatch, tinystories, tmp_path, width):
    monkeypatch.setenv("COLUMNS", str(width))
    (tmp_path / "text").write_text("Once upon a time there was a girl named Lily. " * 9)
    args = ["diagnose", "--prompt-file", tmp_path / "text", "--model", tinystories, "--new", "1"]
    text = output(capsys, *args, "--methods", "streaming_llm", "--budgets", "16")
    check(text, width, ["full", "streaming_llm"], ["budget", "worst layer", "recall", "of full"])
