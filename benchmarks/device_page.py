"""Tables of what `device.py` has measured: for its own page, and for `docs/guides/gpu.md`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from device_entries import Entry, entries
from device_record import FOLDER, STATES, Row, latest, read_rows
from tables import markdown

UNKNOWN = "not measured"
LAYERS = 32
EARLIER = "kernels_h200", "kernels_h200_prompts"  # runs of kernels.py, before there were records
MEASURED_WORDS = ("done", "measured"), *((state, state) for state in STATES[1:])

RATED = "dense", "listed", "8 bits", "4 bits", "codebook"  # groups whose time is that of reading

IMPLEMENTATIONS = {
    "pallas": "attention alone, by the kernel", "jax.nn": "by XLA (`jax.nn`)", "cudnn": "by cuDNN",
}  # fmt: skip
OPERATIONS = {
    # words → group of kernels.py, operation, what else tells it from others
    "a decode step over all slots": ("dense", "decode_attention", {}),
    "over lists of 2,048 slots": ("listed", "gather_attention", {"rows": 2048}),
    "over 8 bits, int8": ("8 bits", "quantized_attention", {"form": "int8"}),
    "over 8 bits, float8": ("8 bits", "quantized_attention", {"form": "float8"}),
    "over 4 bits per token": ("4 bits", "quantized_attention", {"form": "4 bits per token"}),
    "over 4 bits per channel": ("4 bits", "quantized_attention", {"form": "4 bits per channel"}),
    "over a codebook, half of the tokens kept": ("codebook", "codebook_attention", {"kept": 0.5}),
    "choosing clusters and their slots (ClusterKV)": ("selection", "choosing", {}),
    "scores of pages (Quest)": ("selection", "page_scores", {}),
    "k-means, chunks of 1,024 tokens, 10 rounds": ("grouping", "kmeans", {}),
    "soft matching, chunks of 256 tokens": ("grouping", "soft_matching", {}),
    "comparing neighbours (KVMerger)": ("merging", "pair_cosine", {}),
    "joining 2,048 keys to anchors (KVMerger)": ("merging", "join_anchors", {}),
    "merging five neighbours": ("merging", "segment_merge", {}),
    "a greedy cover of 8,192 vectors (SpindleKV)": ("covering", "greedy_cover", {}),
}  # fmt: skip
PROMPTS = {
    "attention": ("prompt", "prompt_attention", {}),
    "attention and sums of columns (H2O)": ("prompt", "prompt_attention_and_sums", {}),
    "attention and maxima of columns (KVzip)": ("prompt", "prompt_attention_and_maxima", {}),
    "sums of columns alone": ("prompt", "column_sums", {}),
    "maxima of columns alone": ("prompt", "column_maxima", {}),
    "rows from host memory": ("host", "host_rows", {}),
}  # fmt: skip


class Known(NamedTuple):
    """What is known: all entries, and the newest row of each on each device."""

    every: Sequence[Entry]
    rows: Mapping[tuple[str, str], Row]

    def of(self, *kinds: str) -> list[Entry]:
        """Entries of some kinds."""
        return [entry for entry in self.every if entry.kind in kinds]

    def devices(self, some: Iterable[Entry]) -> list[str]:
        """Devices that have a row of one of these entries."""
        names = {entry.name for entry in some}
        return sorted({device for device, name in self.rows if name in names})

    def cell(self, device: str, entry: Entry, shown: Callable[[Row], str]) -> str:
        """What is shown of an entry's result, or why there is none."""
        row = self.rows.get((device, entry.name))
        if row is None:
            return UNKNOWN
        if row["state"] == "done":
            return shown(row["result"])
        return "failed" if row["state"] == "failed" else row["reason"].splitlines()[0]


def table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table; without any device yet, one line says so."""
    return markdown(headings, lines or [[UNKNOWN, *[""] * (len(headings) - 1)]])


def short(device: str) -> str:
    """The name of a device without its maker's."""
    return device.removeprefix("NVIDIA ")


def size(entry: Entry) -> str:
    """Tokens and rows of an entry."""
    return f"{entry.options['tokens']:,} x {entry.options['rows']}"


def rates(known: Known) -> str:
    """The best rates of each device."""
    some = known.of("rates")

    def both(result: Row) -> str:
        bandwidth, products = result["bandwidth"] / 1e12, result["products"] / 1e12
        return f"{bandwidth:.2f} TB, {products:.0f} · 10¹² operations of products"

    lines = [
        [short(device), known.cell(device, entry, both)]
        for device in known.devices(some) for entry in some
    ]  # fmt: skip
    return table(["device", "per second"], lines)


# --- whole models ---------------------------------------------------------------------------------


def steps(known: Known) -> str:
    """Steps of Llama's shape, methods as rows and sizes as columns; attention alone above them."""

    def step(result: Row) -> str:
        figures = result["step_ms"], result["tokens_per_s"], result["held_bytes"] / 1e9
        return "{:.1f} ms, {:,.0f} / s, {:.0f} GB".format(*figures)

    def attention(name: str) -> Callable[[Row], str]:
        def shown(result: Row) -> str:
            times = [x for x in result["rows"] if x["implementation"] == name
                     and x["operation"] == "decode_attention"]  # fmt: skip
            if not times or "reason" in times[0]:
                return "failed" if times else ""
            return f"{LAYERS * times[0]['microseconds'] / 1e3:.1f} ms"

        return shown

    alone = [x for x in known.of("kernels") if x.options["group"] == "dense"]
    some, lines = known.of("steps"), []
    sizes = list(dict.fromkeys(map(size, some)))
    for device in known.devices([*some, *alone]):
        for name, words in IMPLEMENTATIONS.items():
            by_size = {size(x): known.cell(device, x, attention(name)) for x in alone}
            lines.append([short(device), words, *(by_size.get(each, "") for each in sizes)])
        lines += by_method(known, device, some, sizes, step)
    return table(["device", "method", *sizes], lines)


def selections(known: Known) -> str:
    """Steps of one layer by methods that select, sizes as columns."""
    some, lines = known.of("selections"), []
    for device in known.devices(some):
        for method in dict.fromkeys(x for entry in some for x in entry.options["methods"]):

            def step(result: Row, method: str = method) -> str:
                row = next(x for x in result["rows"] if x["method"] == method)
                return f"{row['microseconds']:.0f} µs, {row['of_full']:.2f}"

            cells = [known.cell(device, entry, step) for entry in some]
            lines.append([short(device), f"`{method}`", *cells])
    return table(["device", "method", *map(size, some)], lines)


def first_tokens(known: Known) -> str:
    """First tokens of Llama's shape, methods as rows and sizes as columns."""
    some = known.of("first token")
    sizes = list(dict.fromkeys(map(size, some)))
    lines = [
        line for device in known.devices(some)
        for line in by_method(known, device, some, sizes, lambda x: f"{x['first_s']:.2f} s")
    ]  # fmt: skip
    return table(["device", "method", *sizes], lines)


def by_method(
    known: Known, device: str, some: Sequence[Entry], sizes: Sequence[str],
    shown: Callable[[Row], str],
) -> Iterator[list[str]]:  # fmt: skip
    """A row for each method."""
    found = {(x.options["method"], size(x)): known.cell(device, x, shown) for x in some}
    for method in dict.fromkeys(method for method, _ in found):
        cells = (found.get((method, each), "") for each in sizes)
        yield [short(device), f"`{method}`", *cells]


def models(known: Known) -> str:
    """Times of models with their own weights."""

    def figures(result: Row) -> str:
        first, step, cache = result["first_s"], result["step_ms"], result["cache_bytes"] / 1e6
        return f"{first:.2f} s, {step:.2f} ms, {cache:.0f} MB"

    some = known.of("model")
    lines = [
        [short(device), entry.name.partition(":")[0], f"{entry.options['tokens']:,}",
         f"`{entry.options['method']}`", known.cell(device, entry, figures)]
        for device in known.devices(some) for entry in some
    ]  # fmt: skip
    headings = ["device", "model", "tokens", "method", "first token, a step, cache"]
    return table(headings, lines)


def answers(known: Known) -> str:
    """Answers of `kvjax eval`, each method's mean score."""

    def scores(result: Row) -> str:
        found = [(x["method"], x["score"]["mean"]) for x in result["rows"]]
        return ", ".join(f"`{method}` {100 * mean:.0f} %" for method, mean in found)

    some = known.of("answers")
    lines = [
        [short(device), entry.name, known.cell(device, entry, scores)]
        for device in known.devices(some) for entry in some
    ]  # fmt: skip
    return table(["device", "task", "right"], lines)


# --- tests ----------------------------------------------------------------------------------------


def tests(known: Known) -> str:
    """Tests of each room: how many passed, which failed, and which files are open."""
    some, lines = known.of("tests"), []
    rooms = dict.fromkeys(Path(x.options["path"]).parent.as_posix() for x in some)
    for device in known.devices(some):
        for room in rooms:
            of_room = [x for x in some if x.options["path"].startswith(f"{room}/")]
            rows = {x.name: known.rows.get((device, x.name)) for x in of_room}
            results = [row["result"] for row in rows.values() if row and "result" in row]
            failed = [f"`{name}`" for result in results for name in result["failed"]]
            failed += [
                f"`{name}`: {row['reason'].splitlines()[0]}" for name, row in rows.items()
                if row and row["state"] == "failed" and "result" in row
                and not row["result"]["failed"]
            ]  # fmt: skip
            ended = sum(row is not None and row["state"] in ("done", "failed")
                        for row in rows.values())  # fmt: skip
            lines.append([
                short(device), f"`{room}`", f"{ended} of {len(of_room)}",
                f"{sum(x['passed'] for x in results):,}" if results else UNKNOWN,
                ", ".join(failed) or ("none" if results else UNKNOWN),
            ])  # fmt: skip
    return table(["device", "tests", "files run to the end", "passed", "failed"], lines)


# --- kernels --------------------------------------------------------------------------------------


def kernel_rows(known: Known, tokens: int, rows: int) -> dict[tuple, Row]:
    """(Device, group, operation, implementation) with what else tells a row → the newest row."""
    found: list[tuple[str, str, Row]] = []
    for name in EARLIER:
        result = json.loads((FOLDER.parent / f"{name}.json").read_text())
        device = result["environment"]["device"]
        found += [
            (device, row["group"], row) for row in result["results"]
            if (row["model"], row["tokens"], row["batch"]) == ("Llama-3.1-8B", tokens, rows)
        ]  # fmt: skip
    for entry in known.of("kernels"):
        options = entry.options
        if (options["tokens"], options["rows"]) == (tokens, rows):
            for (device, name), row in known.rows.items():
                if name == entry.name and row["state"] == "done":
                    found += [(device, options["group"], x) for x in row["result"]["rows"]]
    return {
        (device, group, row["operation"], row["implementation"],
         *(row.get(name) for name in ("rows", "form", "kept"))): row
        for device, group, row in found
    }  # fmt: skip


def kernels(
    known: Known, tokens: int, rows: int, operations: Mapping[str, tuple[str, str, Row]], rate: str
) -> str:
    """Times of operations by the kernel, by XLA and by cuDNN, and the kernel's rate."""
    found, lines = kernel_rows(known, tokens, rows), []
    earlier = kernel_rows(known._replace(rows={}), tokens, rows)
    for words, (group, operation, options) in operations.items():
        told = [options.get(name) for name in ("rows", "form", "kept")]
        devices = sorted({
            key[0] for key in found
            if key[1:3] == (group, operation)
            and all(y in (None, x) for x, y in zip(key[4:], told, strict=True))
        })  # fmt: skip
        for device in devices or [""]:
            by = {
                key[3]: row for key, row in found.items()
                if key[:3] == (device, group, operation)
                and all(y in (None, x) for x, y in zip(key[4:], told, strict=True))
            }  # fmt: skip
            cells = [milliseconds(by.get(name)) for name in ("pallas", "xla")]
            cells.append(milliseconds(by["cudnn"]) if "cudnn" in by else "")
            rated = rate != "bytes" or group in RATED
            cells.append(rate_of(by.get("pallas"), rate) if rated else "")
            before = [
                milliseconds(row) for key, row in earlier.items()
                if row is not by.get("pallas") and found[key] is by.get("pallas")
            ]  # fmt: skip
            lines.append([words, short(device), *cells, "".join(before)])
    headings = ["operation", "device", "kernel", "XLA", "cuDNN", f"kernel's {rate} per second"]
    headings.append("the kernel before")
    return markdown(headings, lines)


def milliseconds(row: Row | None) -> str:
    """The time of a call."""
    if row is None:
        return UNKNOWN
    if "reason" in row:
        return "failed"
    return f"{row['microseconds'] / 1e3:#.3g}".rstrip(".") + " ms"


def rate_of(row: Row | None, rate: str) -> str:
    """Bytes or operations of a call per second."""
    if row is None or "reason" in row:
        return ""
    if rate == "bytes":
        return f"{row['gigabytes_per_second'] / 1e3:.2f} TB"
    operations = row.get("teraoperations_per_second")
    return f"{operations:.0f} · 10¹²" if operations else ""


def tiles(known: Known) -> str:
    """Times with the best tiles, over those with the table's."""

    def gain(result: Row) -> str:
        pairs = zip(result["microseconds"], result["microseconds_in_table"], strict=False)
        return ", ".join(f"{best:.0f} of {now:.0f} microseconds" for best, now in pairs)

    some = known.of("tiles")
    lines = [
        [short(device), f"`{entry.options['operation']}`", known.cell(device, entry, gain)]
        for device in known.devices(some) for entry in some
    ]  # fmt: skip
    return table(["device", "operation", "best tile's time, of the table's tile"], lines)


# --- pages ----------------------------------------------------------------------------------------

TABLES: dict[str, tuple[str, Callable[[Known], str]]] = {
    "device_rates": ("Best rates of the device.", rates),
    "device_steps": (
        "Decode steps of Llama-3.1-8B's shape, random weights, bfloat16: milliseconds, tokens per "
        "second, weights and caches on the device. Attention alone is that of 32 layers.", steps,
    ),
    "device_selections": (
        "A step of one layer of Llama-3.1-8B's shape: microseconds, and the share of the full "
        "cache's.", selections,
    ),
    "device_first_tokens": ("First tokens of Llama-3.1-8B's shape.", first_tokens),
    "device_tests": ("Tests with kernels that are chosen by themselves.", tests),
    "device_models": ("Models with their own weights.", models),
    "device_kernels": (
        "A layer of Llama-3.1-8B, 8 rows of 131,072 tokens.",
        lambda known: kernels(known, 131_072, 8, OPERATIONS, "bytes"),
    ),
    "device_prompt_kernels": (
        "A layer of Llama-3.1-8B, a prompt of 8,192 tokens in one row.",
        lambda known: kernels(known, 8192, 1, PROMPTS, "operations"),
    ),
    "device_tiles": ("Tile sizes.", tiles),
    "device_answers": ("Answers.", answers),
}  # fmt: skip
"""Name of a table → what it shows, and what makes it."""


def device_tables(folder: Path = FOLDER, every: Sequence[Entry] = ()) -> dict[str, str]:
    """All tables, of a folder's records."""
    known = Known(every or entries(tiny=False), latest(read_rows(folder)))
    return {name: make(known) for name, (_, make) in TABLES.items()}


def write_page(folder: Path, every: Sequence[Entry]) -> None:
    """Writes the page of a folder's records: its tables, and what is known of each entry."""
    rows = latest(read_rows(folder))
    made = device_tables(folder, every)
    lines = ["# What was measured on devices", "", "`make device` writes this page.", ""]
    for name, (title, _) in TABLES.items():
        lines += [f"## {title.partition(':')[0].rstrip('.')}", "", title, "", made[name], ""]
    for device in sorted({device for device, _ in rows}):
        lines += [f"## State of all entries: {device}", ""]
        for state, words in MEASURED_WORDS:
            some = [x for x in every if rows.get((device, x.name), {}).get("state") == state]
            lines += [f"**{words.capitalize()}**: {len(some)}", ""]
            if state != "done":
                lines += [f"- {told(x, rows[device, x.name])}" for x in some] + [""] * bool(some)
        never = [x for x in every if (device, x.name) not in rows]
        lines += [f"**Not tried**: {len(never)}", ""]
        lines += [f"- {entry.name}" for entry in never] + [""] * bool(never)
    page = folder / "README.md"
    temporary = page.with_suffix(".part")
    temporary.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    os.replace(temporary, page)


def told(entry: Entry, row: dict[str, Any]) -> str:
    """An entry that was not measured, and the last line of the reason."""
    return f"{entry.name}: {row['reason'].strip().splitlines()[-1]}"
