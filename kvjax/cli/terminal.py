"""What commands show beside their results: progress, and lines on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rich import progress
from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.text import Text


class Display(progress.Progress):
    """Progress on standard error: a bar with times, and below it what is done now.

    It disappears when it is stopped or the block ends. Nothing is shown unless it is `wanted` and
    standard error is a terminal.
    """

    def __init__(self, wanted: bool = True) -> None:
        console = Console(stderr=True)
        shown = wanted and sys.stderr.isatty() and not console.is_dumb_terminal
        self._now = Text(no_wrap=True, overflow="ellipsis", style="dim")
        super().__init__(
            progress.SpinnerColumn(),
            progress.BarColumn(bar_width=None),
            progress.TaskProgressColumn(),
            progress.TimeElapsedColumn(),
            "elapsed,",
            progress.TimeRemainingColumn(),
            "left",
            console=console,
            transient=True,
            expand=True,
            disable=not shown,
            # Cells of a comparison take seconds: an estimate from the last few would jump.
            speed_estimate_period=300.0,
            # The display leaves standard output alone, which may be a file.
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def get_renderables(self) -> Iterator[RenderableType]:
        """The bar, and the line below."""
        yield from super().get_renderables()
        yield self._now

    def show(self, done: int, total: int | None, what: str) -> None:
        """Says what is done now, and how far it is; `total` None: nobody knows.

        As it is, an `on_progress` for `kvjax.evaluation.compare`.
        """
        if not self.tasks or self.tasks[0].total != total:
            for task in self.task_ids:
                self.remove_task(task)
            self.add_task("", total=total, completed=done)
        self.update(self.task_ids[0], completed=done)
        self._now.plain = what


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


def print_figures(record: Mapping[str, Any]) -> None:
    """One line on standard error: tokens, times, bytes; from what `--json` prints."""
    line = (
        f"{record['prompt_tokens']} + {record['new_tokens']} tokens · first after "
        f"{seconds(record['ttft_s'])} · {seconds(record['tpot_s'])} per token · cache "
        f"{decimal(record['cache_bytes'])} of {decimal(record['full_cache_bytes'])} "
        f"({share(record)})"
    )
    if host_bytes(record):
        line += f", {decimal(host_bytes(record))} of it in host memory"
    recall = record["recall"]
    if recall is not None and recall["hit_rate"] is not None:
        fetched = decimal(round(recall["fetched_bytes_per_step"]))
        line += f" · {100 * recall['hit_rate']:.0f}% hits, {fetched} fetched per token"
    _print_line(line, "dim")


def print_dropped(method: str, dropped: int) -> None:
    """One line on standard error where tokens were lost."""
    if dropped:
        _print_line(
            f"{method} lost {dropped:,} tokens that found no free slot, summed over layers and "
            "heads: it keeps more than it promises",
            "red",
        )


def _print_line(line: str, style: str) -> None:
    Console(stderr=True, highlight=False).print(line, style=style, soft_wrap=True, markup=False)
