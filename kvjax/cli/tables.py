"""Tables that show the names of their rows even in a narrow terminal."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

_NAME_WIDTH = 12  # minimum width of a column of longer names
_ANY_WIDTH = 10_000  # width of a terminal in which every table fits


_PARTS = re.compile(r"[^(, ]*[(, ]?")  # of a method's text, between which a line may end


@dataclass(frozen=True)
class _MethodText:
    """A method's text, whose lines end behind brackets and commas and in no word that fits."""

    text: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        longest = max(len(part.rstrip()) for part in _PARTS.findall(self.text))
        least = min(len(self.text), max(_NAME_WIDTH, longest))
        return Measurement(least, len(self.text)).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        lines = [""]
        for part in _PARTS.findall(self.text):
            if lines[-1] and len((lines[-1] + part).rstrip()) > options.max_width:
                lines.append("")
            lines[-1] += part
        yield Text("\n".join(line.rstrip() for line in lines), overflow="fold")


class Row(NamedTuple):
    """A line of a table.

    Args:
      cells: one for each column; text is shown as it is, without markup.
      style: style of the line.
    """

    cells: Sequence[str | Text]
    style: str = ""


def name_column(**options: Any) -> Column:
    """Makes the column of methods; `print_table` breaks long texts into lines."""
    return Column("method", overflow="fold", **options)


def number_column(heading: str | Text) -> Column:
    """Makes a column of figures."""
    return Column(heading, justify="right", no_wrap=True)


def print_table(
    console: Console,
    columns: Sequence[Column],
    rows: Sequence[Row],
    names: int = 1,
    section: Sequence[int] = (),
    **look: Any,
) -> None:
    """Prints a table, or several tables if names and all figures do not fit side by side.

    Args:
      console: console to print to.
      columns: name columns, of which the first may be broken into lines, and columns of figures.
      rows: lines of the table, at least one.
      names: number of name columns, which are repeated at the beginning of each table.
      section: columns whose cells divide the table into sections when one of them changes.
      look: options of `rich.table.Table`.
    """

    def table(chosen: Sequence[int], name_width: int | None = None) -> Table:
        shown = [*range(names), *chosen]
        result = Table(*(columns[place].copy() for place in shown), box=box.SIMPLE_HEAD, **look)
        result.columns[0].max_width = name_width
        for row, following in itertools.zip_longest(rows, rows[1:], fillvalue=rows[-1]):
            cells = [row.cells[place] for place in shown]
            texts: list[RenderableType] = [
                Text(cell) if isinstance(cell, str) else cell for cell in cells
            ]
            if isinstance(cells[0], str):
                texts[0] = _MethodText(cells[0])
            ends = any(row.cells[place] != following.cells[place] for place in section)
            result.add_row(*texts, style=row.style, end_section=ends)
        return result

    def fits(chosen: Sequence[int], name_width: int) -> bool:
        """Returns whether the columns fit beside names of at most this width."""
        wide = console.options.update_width(_ANY_WIDTH)
        return console.measure(table(chosen, name_width), options=wide).maximum <= console.width

    # Names get the width that figures leave: rich breaks them if a table would be too wide.
    groups: list[list[int]] = [[]]
    places, width = range(names, len(columns)), max(_NAME_WIDTH, console.width // 3)
    if fits(places, _NAME_WIDTH):
        groups, places = [[*places]], range(0)
    for place in places:
        if groups[-1] and not fits([*groups[-1], place], width):
            groups.append([])
        groups[-1].append(place)
    for number, group in enumerate(groups):
        if number and not look.get("show_edge", True):
            console.print()
        console.print(table(group))
