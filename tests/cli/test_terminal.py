"""What is shown while something is done: true, and within the terminal's width."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from kvjax.cli.terminal import Display, print_figures

ROOT = Path(__file__).parents[2]
RECORD = {
    "prompt_tokens": 123_456, "new_tokens": 4_096, "ttft_s": 123.456, "tpot_s": 0.0301,
    "compile_s": 64.3, "cache_bytes": 123_456_789, "full_cache_bytes": 1_234_567_890,
    "memory_bytes": {"device": 23_456_789},
    "recall": {"hit_rate": 0.5, "fetched_bytes_per_step": 12_345_678.0},
}  # fmt: skip


class Shown:
    """A display with a clock of its own, and what it shows."""

    def __init__(self, columns: int = 80):
        self.display, self._columns, self.time = Display(wanted=False), columns, 0.0
        self.display.get_time = lambda: self.time

    def lines(self) -> list[str]:
        console = Console(width=self._columns, record=True, file=io.StringIO())
        console.print(self.display.get_renderable())
        return console.export_text().splitlines()


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_lines_fit(columns):
    shown = Shown(columns)
    method = "chain(every(snapkv(window=16), steps=64), quantize(bits=4))"
    for number in range(3):
        shown.display.show(number, 30, f"reading 123,456 tokens: layer {number} of 30")
        shown.time += 100.0
        assert max(map(len, shown.lines())) <= columns
    shown.display.compiling("the prompt pass of layer 10 of 30", method)
    bar, now = shown.lines()
    assert len(bar) <= columns and len(now) <= columns
    assert "elapsed" in bar and " left" in bar
    assert now.startswith("compiling and running the prompt pass of layer 10 of 30")


def test_the_time_left_is_an_estimate_or_nothing():
    shown = Shown()
    shown.display.show(0, None, "loading the model")
    assert "elapsed" in shown.lines()[0] and "left" not in shown.lines()[0]
    shown.display.compiling("the embedding")
    assert shown.lines()[1].strip() == "compiling the embedding"
    for layer in range(4):
        shown.time += 10.0
        _reading(shown)(layer)
    assert "left" not in shown.lines()[0], "all layers have been read"
    shown.display.compiling("the decode loop")
    bar, now = shown.lines()
    assert "left" not in bar and "100%" not in bar and "compiling the decode loop" in now


def test_layers_that_are_read():
    shown = Shown()
    for layer in range(3):
        _reading(shown)(layer)
        shown.time += 10.0
    bar, now = shown.lines()
    assert "75%" in bar and "0:00:10 left" in bar and "0:00:00 left" not in bar
    assert now.strip() == "reading 1,000 tokens: layer 3 of 4"
    shown.display.compiling("the prompt pass of layer 4 of 4")
    bar, now = shown.lines()
    assert "75%" in bar, "the layers that were read stay read"
    assert now.strip() == "compiling and running the prompt pass of layer 4 of 4"


def _reading(shown: Shown):
    shown.display.disable = False
    on_layer = shown.display.reading(4, 1000)
    shown.display.disable = True
    return on_layer


def test_nothing_is_told_where_nothing_is_shown():
    assert Display(wanted=False).reading(4, 1000) is None


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("recall", [None, RECORD["recall"]], ids=["", "recall"])
def test_figures_fit(capsys, monkeypatch, columns, recall):
    monkeypatch.setenv("COLUMNS", str(columns))
    print_figures({**RECORD, "recall": recall})
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= columns
    text = " ".join(lines)
    assert "123456 + 4096 tokens" in text and "compiled in 64.30 s" in text
    assert "cache 123.5 MB of 1.2 GB (10.0%)" in text
    assert ("50% hits" in text) == (recall is not None)


def test_two_lines_on_usual_terminals(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    record = {**RECORD, "prompt_tokens": 2000, "new_tokens": 128, "ttft_s": 1.25, "recall": None}
    print_figures({**record, "memory_bytes": {"device": record["cache_bytes"]}})
    times, sizes = capsys.readouterr().err.splitlines()
    assert times.endswith("compiled in 64.30 s") and sizes.startswith("cache 123.5 MB")


@pytest.mark.parametrize("given", [None, "0"])
def test_the_compiler_is_silent_unless_it_is_asked(given):
    env = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    env |= {} if given is None else {"TF_CPP_MIN_LOG_LEVEL": given}
    code = (
        "import os, sys, types\n"
        "class Main(types.ModuleType):\n"
        "    main = staticmethod(lambda: print(os.environ['TF_CPP_MIN_LOG_LEVEL']))\n"
        "for name in ('kvjax.cli', 'kvjax.cli.main'): sys.modules[name] = Main(name)\n"
        "from kvjax.__main__ import main; main()"
    )
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, env=env)
    assert (done.stdout.strip(), done.stderr) == (given or "3", "")
