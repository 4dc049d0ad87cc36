"""What commands show beside their results: progress, and lines on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich import progress
from rich.console import Console
from rich.filesize import decimal
from rich.table import Column

import kvjax

_FIGURES = (
    "ttft_s", "tpot_s", "compile_s", "cache_bytes", "full_cache_bytes", "memory_bytes", "dropped",
)  # fmt: skip


class _Console(Console):
    """Standard error with a cursor that stays: Ctrl-C ends the process at once."""

    def show_cursor(self, show: bool = True) -> bool:
        """Leaves the cursor as it is."""
        return False


class Display(progress.Progress):
    """Progress on standard error: a bar with times, and what is done now.

    It disappears when it is stopped or the block ends. Nothing is shown unless it is `wanted` and
    standard error is a terminal.
    """

    def __init__(self, wanted: bool = True) -> None:
        console = _Console(stderr=True)
        what = Column(ratio=2, no_wrap=True, overflow="ellipsis")
        super().__init__(
            progress.SpinnerColumn(),
            progress.BarColumn(bar_width=None, table_column=Column(ratio=1)),
            progress.TaskProgressColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.description}", markup=False, table_column=what),
            console=console,
            transient=True,
            expand=True,
            disable=not (wanted and sys.stderr.isatty() and not console.is_dumb_terminal),
            # Cells of a comparison take seconds: an estimate from the last few would jump.
            speed_estimate_period=300.0,
            # The display leaves standard output alone, which may be a file.
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def show(self, done: int, total: int | None, what: str) -> None:
        """Says what is done now, and how far it is; `total` None: nobody knows.

        As it is, an `on_progress` for `kvjax.evaluation.compare`.
        """
        if not self.tasks or self.tasks[0].total != total:
            for task in self.task_ids:
                self.remove_task(task)
            self.add_task(what, total=total, completed=done)
        self.update(self.task_ids[0], completed=done, description=what)

    def compiling(self, what: str, method: str = "") -> None:
        """Says what is compiled now, for which method: an `on_compile` for `kvjax.generate`."""
        # Nothing is told between the compilation of a layer and its end.
        runs = " and running" if what.startswith("the prompt pass") else ""
        line = f"compiling{runs} {what}{' for ' * bool(method)}{method}"
        if self.tasks and self.tasks[0].total is not None and not self.tasks[0].finished:
            self.update(self.task_ids[0], description=line)  # layers are being read
        else:
            self.show(0, None, line)

    def reading(self, layers: int, tokens: int) -> Callable[[int], None] | None:
        """An `on_layer` for `kvjax.generate`; None where nothing is shown."""

        def show(layer: int) -> None:
            what = f"reading {tokens:,} tokens: layer {layer + 1} of {layers}"
            self.show(layer + 1, layers, what)

        return None if self.disable else show

    def writing(self, count: int) -> None:
        """Says how many new tokens there are."""
        self.show(0, None, f"writing: {count:,} new tokens")

    def text(self, piece: str) -> None:
        """Prints text that comes, on standard output; the display is over."""
        self.stop()
        print(piece, end="", flush=True)


def figures(result: kvjax.Generation) -> dict[str, Any]:
    """Times and bytes of a generation as `--json` prints them."""
    recall = None if result.recall is None else result.recall._asdict()
    return {**{name: getattr(result, name) for name in _FIGURES}, "recall": recall}


def seconds(value: float | None) -> str:
    """A duration for people: `"1.25 s"`, `"3.1 ms"`, `"-"` for None."""
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"


def share(record: Mapping[str, Any]) -> str:
    """The cache's bytes as a percentage of the full cache's."""
    return f"{record['cache_bytes'] / record['full_cache_bytes']:.1%}"


def host_bytes(record: Mapping[str, Any]) -> int:
    """Bytes of the cache that are not in the device's memory."""
    return record["cache_bytes"] - record["memory_bytes"]["device"]


def print_figures(record: Mapping[str, Any], last: str = "") -> None:
    """Prints a line with tokens, times and bytes on standard error.

    Args:
      record: what `--json` prints.
      last: what is said behind them.
    """
    parts = [
        f"{record['prompt_tokens']} + {record['new_tokens']} tokens",
        f"first after {seconds(record['ttft_s'])}",
        f"{seconds(record['tpot_s'])} per token",
        f"compiled in {seconds(record['compile_s'])}",
        f"cache {decimal(record['cache_bytes'])} of {decimal(record['full_cache_bytes'])} "
        f"({share(record)})",
    ]
    if host_bytes(record):
        parts.append(f"{decimal(host_bytes(record))} of it in host memory")
    recall = record["recall"]
    if recall is not None and recall["hit_rate"] is not None:
        fetched = decimal(round(recall["fetched_bytes_per_step"]))
        parts += [f"{100 * recall['hit_rate']:.0f}% hits", f"{fetched} fetched per token"]
    print_line(" · ".join([*parts, last] if last else parts), "dim")


def print_dropped(method: str, dropped: int) -> None:
    """One line on standard error where tokens were lost."""
    if dropped:
        print_line(
            f"{method} lost {dropped:,} tokens that found no free slot, summed over layers and "
            "heads: it keeps more than it promises",
            "red",
        )


def print_line(line: str, style: str) -> None:
    """A line on standard error, of any length."""
    Console(stderr=True, highlight=False).print(line, style=style, soft_wrap=True, markup=False)
