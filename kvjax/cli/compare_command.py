"""`kvjax compare`: arguments checked, progress while it runs, a table at its end."""

from __future__ import annotations

import argparse
import ast
import json
import sys
from pathlib import Path
from typing import Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from kvjax.cli.compare_table import print_report
from kvjax.cli.model_folder import model_folder
from kvjax.cli.text_file import read_text
from kvjax.evaluation import Grid
from kvjax.evaluation.compare import run
from kvjax.evaluation.files import as_json, check_folder, timings
from kvjax.evaluation.grid import ALL_METHODS
from kvjax.evaluation.material import Material

DEFAULT_OUT = "kvjax-compare"
_BUNDLED = "bundled"
_GRID = ("methods", "budgets", "lengths", "depths", "tasks", "cases", "seed")


def compare(args: argparse.Namespace) -> int:
    """`kvjax compare`; the exit code is 1 if a cell failed."""
    # Imported here: kvjax does without kvjax.models, and help without what they import.
    from kvjax.models import demo, from_pretrained, load_tokenizer, read_config

    grid = Grid.of(**{name: getattr(args, name) for name in _GRID})
    out = Path(args.out)
    check_folder(out)
    text = demo.held_out_text() if args.text is None else _given_text(args.text)
    folder = model_folder(args.model)
    config = read_config(folder)
    grid.check_model(config.num_layers)
    with _Bar(shown=not args.json) as bar:
        bar.now("reading the text")
        material = Material(grid, load_tokenizer(folder), text)
        material.check(config)
        bar.now("loading the model")
        model = from_pretrained(folder)
        try:
            results = run(
                material, model, end_tokens=config.eos_token_ids, name=args.model or _BUNDLED,
                out=out, on_progress=bar.show,
            )  # fmt: skip
        except KeyboardInterrupt:
            bar.stop()
            print(f"interrupted; the same command goes on with what {out} holds", file=sys.stderr)
            raise
    if args.json:
        record = {**as_json(results), "timings": timings(results), "out": str(out)}
        sys.stdout.write(json.dumps(record) + "\n")
    else:
        print_report(Console(highlight=False), results, out)
    return 1 if results.failures() else 0


def method_list(text: str) -> list[str]:
    """Methods separated by commas, which may contain commas themselves; `all` for every method.

    Example:
      >>> from kvjax.cli.compare_command import method_list
      >>> method_list("h2o, every(snapkv, steps=64)")
      ['h2o', 'every(snapkv, steps=64)']
    """
    if text.strip() == "all":
        return list(ALL_METHODS)
    source = f"[{text}]"
    try:
        node = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError):
        node = None
    if not isinstance(node, ast.List) or not node.elts:
        raise argparse.ArgumentTypeError(f"must be methods between commas, got {text!r}")
    return [ast.get_source_segment(source, part) or "" for part in node.elts]


def number_list(text: str) -> list[int | float]:
    """Integers and decimals separated by commas."""
    return [_number(part) for part in text.split(",")]


def depth_list(text: str) -> list[float]:
    """Depths separated by commas, or the number of depths to spread evenly from 0 to 1."""
    depths = number_list(text)
    if len(depths) > 1 or isinstance(depths[0], float):
        return depths
    if depths[0] < 2:
        raise argparse.ArgumentTypeError(
            f"must be a number of depths, at least 2, or depths such as 0,0.5,1, got {text!r}"
        )
    return np.linspace(0.0, 1.0, depths[0]).tolist()


def name_list(text: str) -> list[str]:
    """Names separated by commas."""
    return [part.strip() for part in text.split(",")]


def _number(text: str) -> int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise argparse.ArgumentTypeError(f"must be numbers between commas, got {text.strip()!r}")


def _given_text(path: str) -> str:
    text = read_text(path)
    if not text.strip():
        raise ValueError(f"{path} is empty")
    return text


class _Bar(Progress):
    """One bar over all cells with the time left, and below it what is measured now.

    It is shown on standard error, if that is a terminal, and removed at the end.
    """

    def __init__(self, shown: bool) -> None:
        console = Console(stderr=True)
        self._now = Text(no_wrap=True, overflow="ellipsis", style="dim")
        super().__init__(
            TextColumn("comparing"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            transient=True,
            expand=True,
            disable=not (shown and sys.stderr.isatty() and not console.is_dumb_terminal),
            # Cells take seconds: an estimate from the last few would jump.
            speed_estimate_period=300.0,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def get_renderables(self):
        """The bar, and the line below."""
        yield from super().get_renderables()
        yield self._now

    def now(self, what: str) -> None:
        """Says what is done now."""
        self._now.plain = what

    def show(self, done: int, total: int, what: str) -> None:
        """An `on_progress` for `kvjax.evaluation.compare`."""
        if not self.task_ids:
            self.add_task("", total=total, completed=done)
        self.update(self.task_ids[0], completed=done)
        self.now(what)
