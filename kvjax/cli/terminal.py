"""Output of commands besides their results: progress, and lines on standard error."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich import progress
from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.text import Text

import kvjax

_FIGURES = (
    "ttft_s", "tpot_s", "compile_s", "cache_bytes", "full_cache_bytes", "memory_bytes",
)  # fmt: skip


class _Console(Console):
    """A console on standard error that never hides the cursor.

    Ctrl-C ends the process at once, and a hidden cursor would stay hidden.
    """

    def show_cursor(self, show: bool = True) -> bool:
        """Leaves the cursor as it is."""
        return False


class Display(progress.Progress):
    """Progress on standard error: a bar with times, and the current work.

    It disappears when it is stopped or the block ends. Nothing is shown unless `wanted` is true and
    standard error is a terminal.
    """

    def __init__(self, wanted: bool = True) -> None:
        console = _Console(stderr=True)
        super().__init__(
            progress.SpinnerColumn(),
            progress.BarColumn(bar_width=None),
            progress.TaskProgressColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=console,
            expand=True,
            disable=not (wanted and sys.stderr.isatty() and not console.is_dumb_terminal),
            # Cells of a comparison take seconds: an estimate from the last few would be unsteady.
            speed_estimate_period=300.0,
        )

    def start(self) -> None:
        """Starts the display, also again, below the lines that have been printed."""
        # A `Live` that starts again goes up by its last height, and erases lines printed since.
        # Standard output may be a file, which the display must not touch.
        self.live = Live(
            console=self.console, transient=True, refresh_per_second=10,
            redirect_stdout=False, redirect_stderr=False, get_renderable=self.get_renderable,
        )  # fmt: skip
        super().start()

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yields the current work, in as many lines as it takes, and the bar below it."""
        for task in self.tasks:
            yield Text(task.description, overflow="fold")
        yield self.make_tasks_table(self.tasks)

    def show(self, done: int, total: int | None, work: str) -> None:
        """Shows the current work and the progress; `total` is None if it is unknown.

        The method can be the `on_progress` of `kvjax.evaluation.compare`.
        """
        if not self.tasks or self.tasks[0].total != total:
            for task in self.task_ids:
                self.remove_task(task)
            self.add_task(work, total=total, completed=done)
        self.update(self.task_ids[0], completed=done, description=work)

    def compiling(self, code: str, method: str = "") -> None:
        """Shows the code that is compiled, and for which method; for `on_compile` of `generate`."""
        # No call reports that a layer was compiled and now runs, so the line names both.
        runs = " and running" if code.startswith("the prompt pass") else ""
        line = f"compiling{runs} {code}{' for ' * bool(method)}{method}"
        if self.tasks and self.tasks[0].total is not None and not self.tasks[0].finished:
            self.update(self.task_ids[0], description=line)  # layers are being read
        else:
            self.show(0, None, line)

    def reading(
        self,
        layers: int,
        tokens: int,
        piece: int | None = None,
        read: int = 0,
        *,
        before: int = 0,
        after: int = 0,
        what: str = "",
    ) -> Callable[[int], None] | None:
        """Returns an `on_layer` for `kvjax.generate` and `read`; None if nothing is shown.

        Args:
          layers: of the model.
          tokens: of the prompt.
          piece: tokens that are read at a time; None: all of them.
          read: tokens that have been read before.
          before, after: tokens of other prompts, which the bar counts too.
          what: names what is read in place of its tokens.
        """
        steps, rest = itertools.count(1), tokens - read

        def show(layer: int) -> None:
            step = next(steps)
            begun = read + ((step - 1) // layers) * (piece or 0)
            work = f"reading {what or f'{tokens:,} tokens'}"
            if piece:
                work += f", from token {begun:,} on"
            work += f": layer {layer + 1} of {layers}"
            done = min(step * (piece or rest), layers * rest)
            self.show(layers * before + done, layers * (before + rest + after), work)

        return None if self.disable else show

    def measuring(self, layers: int, texts: int) -> Callable[[int], None]:
        """Returns an `on_layer` for `kvjax.calibrated`."""
        steps = itertools.count()

        def show(layer: int) -> None:
            text, total = next(steps) // layers, layers * texts
            work = f"measuring the model: text {text + 1} of {texts}, layer {layer + 1}"
            self.show(text * layers + layer + 1, total, f"{work} of {layers}")

        return show

    def writing(self, count: int) -> None:
        """Shows the number of new tokens."""
        self.show(0, None, f"writing: {count:,} new tokens")

    def line(self, line: str) -> None:
        """Prints a line on standard error, above the display."""
        _print_line(self.console, line, "dim")

    def text(self, piece: str) -> None:
        """Stops the display, and prints a piece of text on standard output."""
        self.stop()
        print(piece, end="", flush=True)


def figures(result: kvjax.Generation) -> dict[str, Any]:
    """Returns times and bytes of a generation as `--json` prints them."""
    recall = None if result.recall is None else result.recall._asdict()
    return {**{name: getattr(result, name) for name in _FIGURES}, "recall": recall}


def seconds(value: float | None) -> str:
    """Formats a duration for people: `"1.25 s"`, `"3.1 ms"`, `"-"` for None."""
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"


def share(record: Mapping[str, Any]) -> str:
    """Formats the cache's bytes as a percentage of the full cache's."""
    return f"{record['cache_bytes'] / record['full_cache_bytes']:.1%}"


def no_entry(overflow: float) -> str:
    """Says which share of the vectors, at most, found neither an entry nor room in a codebook."""
    return (
        f"up to {overflow:.1%} of the vectors found no entry near enough in a full codebook, and "
        "are read in the direction of the nearest one; a larger capacity has room for more"
    )


def host_bytes(record: Mapping[str, Any]) -> int:
    """Returns the bytes of the cache that are not in the device's memory."""
    return record["cache_bytes"] - record["memory_bytes"]["device"]


def print_figures(record: Mapping[str, Any], last: str = "") -> None:
    """Prints a line with tokens, times and bytes on standard error.

    Args:
      record: the object that `--json` prints.
      last: text at the end of the line.
    """
    budget = "" if record["budget"] is None else f", budget {record['budget']}"
    parts = [
        f"{record['prompt_tokens']} + {record['new_tokens']} tokens",
        f"first after {seconds(record['ttft_s'])}",
        f"{seconds(record['tpot_s'])} per token",
        f"compiled in {seconds(record['compile_s'])}",
        f"cache {decimal(record['cache_bytes'])} of {decimal(record['full_cache_bytes'])} "
        f"({share(record)}) with {record['method']}{budget}",
    ]
    if host_bytes(record):
        parts.append(f"{decimal(host_bytes(record))} of it in host memory")
    recall = record["recall"]
    if recall is not None and recall["hit_rate"] is not None:
        fetched = decimal(round(recall["fetched_bytes_per_step"]))
        parts += [f"{100 * recall['hit_rate']:.0f}% hits", f"{fetched} fetched per token"]
    print_line(" · ".join([*parts, last] if last else parts), "dim")


def print_line(line: str, style: str) -> None:
    """Prints a line on standard error, which a terminal gets broken between words."""
    _print_line(Console(stderr=True), line, style)


def _print_line(console: Console, line: str, style: str) -> None:
    in_file = not console.is_terminal  # where a line stays one
    console.print(line, style=style, soft_wrap=in_file, markup=False, highlight=False)
