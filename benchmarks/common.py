"""Options, times, memory of layers, and JSON files with device and versions, for benchmarks."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from kvjax.evaluation.speed.machine import environment
from kvjax.generation import prompt_pass

OPTIONS = {
    "model": "folder or GGUF file of the model",
    "data": "file of questions in SQuAD's format",
    "out": "file or folder to write to",
    "cells": "file of the rows; the result's name and .cells.json",
}


def parser_of(doc: str | None, *options: str) -> argparse.ArgumentParser:
    """Makes the parser of a module with this docstring, which requires all options but `cells`."""
    parser = argparse.ArgumentParser(description=str(doc).splitlines()[0])
    for name in options:
        parser.add_argument(f"--{name}", required=name != "cells", help=OPTIONS[name])
    return parser


def interleaved_medians(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each side. All sides run once per round, so that drift hits them alike."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():  # compile and warm up
        jax.block_until_ready(side())
    for _ in range(rounds):
        for name, side in sides.items():
            start = time.perf_counter()
            jax.block_until_ready(side())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in times.items()}


def watch_layers() -> list[tuple[int, int]]:
    """Notes what XLA says of each compiled function that reads prompts through a layer.

    Returns:
      Bytes of temporary memory and of outputs, one pair more for each that is compiled from now on.
    """
    sizes, read_layer = [], prompt_pass._read_layer

    class Watched:
        """The compiled function of a layer, whose memory is noted when it is compiled."""

        trace = read_layer.trace

        def lower(self, *args: Any) -> Any:
            lowered = read_layer.lower(*args)
            memory = lowered.compile().memory_analysis()
            sizes.append((memory.temp_size_in_bytes, memory.output_size_in_bytes))
            return lowered

        def __call__(self, *args: Any) -> Any:
            return read_layer(*args)

    prompt_pass._read_layer = Watched()
    return sizes


def save(path: str | None, result: dict[str, object]) -> str:
    """Writes a result where asked, and returns its text."""
    text = json.dumps({"environment": environment(), **result}, indent=2)
    if path is not None:
        Path(path).write_text(text + "\n")
    return text


def write(path: str | None, result: dict[str, object]) -> None:
    """Prints a result, and writes it where asked."""
    print(save(path, result))


class Rows:
    """Rows of a result, each written as it comes, so that a run that was stopped goes on.

    Args:
      path: the JSON file; rows that it has are kept if the rest is as given.
      about: what else stands in it.
    """

    def __init__(self, path: str, about: dict[str, object]) -> None:
        self.path, self.about, self.rows = path, about, []
        if Path(path).exists():
            found = json.loads(Path(path).read_text())
            self.rows = found.pop("rows")
            found.pop("environment")
            if found != json.loads(json.dumps(about)):
                raise ValueError(f"{path} has rows of another run: {found}")

    @classmethod
    def of(cls, args: argparse.Namespace, about: dict[str, object]) -> Rows:
        """Returns the rows of a run, which are in `--cells`, or in a file beside its result."""
        return cls(args.cells or f"{args.out.removesuffix('.json')}.cells.json", about)

    def has(self, **key: object) -> bool:
        """Whether there is a row with these entries."""
        return any(all(row.get(name) == x for name, x in key.items()) for row in self.rows)

    def add(self, **row: object) -> None:
        """Prints a row and writes all."""
        print(json.dumps(row), flush=True)
        self.rows.append(row)
        save(self.path, {**self.about, "rows": self.rows})
