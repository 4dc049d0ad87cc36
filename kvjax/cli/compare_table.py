"""Table of a comparison in the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from kvjax.cli.tables import Row, name_column, number_column, print_table
from kvjax.evaluation.cells.results import Results
from kvjax.evaluation.report import tables
from kvjax.evaluation.report.tables import AS_FULL, AT_FLOOR, FAILED, Column, Field
from kvjax.messages import printable

_WIDE = 110  # width of a terminal from which on there is space between columns
_STYLES = {FAILED: "red", AS_FULL: "green"}
_REASONS = 5  # maximum number of failed cells that are listed with their reasons


def print_report(console: Console, results: Results, folder: Path) -> None:
    """Prints a table per length, what its figures mean, failed cells and the files' folder.

    Columns that do not fit into the console's width go into further tables.
    """
    lengths = tables.tables(results)
    for table in lengths:
        cases = results.settings["cases"]
        heading = f"Prompts of {table.length:,} tokens, {cases:,} cases of each task at most"
        console.print(heading, style="bold")
        _print_table(console, table)
    console.print(Text(tables.LEGEND, style="dim"))
    if any(column.at_floor for table in lengths for column in table.columns):
        console.print(Text(f"*: {AT_FLOOR}.", style="dim"))
    for note in tables.missing_rows(results):
        console.print(Text(note))
    failures = results.failures()
    for cell, reason in failures[:_REASONS]:
        console.print(Text(printable(f"failed: {cell}: {reason}"), style="red"))
    if len(failures) > _REASONS:
        console.print(f"and {len(failures) - _REASONS} more that failed", style="red")
    console.print(Text(f"Files: {folder}/report.html, results.csv, *.png"))


def _heading(column: Column) -> str:
    """Returns the words of a task, one per line; a star means the full cache is at the floor."""
    lines = [*column.heading.split(" "), column.under] if column.under else [column.heading]
    lines[-1] += " *" if column.at_floor else ""
    return "\n".join(lines)


def _print_table(console: Console, table: tables.Table) -> None:
    columns = [name_column(style="bold"), number_column("budget")]
    columns += [number_column(Text(_heading(column))) for column in table.columns]
    rows = [
        Row([method, budget, *(_field(column.fields[number], column) for column in table.columns)])
        for number, (method, budget) in enumerate(table.candidates)
    ]
    several = len(dict(table.candidates)) < len(rows)  # budgets of a method
    look = {"show_edge": False, "padding": (0, int(console.width >= _WIDE))}
    print_table(console, columns, rows, names=2, section=(0,) if several else (), **look)


def _field(field: Field, column: Column) -> Text:
    """Formats a figure and its interval, in green if the full cache's score lies in it."""
    text = Text(field.text, style="dim" if column.at_floor else _STYLES.get(field.state, ""))
    return text.append(f" {field.detail}", style="dim") if field.detail else text
