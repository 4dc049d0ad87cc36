"""The table of a comparison in the terminal."""

from __future__ import annotations

import math
from pathlib import Path

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kvjax.evaluation.results import Average, Proportion, Results

_WIDE = 110  # columns from which the table says everything
_UNBOUNDED = 10_000
_FAILED = Text("failed", style="red")
_REASONS = 5  # failed cells that are told with their reasons


def print_report(console: Console, results: Results, folder: Path) -> None:
    """The table, what its columns are, the cells that failed and where the files are.

    Args:
      console: where to; its width decides how much room the columns have.
      results: of a finished comparison.
      folder: that holds the files.
    """
    for table in report_tables(console, results):
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


def report_tables(console: Console, results: Results) -> list[Table]:
    """One row per method and budget; two tables where the terminal is too narrow for one.

    Args:
      console: that they must fit.
      results: of a finished comparison.
    """
    wide = console.width >= _WIDE
    table = _table(results, wide, answers=True, figures=True)
    natural = Measurement.get(console, console.options.update(width=_UNBOUNDED), table)
    if natural.maximum <= console.width:
        return [table]
    return [
        _table(results, wide, answers=True, figures=False),
        _table(results, wide, answers=False, figures=True),
    ]


def _table(results: Results, wide: bool, *, answers: bool, figures: bool) -> Table:
    """The columns of the tasks, or those of the cache, or both."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, int(wide)))
    table.add_column("method", style="bold", overflow="fold")
    table.add_column("budget", justify="right", no_wrap=True)
    tasks = [f"{task.replace('_', chr(10))} %" for task in results.settings["tasks"]]
    numbers = ["Δ nats", "cache", "recall", "error", "TTFT\nms", "TPOT\nms"]
    for heading in (tasks if answers else []) + (numbers if figures else []):
        table.add_column(heading, justify="right", no_wrap=True)
    averages = results.averages()
    names = [row.method for row in averages]
    grouped = len(set(names)) < len(names)  # several budgets of a method
    for number, row in enumerate(averages):
        if grouped and number and row.method != names[number - 1]:
            table.add_section()
        accuracy = [
            _accuracy(found, averages[0].accuracy[task]) for task, found in row.accuracy.items()
        ]
        cells = (accuracy if answers else []) + (_figures(row, wide) if figures else [])
        table.add_row(Text(row.method), "-" if row.budget is None else str(row.budget), *cells)
    return table


def _accuracy(found: Proportion | None, full: Proportion | None) -> Text:
    """Share and interval, green where the full cache's share lies in the interval."""
    if found is None:
        return _FAILED
    low, high = found.interval
    as_full = full is not None and low <= full.share <= high
    text = Text(found.percent, style="green" if as_full else "")
    # Rounded outwards: 100-100 would claim more certainty than 200 of 200 cases give.
    return text.append(f" {math.floor(100 * low)}-{math.ceil(100 * high)}", style="dim")


def _figures(row: Average, wide: bool) -> list[Text]:
    def cell(value: float | None, text: str) -> Text:
        return _FAILED if value is None else Text(text.format(value))

    share = None if row.cache_bytes is None else row.cache_bytes / row.full_cache_bytes
    cache = cell(share, "{:.1%}" if wide else "{:.0%}")
    if wide and share is not None:
        cache = Text(f"{decimal(row.cache_bytes)} ").append(cache)
    return [
        cell(row.nll_difference, "{:+.3f}"),
        cache,
        cell(row.recall, "{:.0%}"),
        cell(row.attention_error, "{:.2f}"),
        _milliseconds(row.ttft_s),
        _milliseconds(row.tpot_s),
    ]


def _milliseconds(seconds: float | None) -> Text:
    if seconds is None:
        return Text("-")
    value = 1000 * seconds
    return Text(f"{value:,.0f}" if value >= 10 else f"{value:.2f}")
