"""Tables in the terminal that keep the names of their rows, however narrow it is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

_NAME_WIDTH = 12  # of names that are longer, at least
_ANY_WIDTH = 10_000  # of a terminal in which every table fits


class Row(NamedTuple):
    """A line of a table.

    Args:
      cells: one for each column; text is shown as it is, without markup.
      style: of the line.
    """

    cells: Sequence[str | Text]
    style: str = ""


def name_column(heading: str = "method", **options: Any) -> Column:
    """The column of names, which are broken where they are long."""
    return Column(heading, overflow="fold", **options)


def number_column(heading: str | Text) -> Column:
    """A column of figures."""
    return Column(heading, justify="right", no_wrap=True)


def print_table(
    console: Console,
    columns: Sequence[Column],
    rows: Sequence[Row],
    names: int = 1,
    section: int | None = None,
    **look: Any,
) -> None:
    """Prints a table, or several where names and all figures do not fit side by side.

    Args:
      console: where it is printed.
      columns: the first ones are the rows' names, of which the very first may be broken.
      rows: one line each, at least one.
      names: how many columns stand at the beginning of each table.
      section: the column of which another cell begins a section; None: there are none.
      look: options of `rich.table.Table`.
    """

    def table(chosen: Sequence[int], most: int | None = None) -> Table:
        shown = [*range(names), *chosen]
        made = Table(*(columns[place].copy() for place in shown), box=box.SIMPLE_HEAD, **look)
        made.columns[0].max_width = most
        for row, following in itertools.zip_longest(rows, rows[1:], fillvalue=rows[-1]):
            cells = [row.cells[place] for place in shown]
            texts = [Text(cell) if isinstance(cell, str) else cell for cell in cells]
            ends = section is not None and row.cells[section] != following.cells[section]
            made.add_row(*texts, style=row.style, end_section=ends)
        return made

    def fits(chosen: Sequence[int], most: int) -> bool:
        """Whether they fit beside names of at most so many signs."""
        wide = console.options.update_width(_ANY_WIDTH)
        return console.measure(table(chosen, most), options=wide).maximum <= console.width

    # Names take what figures leave: rich breaks them where a table would be too wide.
    groups: list[list[int]] = [[]]
    places, width = range(names, len(columns)), max(_NAME_WIDTH, console.width // 3)
    if fits(places, _NAME_WIDTH):
        groups, places = [[*places]], range(0)
    for place in places:
        if groups[-1] and not fits([*groups[-1], place], width):
            groups.append([])
        groups[-1].append(place)
    for group in groups:
        console.print(table(group))
