"""The table of a comparison in the terminal."""

from __future__ import annotations

import math
from pathlib import Path

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from kvjax.evaluation.results import Average, Proportion, Results

_WIDE = 110  # columns from which the table says everything
_FAILED = Text("failed", style="red")
_REASONS = 5  # failed cells that are told with their reasons


def print_report(console: Console, results: Results, folder: Path) -> None:
    """The table, what its columns are, the cells that failed and where the files are.

    A console that is too narrow for one table gets two, with the answers and with the figures.
    """
    averages, wide = results.averages(), console.width >= _WIDE
    answers = [_answers(row, averages[0]) for row in averages]
    figures = [_figures(row, wide) for row in averages]
    tables = [_table(averages, [a | b for a, b in zip(answers, figures, strict=True)], wide)]
    unbounded = console.options.update(width=10_000)
    if console.measure(tables[0], options=unbounded).maximum > console.width:
        tables = [_table(averages, cells, wide) for cells in (answers, figures)]
    for table in tables:
        console.print(table)
        console.print()
    settings = results.settings
    cells = len(settings["lengths"]) * len(settings["depths"])
    lengths = ", ".join(f"{length:,}" for length in settings["lengths"])
    console.print(
        f"Accuracy over {settings['cases'] * cells:,} cases ({settings['cases']} at each of "
        f"{len(settings['depths'])} depths in prompts of {lengths} tokens) with 95 % Wilson "
        "interval; green: the full cache's accuracy lies in it. The question is inside the "
        "compressed prompt.\n"
        "Δ nats: loss per token of held-out text minus that with the full cache. cache: its bytes "
        "after the prompt, as a share of the full cache's. recall: of the tokens with the most "
        "attention. error: relative, of the attention outputs. TTFT, TPOT: time to the first token "
        "and per further token.",
        style="dim",
    )
    failures = results.failures()
    for cell, reason in failures[:_REASONS]:
        console.print(Text(f"failed: {cell}: {reason}", style="red"))
    if len(failures) > _REASONS:
        console.print(f"and {len(failures) - _REASONS} more that failed", style="red")
    console.print(Text(f"Files: {folder}/results.json, results.csv, timings.json, *.png"))


def _table(averages: list[Average], cells: list[dict[str, Text]], wide: bool) -> Table:
    """A row per method and budget; its cells by the headings of their columns."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, int(wide)))
    table.add_column("method", style="bold", overflow="fold")
    table.add_column("budget", justify="right", no_wrap=True)
    for heading in cells[0]:
        table.add_column(heading, justify="right", no_wrap=True)
    methods = [row.method for row in averages]
    grouped = len(set(methods)) < len(methods)  # several budgets of a method
    for row, own, following in zip(averages, cells, [*methods[1:], None], strict=True):
        budget = "-" if row.budget is None else str(row.budget)
        ends = grouped and row.method != following
        table.add_row(Text(row.method), budget, *own.values(), end_section=ends)
    return table


def _answers(row: Average, full: Average) -> dict[str, Text]:
    return {
        f"{task.replace('_', chr(10))} %": _accuracy(found, full.accuracy[task])
        for task, found in row.accuracy.items()
    }


def _accuracy(found: Proportion | None, full: Proportion | None) -> Text:
    """Share and interval, green where the full cache's share lies in the interval."""
    if found is None:
        return _FAILED
    low, high = found.interval
    as_full = full is not None and low <= full.share <= high
    text = Text(found.percent, style="green" if as_full else "")
    # Rounded outwards: 100-100 would claim more certainty than 200 of 200 cases give.
    return text.append(f" {math.floor(100 * low)}-{math.ceil(100 * high)}", style="dim")


def _figures(row: Average, wide: bool) -> dict[str, Text]:
    def cell(value: float | None, text: str) -> Text:
        return _FAILED if value is None else Text(text.format(value))

    share = None if row.cache_bytes is None else row.cache_bytes / row.full_cache_bytes
    cache = cell(share, "{:.1%}" if wide else "{:.0%}")
    if wide and share is not None:
        cache = Text(f"{decimal(row.cache_bytes)} ").append(cache)
    return {
        "Δ nats": cell(row.nll_difference, "{:+.3f}"),
        "cache": cache,
        "recall": cell(row.recall, "{:.0%}"),
        "error": cell(row.attention_error, "{:.2f}"),
        "TTFT\nms": _milliseconds(row.ttft_s),
        "TPOT\nms": _milliseconds(row.tpot_s),
    }


def _milliseconds(seconds: float | None) -> Text:
    if seconds is None:
        return Text("-")
    value = 1000 * seconds
    return Text(f"{value:,.0f}" if value >= 10 else f"{value:.2f}")
