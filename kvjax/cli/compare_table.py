"""The table of a comparison in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvjax.evaluation.cells.results import Results
from kvjax.evaluation.report import tables
from kvjax.evaluation.report.tables import AS_FULL, AT_FLOOR, DEFINITIONS, FAILED, Column, Field
from kvjax.messages import printable

_WIDE = 110  # columns from which there is space between columns
_STYLES = {FAILED: "red", AS_FULL: "green"}
_REASONS = 5  # failed cells that are told with their reasons


def print_report(console: Console, results: Results, folder: Path) -> None:
    """A table per length, what its columns are, the cells that failed and where the files are.

    What does not fit next to each other in the console's width goes into further tables.
    """
    lengths = tables.tables(results)
    for table in lengths:
        cases = results.settings["cases"]
        heading = f"Prompts of {table.length:,} tokens, {cases:,} cases of each task at most"
        console.print(heading, style="bold")
        for columns in _parts(console.width, table):
            console.print(_rich_table(console.width, table, columns))
            console.print()
    for name, text in DEFINITIONS.items():
        console.print(Text(f"{name}: {text}", style="dim"))
    if any(column.at_floor for table in lengths for column in table.columns):
        console.print(Text(f"*: {AT_FLOOR}.", style="dim"))
    for note in tables.notes(results):
        console.print(Text(note))
    failures = results.failures()
    for cell, reason in failures[:_REASONS]:
        console.print(Text(printable(f"failed: {cell}: {reason}"), style="red"))
    if len(failures) > _REASONS:
        console.print(f"and {len(failures) - _REASONS} more that failed", style="red")
    console.print(Text(f"Files: {folder}/report.html, results.json, results.csv, *.png"))


def _parts(width: int, table: tables.Table) -> Iterator[list[Column]]:
    """The columns in groups that fit, each beside the names of the candidates."""
    space = 3 if width >= _WIDE else 1
    budgets = max(map(_budget_width, table.candidates))
    free = width - _methods_width(width, table) - budgets - 2 * space
    columns, used = [], 0
    for column in table.columns:
        own = space + max(map(cell_len, (*_heading(column).splitlines(), *_texts(column))))
        if columns and used + own > free:
            yield columns
            columns, used = [], 0
        columns, used = [*columns, column], used + own
    yield columns


def _methods_width(width: int, table: tables.Table) -> int:
    """Of the first column, in which long names are broken."""
    longest = max(len("method"), *(len(method) for method, _ in table.candidates))
    return min(longest, max(12, width // 3))


def _budget_width(candidate: tuple[str, str]) -> int:
    return max(len("budget"), len(candidate[1]))


def _texts(column: Column) -> list[str]:
    return [_field(one, column).plain for one in column.fields]


def _heading(column: Column) -> str:
    """The words of a task below each other; a star where the full cache is at the floor."""
    lines = [*column.heading.split(" "), column.under] if column.under else [column.heading]
    lines[-1] += " *" if column.at_floor else ""
    return "\n".join(lines)


def _rich_table(width: int, table: tables.Table, columns: list[Column]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, int(width >= _WIDE)))
    made.add_column("method", style="bold", overflow="fold", max_width=_methods_width(width, table))
    made.add_column("budget", justify="right", no_wrap=True)
    for column in columns:
        made.add_column(Text(_heading(column)), justify="right", no_wrap=True)
    methods = [method for method, _ in table.candidates]
    grouped = len(set(methods)) < len(methods)  # several budgets of a method
    for number, (method, budget) in enumerate(table.candidates):
        ends = grouped and method != [*methods, None][number + 1]
        cells = [_field(column.fields[number], column) for column in columns]
        made.add_row(Text(method), budget, *cells, end_section=ends)
    return made


def _field(field: Field, column: Column) -> Text:
    """Figure and interval; green where the full cache's score lies in it."""
    text = Text(field.text, style="dim" if column.at_floor else _STYLES.get(field.state, ""))
    return text.append(f" {field.detail}", style="dim") if field.detail else text
