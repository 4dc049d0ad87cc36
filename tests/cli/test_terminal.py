"""What is shown while something is done, and the figures at its end."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvjax.cli.terminal import Display, print_figures

RECORD = {
    "prompt_tokens": 123_456, "new_tokens": 4_096, "ttft_s": 123.456, "tpot_s": 0.0301,
    "compile_s": 64.3, "cache_bytes": 123_456_789, "full_cache_bytes": 1_234_567_890,
    "memory_bytes": {"device": 23_456_789},
}  # fmt: skip


def shown(display: Display, columns: int = 120) -> str:
    console = Console(width=columns, record=True, file=io.StringIO())
    console.print(display.get_renderable())
    text = console.export_text()
    assert text.count("\n") == 1 and len(text) <= columns + 1, "one line that fits"
    return text


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
    assert "compiling" in text
    if columns == 120:
        assert "compiling and running the prompt pass" in text
    on_layer(3)
    display.compiling("the decode loop")
    assert "%" not in shown(display, columns) and "decode loop" in shown(display)


@pytest.mark.parametrize(
    "recall", [None, {"hit_rate": 0.5, "fetched_bytes_per_step": 12_345_678.0}]
)
def test_figures(capsys, recall):
    print_figures({**RECORD, "recall": recall}, "cut by --max-new")
    text = capsys.readouterr().err
    assert text.startswith("123456 + 4096 tokens") and "compiled in 64.30 s" in text
    assert "cache 123.5 MB of 1.2 GB (10.0%) · 100.0 MB of it in host memory" in text
    assert ("50% hits · 12.3 MB fetched per token" in text) == (recall is not None)
    assert text.endswith("cut by --max-new\n") and text.count("\n") == 1
