"""What the command line shows: progress, a line of figures, tables."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from kvjax.generation.generate import Generation
from kvjax.protocol import KVTransform
from kvjax.registry import parameters


class Display:
    """Progress on standard error: a spinner, and a bar over the layers that read the prompt.

    It disappears when the first token comes or the block ends. Nothing is shown where standard
    error is no terminal.

    Args:
      wanted: False: nothing is shown on a terminal either.
    """

    def __init__(self, wanted: bool = True) -> None:
        console = Console(stderr=True)
        self.shown = wanted and sys.stderr.isatty() and not console.is_dumb_terminal
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            TextColumn("elapsed"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            disable=not self.shown,
            # The display leaves standard output alone, which may be a file.
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Removes the display."""
        self._progress.stop()

    def stage(self, what: str, total: int | None = None) -> None:
        """Shows what is being done now, with a bar where its length is known."""
        for task in self._progress.task_ids:
            self._progress.remove_task(task)
        self._progress.add_task(what, total=total, count="", left="left" if total else "")

    def layers(self, num_layers: int, what: str) -> Callable[[int], None] | None:
        """An `on_layer` for `kvjax.generate`; None where nothing is shown.

        The stage that was shown before stays until the first layer reports.
        """
        if not self.shown:
            return None

        def on_layer(layer: int) -> None:
            if layer == 0:
                self.stage(what, total=num_layers)
            count = f"layer {layer + 1}/{num_layers}"
            for task in self._progress.task_ids:
                self._progress.update(task, completed=layer + 1, count=count)

        return on_layer


def seconds(value: float | None) -> str:
    """A duration for people: `"1.25 s"`, `"3.1 ms"`, `"-"` for None."""
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"


def share(result: Generation) -> str:
    """The cache's bytes as a percentage of the full cache's."""
    return f"{100 * result.cache_bytes / result.full_cache_bytes:.1f}%"


def host_bytes(result: Generation) -> int:
    """Bytes of the cache that are not in the device's memory."""
    return result.cache_bytes - result.memory_bytes["device"]


def print_figures(result: Generation) -> None:
    """One line on standard error: tokens, times, bytes."""
    new = len(result.tokens[0])
    line = (
        f"{result.prompt_tokens[0]} + {new} tokens · first after {seconds(result.ttft_s)} · "
        f"{seconds(result.tpot_s)} per token · cache {decimal(result.cache_bytes)} of "
        f"{decimal(result.full_cache_bytes)} ({share(result)})"
    )
    if host_bytes(result):
        line += f", {decimal(host_bytes(result))} of it in host memory"
    if result.recall is not None and result.recall.hit_rate is not None:
        fetched = decimal(round(result.recall.fetched_bytes_per_step))
        line += f" · {100 * result.recall.hit_rate:.0f}% hits, {fetched} fetched per token"
    Console(stderr=True, highlight=False).print(line, style="dim", soft_wrap=True)


def print_dropped(result: Generation, method: str) -> None:
    """One line on standard error where tokens were lost."""
    if not result.dropped:
        return
    line = (
        f"{method} lost {result.dropped:,} tokens that found no free slot, summed over layers and "
        "heads: it keeps more than it promises"
    )
    Console(stderr=True, highlight=False).print(line, style="red", soft_wrap=True, markup=False)


def answers(expected: str, texts: Mapping[str, str], right: Mapping[str, bool]) -> Padding:
    """The expected answer, and one row per method: right or wrong, its answer."""
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="bold", overflow="fold")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("expected", "", expected, style="dim")
    for method, text in texts.items():
        verdict = Text("right", "green") if right[method] else Text("wrong", "red")
        table.add_row(Text(method), verdict, Text(" ".join(text.split())))
    return Padding(table, (0, 0, 0, 1))  # in line with the other table


def comparison(results: Mapping[str, Generation], budgets: Mapping[str, object]) -> Table:
    """A table with one row per method: budget, bytes and times."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", style="bold", overflow="fold")
    for heading in ("budget", "cache", "of full", "first token", "per token"):
        table.add_column(heading, justify="right", no_wrap=True)
    for method, result in results.items():
        budget = "-" if budgets[method] is None else str(budgets[method])
        times = seconds(result.ttft_s), seconds(result.tpot_s)
        table.add_row(Text(method), budget, decimal(result.cache_bytes), share(result), *times)
        if host_bytes(result):
            table.caption = f"{decimal(host_bytes(result))} of {method} are in host memory."
    return table


def listing(
    kinds: Mapping[str, type[KVTransform]], heading: str, width: int, name_width: int
) -> Table:
    """A table of methods or wrappers: name, parameters with defaults, what it does, paper.

    Args:
      kinds: name → class.
      heading: of the names.
      width: columns of the terminal. name_width: of them for the names.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, width=min(width, 120))
    table.add_column(heading, style="bold", no_wrap=True, width=name_width)
    table.add_column("parameters", ratio=4)
    table.add_column("what it does", ratio=5)
    for number, (name, kind) in enumerate(kinds.items()):
        if number:
            table.add_row()
        about = Text(summary(kind))
        if kind.paper:
            about.append(f"\n{kind.paper}", style="dim")
        table.add_row(name, Text(_signature(parameters(kind))), about)
    return table


def summary(kind: type[KVTransform]) -> str:
    """The first line of a method's documentation."""
    return (inspect.getdoc(kind) or "").partition("\n")[0].replace("`", "")


def _signature(fields: Sequence[tuple[str, str]]) -> str:
    """`"budget, window=32"`; what has no default stands alone, a wrapper's base as "method"."""
    names = [
        "method" if name == "base" else name if value == "required" else f"{name}={value}"
        for name, value in fields
    ]
    return ", ".join(names) or "-"
