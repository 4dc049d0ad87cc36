"""Tables of `kvjax bench` in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.filesize import decimal

from kvjax.cli.tables import Row, name_column, number_column, print_table
from kvjax.messages import printable

# Sizes of a row's setting: heading of the column if there are several, else their words above.
_SIZES = {
    "batch": ("batch", "batch {:,}"),
    "prompt_tokens": ("tokens", "{:,} tokens a row"),
    "new_tokens": ("new", "{:,} new ones"),
}


def print_report(console: Console, record: Mapping[str, Any]) -> None:
    """Prints the setting, tables of times, floors and bytes, and the meaning of their columns.

    Args:
      console: console to print to.
      record: the object that `--json` prints.
    """
    layers = f"{record['layers']} layers"
    if record["layers"] < record["model_layers"]:
        layers = f"{record['layers']} of {record['model_layers']} layers"
    weights = "random weights" if record["random_weights"] else "weights"
    budget = next((row["budget"] for row in record["results"] if row["budget"] is not None), None)
    rows = record["results"]
    sizes = {name: {row[name] for row in rows} for name in _SIZES}
    varied = [name for name in _SIZES if len(sizes[name]) > 1]
    shared = [_SIZES[name][1].format(*sizes[name]) for name in _SIZES if name not in varied]
    shared += [] if budget is None else [f"budget {budget}"]
    console.print(
        f"{printable(record['model'])}, {layers}, {weights} of "
        f"{decimal(record['weight_bytes'])} in {record['dtype']}"
        f"{'; ' * bool(shared)}{', '.join(shared)}.\n"
        f"The machine reads {decimal(round(record['bandwidth_bytes_per_s']))} per second and makes "
        f"{record['products_per_s'] / 1e9:,.0f} Gflop/s of products.",
        markup=False,
    )
    hosted = any(row["host_bytes"] for row in rows)
    _print_table(console, rows, varied, [_times(row) for row in rows])
    _print_table(console, rows, varied, [_floors(row) for row in rows])
    _print_table(console, rows, varied, [_bytes(row, hosted) for row in rows])
    rounds = "one round"
    if record["rounds"] > 1:
        rounds = (
            f"the fastest of {record['rounds']} rounds, of which the slowest took up to "
            f"{_spread(rows):.1f} times as long"
        )
    console.print(
        f"Times are those of {rounds}; of full: divided by the full cache's. A step "
        "writes a token of every row. end to end: the prompts and all new tokens; tokens per s: "
        "new ones of all rows in that time. Floors: the products of a prompt pass with the full "
        "cache at the machine's rate, and the weights and caches that a step reads at its "
        "bandwidth; of floor: times divided by them. resident: weights and caches on the device. "
        "peak: with all that was needed beside them at most, - where that is not known.",
        style="dim", markup=False,
    )  # fmt: skip


def _print_table(
    console: Console,
    rows: Sequence[Mapping[str, Any]],
    varied: Sequence[str],
    cells: Sequence[Sequence[tuple[str, str]]],
) -> None:
    """Prints a line per setting and method.

    Args:
      varied: sizes of which there are several, which get columns.
      cells: pairs of a heading and a value, for each row.
    """
    columns = [name_column(style="bold"), *(number_column(_SIZES[name][0]) for name in varied)]
    columns += [number_column(heading) for heading, _ in cells[0]]
    lines = [
        Row([printable(row["method"]), *(f"{row[name]:,}" for name in varied),
             *(value for _, value in row_cells)])
        for row, row_cells in zip(rows, cells, strict=True)
    ]  # fmt: skip
    names = 1 + len(varied)
    print_table(console, columns, lines, names=names, section=range(1, names), pad_edge=False)


def _times(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("first\ntoken s", _number(row["ttft_s"])),
        ("of\nfull", f"{row['ttft_over_full']:.2f}"),
        ("step\nms", _number(1e3 * row["tpot_s"])),
        ("of\nfull", f"{row['tpot_over_full']:.2f}"),
        ("end to\nend s", _number(row["end_to_end_s"])),
        ("of\nfull", f"{row['end_to_end_over_full']:.2f}"),
        ("tokens\nper s", _number(row["end_to_end_tokens_per_s"])),
    ]


def _floors(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    first = row["ttft_floor_s"]
    return [
        ("prompt\nfloor s", _number(first)),
        ("of\nfloor", "-" if first is None else f"{row['ttft_s'] / first:.2f}"),
        ("step\nfloor ms", _number(1e3 * row["step_floor_s"])),
        ("of\nfloor", f"{row['tpot_s'] / row['step_floor_s']:.2f}"),
        ("compiled\nin s", _number(row["compile_s"])),
    ]


def _bytes(row: Mapping[str, Any], hosted: bool) -> list[tuple[str, str]]:
    peak = row["peak_bytes"]
    cells = [
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
