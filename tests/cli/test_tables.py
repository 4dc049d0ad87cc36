"""Tables and lines of progress fit the terminal and lose nothing."""

from __future__ import annotations

import io
import itertools
import json
import re
import sys
from pathlib import Path

import pytest

from kvjax.cli.situations import SITUATIONS, methods_for
from kvjax.cli.tables import Row, name_column, number_column, print_table
from kvjax.cli.terminal import Display, print_figures, print_line, seconds
from kvjax.registry import METHODS, STORAGE, WRAPPERS
from tests.cli.commands import console, error, output

ROOT = Path(__file__).parents[2]

LONG = "chain(every(snapkv(window=16), steps=64), quantize)"


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
        first = name.partition("(")[0]
        assert sum(line.lstrip().startswith(first) for line in lines) >= tables, name
    words = text.split()
    for heading in headings:
        assert all(word in words for word in heading.split()), heading


@pytest.mark.parametrize("width", [40, 60, 65, 80, 120])
@pytest.mark.parametrize("names", [1, 2])
def test_what_does_not_fit_goes_into_further_tables(width, names):
    headings = [f"heading{number}\nof {'x' * number}" for number in range(12)]
    columns = [name_column(), number_column("budget"), *map(number_column, headings)]
    methods = ["full", "snapkv", LONG, "h2o(group_reduce='[red]')"]
    rows = [Row([name, "0.1", *(f"{n}.5 MB" for n in range(12))]) for name in methods]
    shown = console(width)
    print_table(shown, columns, rows, names=names, section=(0,), pad_edge=False)
    text = shown.export_text()
    check(text, width, methods, ["method", *headings])
    assert text.count("0.1") == 4 * (text.count("budget"))
    assert "[red]" in "".join(text.split()), "no markup"
    assert all(f"{n}.5 MB" in text for n in range(12))


def test_further_tables_without_an_edge_stand_apart():
    columns = [name_column(), *map(number_column, ["aaaaaaaaaaaa", "bbbbbbbbbbbb"])]
    shown = console(30)
    print_table(shown, columns, [Row(["full", "1", "2"])], show_edge=False)
    lines = [line.strip() for line in shown.export_text().splitlines()]
    assert [n for n, line in enumerate(lines) if line.startswith("method")] == [0, 4]
    assert [n for n, line in enumerate(lines) if not line] == [3]


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
    assert "kvjax generate --method snapkv --budget 0.5" in " ".join(text.split())
    assert 30 < len(text.splitlines()) < 90 or width == 40, "two screens"


@pytest.mark.parametrize("width", [60, 80])
def test_one_method(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    for name in (*METHODS, *WRAPPERS, *STORAGE, "chain"):
        text = output(capsys, "methods", name)
        assert max(map(len, text.splitlines())) <= width
        assert text.startswith(f"{name}\n") and "\nWhen: " in text
        (file,) = re.findall(r"page: (\S+)", text)
        assert (ROOT / file).is_file()
    text = output(capsys, "methods", "snapkv")
    assert "\nwindow=16\n  observation window W." in text and "arXiv 2404.14469" in text
    assert "\nbudget\n  slots kept of the prompt per KV head" in text
    assert "kvjax generate --method snapkv --budget 0.5" in text
    assert "METHOD" in output(capsys, "methods", "by_head")
    assert "did you mean by_head?" in error(capsys, "methods", "by_head(kvzip)")


def test_every_method_has_a_situation_and_every_parameter_a_meaning(capsys):
    names = [name for situation in filter(None, SITUATIONS) for name in methods_for(situation)]
    assert sorted(names) == sorted([*METHODS, *WRAPPERS, *STORAGE, "chain"])
    for methods in json.loads(output(capsys, "methods", "--json")).values():
        for name, method in methods.items():
            for parameter in method["parameters"]:
                assert parameter["about"], (name, parameter)


# Progress, and figures at the end

RECORD = {
    "prompt_tokens": 123_456, "new_tokens": 4_096, "ttft_s": 123.456, "tpot_s": 0.0301,
    "compile_s": 64.3, "cache_bytes": 123_456_789, "full_cache_bytes": 1_234_567_890,
    "memory_bytes": {"device": 23_456_789}, "method": "snapkv", "budget": 0.1,
}  # fmt: skip


def shown(display: Display, columns: int = 120) -> str:
    screen = console(columns)
    screen.print(display.get_renderable())
    text = screen.export_text()
    assert max(map(len, text.splitlines())) <= columns and "…" not in text
    return " ".join(text.split())


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_layers_that_are_read(columns):
    display = Display(wanted=False)
    assert display.reading(4, 1000) is None, "nothing is told where nothing is shown"
    display.disable = False
    on_layer = display.reading(4, 1000)
    display.disable = True
    display.show(0, None, "loading [the] model")
    assert "loading" in shown(display, columns) and "%" not in shown(display, columns)
    for layer in range(3):
        on_layer(layer)
    display.compiling(
        "the prompt pass of layer 4 of 4", "chain(every(snapkv(window=16), steps=64))"
    )
    text = shown(display, columns)
    assert "75%" in text, "the layers that were read stay read"
    line = (
        "compiling and running the prompt pass of layer 4 of 4 for chain(every(snapkv(window=16),"
    )
    assert line in text, "nothing is cut"
    on_layer(3)
    display.compiling("the decode loop")
    assert "%" not in shown(display, columns) and "decode loop" in shown(display)


def test_documents_that_are_read_one_after_the_other():
    """The bar is about all of them."""
    display = Display(wanted=False)
    display.disable = False
    on_layer = display.reading(4, 300, before=500, after=200, what="3 documents")
    pieces = display.reading(4, 300, 100, 100, before=500, after=300)
    display.disable = True
    on_layer(0)
    on_layer(1)
    assert "reading 3 documents: layer 2 of 4" in shown(display) and "65%" in shown(display)
    for layer in (0, 1, 2, 3, 0, 1):
        pieces(layer)
    text = shown(display)
    assert "reading 300 tokens, from token 200 on: layer 2 of 4" in text and "65%" in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_lines_are_broken_between_words_in_a_terminal_alone(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "30")
    print_line("10 tokens · 25 ms per token · cache 5.8 MB of 19 MB", "")
    lines = sys.stderr.getvalue().split("\n")[:-1]
    assert " ".join(line.strip() for line in lines).endswith("per token · cache 5.8 MB of 19 MB")
    assert max(map(len, lines)) <= 30 if stream is Terminal else len(lines) == 1


def test_text_that_is_printed_while_a_display_runs_stays(monkeypatch):
    terminal = Terminal()
    for name in ("stderr", "stdout"):
        monkeypatch.setattr(sys, name, terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Display() as display:
        display.show(0, None, "loading the model")
        display.text("=== book\n")
        display.start()
    before, _, after = terminal.getvalue().partition("=== book\n")
    assert "loading the model" in before, "the display has been shown"
    first, shown, _ = after.partition("loading the model")
    assert shown and "\x1b[1A" not in first, "the cursor goes up and erases the line"


@pytest.mark.parametrize(
    "recall", [None, {"hit_rate": 0.5, "fetched_bytes_per_step": 12_345_678.0}]
)
def test_figures(capsys, recall):
    print_figures({**RECORD, "recall": recall}, "cut by --max-new")
    text = capsys.readouterr().err
    assert text.startswith("123456 + 4096 tokens") and "compiled in 64.30 s" in text
    assert "cache 123.5 MB of 1.2 GB (10.0%) with snapkv, budget 0.1 · 100.0 MB of it in" in text
    assert ("50% hits · 12.3 MB fetched per token" in text) == (recall is not None)
    assert text.endswith("cut by --max-new\n") and text.count("\n") == 1


def test_durations():
    assert [seconds(x) for x in (None, 12.345, 1.0, 0.0031)] == ["-", "12.35 s", "1.00 s", "3.1 ms"]


def test_a_profile_is_made_in_shares():
    display = Display(wanted=False)
    on_layer = display.measuring(24, 3)
    for layer in range(30):
        on_layer(layer % 24)
    text = shown(display, 60)
    assert "measuring the model: text 2 of 3, layer 6 of 24" in text and "42%" in text


def test_a_method_is_broken_between_its_words():
    method = "by_head(chain(own_queries(budget=0.3428), quantize(bits=4, key_axis='token')))"
    columns = [name_column(), *map(number_column, ("bytes", "requests", "step"))]
    shown = console(60)
    print_table(shown, columns, [Row([method, "12,345", "6,789", "0.12 ms"])])
    text = shown.export_text()
    for word in ("own_queries(", "budget=0.3428),", "quantize(", "bits=4,", "key_axis='token')))"):
        assert word in text, text
