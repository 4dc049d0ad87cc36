"""What commands show beside their results: progress, and lines on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from kvjax.generation.generate import Generation


class Display(Progress):
    """Progress on standard error: a bar with times, and below it what is done now.

    It disappears when it is stopped or the block ends. Nothing is shown where standard error is no
    terminal.

    Args:
      wanted: False: nothing is shown on a terminal either.
    """

    def __init__(self, wanted: bool = True) -> None:
        console = Console(stderr=True)
        shown = wanted and sys.stderr.isatty() and not console.is_dumb_terminal
        self._now = Text(no_wrap=True, overflow="ellipsis", style="dim")
        super().__init__(
            SpinnerColumn(),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            "elapsed,",
            TimeRemainingColumn(),
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


def share(result: Generation) -> str:
    """The cache's bytes as a percentage of the full cache's."""
    return f"{result.cache_bytes / result.full_cache_bytes:.1%}"


def host_bytes(result: Generation) -> int:
    """Bytes of the cache that are not in the device's memory."""
    return result.cache_bytes - result.memory_bytes["device"]


def print_figures(result: Generation) -> None:
    """One line on standard error: tokens, times, bytes."""
    line = (
        f"{result.prompt_tokens[0]} + {len(result.tokens[0])} tokens · first after "
        f"{seconds(result.ttft_s)} · {seconds(result.tpot_s)} per token · cache "
        f"{decimal(result.cache_bytes)} of {decimal(result.full_cache_bytes)} ({share(result)})"
    )
    if host_bytes(result):
        line += f", {decimal(host_bytes(result))} of it in host memory"
    if result.recall is not None and result.recall.hit_rate is not None:
        fetched = decimal(round(result.recall.fetched_bytes_per_step))
        line += f" · {100 * result.recall.hit_rate:.0f}% hits, {fetched} fetched per token"
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
