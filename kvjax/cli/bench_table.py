"""Tables of `kvjax bench` in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.filesize import decimal

from kvjax.cli.tables import Row, name_column, number_column, print_table
from kvjax.messages import printable


def print_report(console: Console, record: Mapping[str, Any]) -> None:
    """Prints the setting, a table of times, a table of bytes, and the meaning of their columns.

    Args:
      console: console to print to.
      record: the object that `--json` prints.
    """
    layers = f"{record['layers']} layers"
    if record["layers"] < record["model_layers"]:
        layers = f"{record['layers']} of {record['model_layers']} layers"
    weights = "random weights" if record["random_weights"] else "weights"
    budget = next((row["budget"] for row in record["results"] if row["budget"] is not None), None)
    console.print(
        f"{printable(record['model'])}, {layers}, {weights} of "
        f"{decimal(record['weight_bytes'])} in {record['dtype']}; "
        f"{record['prompt_tokens']:,} tokens a row and {record['new_tokens']:,} new ones"
        f"{'' if budget is None else f', budget {budget}'}.\n"
        f"The machine reads {decimal(round(record['bandwidth_bytes_per_s']))} per second and makes "
        f"{record['products_per_s'] / 1e9:,.0f} Gflop/s of products.",
        markup=False,
    )
    rows = record["results"]
    hosted = any(row["host_bytes"] for row in rows)
    _print_table(console, rows, [_times(row) for row in rows])
    _print_table(console, rows, [_bytes(row, hosted) for row in rows])
    console.print(
        f"Times are those of the fastest of {record['rounds']} rounds, of which the slowest took "
        f"up to {_spread(rows):.1f} times as long; of full: divided by the full cache's. A step "
        "writes a token of every row. Floors: the products of a prompt pass with the full cache "
        "at the machine's rate, and the weights and caches that a step reads at its bandwidth. "
        "resident: weights and caches on the device. peak: with all that was needed beside them "
        "at most, - where that is not known.",
        style="dim", markup=False,
    )  # fmt: skip


def _print_table(
    console: Console,
    rows: Sequence[Mapping[str, Any]],
    cells: Sequence[Sequence[tuple[str, str]]],
) -> None:
    """Prints a line per batch and method; `cells` are pairs of a heading and a value."""
    columns = [name_column(style="bold"), number_column("batch")]
    columns += [number_column(heading) for heading, _ in cells[0]]
    lines = [
        Row([printable(row["method"]), str(row["batch"]), *(value for _, value in row_cells)])
        for row, row_cells in zip(rows, cells, strict=True)
    ]
    print_table(console, columns, lines, names=2, section=1, pad_edge=False)


def _times(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    ms = 1e3
    return [
        ("first\ntoken s", _number(row["ttft_s"])),
        ("of\nfull", f"{row['ttft_over_full']:.2f}"),
        ("floor\ns", _number(row["ttft_floor_s"])),
        ("step\nms", _number(ms * row["tpot_s"])),
        ("of\nfull", f"{row['tpot_over_full']:.2f}"),
        ("floor\nms", _number(ms * row["step_floor_s"])),
        ("tokens\nper s", _number(row["tokens_per_s"])),
    ]


def _bytes(row: Mapping[str, Any], hosted: bool) -> list[tuple[str, str]]:
    peak = row["peak_bytes"]
    cells = [
        ("compiled\nin s", _number(row["compile_s"])),
        ("cache", decimal(row["cache_bytes"])),
        ("of\nfull", f"{row['cache_bytes'] / row['full_cache_bytes']:.1%}"),
        ("in host\nmemory", decimal(row["host_bytes"])),
        ("resident", decimal(row["resident_bytes"])),
        ("peak", "-" if peak is None else decimal(peak)),
    ]
    return [cell for cell in cells if hosted or not cell[0].startswith("in host")]


def _spread(rows: Sequence[Mapping[str, Any]]) -> float:
    """Returns the largest ratio of the slowest to the fastest round."""
    times = (row[name] for row in rows for name in ("ttft_rounds_s", "tpot_rounds_s"))
    return max(max(rounds) / min(rounds) for rounds in times)


def _number(value: float | None) -> str:
    """Formats a number with at least three digits; "-" for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
