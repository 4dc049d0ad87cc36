"""`kvjax plan`: bytes that devices will hold, and requests that fit, from shapes alone."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console

import kvjax
from kvjax.checks import check_count, check_number
from kvjax.cli import options
from kvjax.cli.sizes import Whole
from kvjax.cli.tables import Row, name_column, number_column, print_table
from kvjax.generation.planning import (
    Plan,
    abstract_mesh,
    bytes_on_device,
    plan,
    whole_plans,
)
from kvjax.messages import brief, did_you_mean

GB = 10**9
MEMORY, BANDWIDTH = 80.0, 3350.0  # GB and GB/s, of an NVIDIA H100 SXM with 80 GB
METHODS = ("full", "snapkv")
_MOST_TOKENS = 131072  # of the default of --tokens
_AXES = ("data", "tensor")

DESCRIPTION = """\
Places a model and its caches on devices that need not be there, and says what
each holds: weights, caches by method, how many requests fit, and the least time
of a decode step by the bytes that it moves. No weights are read."""
EXAMPLES = """\
examples:
  kvjax plan --model llama-3.1-8b
  kvjax plan --model llama-3.1-70b --mesh tensor=8 --batch 1,8,32
  kvjax plan --model DIR --mesh data=8,tensor=8 --tokens 32768
      --method 'full, snapkv, chain(snapkv, quantize(bits=4))' --budget 0.2
  kvjax plan --model DIR --tokens 4096 --method full --bytes 0.5,0.25,0.06"""
ARGUMENTS = {"max_prompt": "--tokens", "max_new": "--new"}
"""Options by the library's names of their arguments."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add = parser.add_argument
    add("--model", metavar="DIR_OR_SHAPE", required=True,
        help="folder with config.json, a config.json, a GGUF file, or a name such as "
        "llama-3.1-8b or smollm2")  # fmt: skip
    add("--mesh", metavar="SIZES", type=mesh_sizes, default={"tensor": 1},
        help="devices that divide rows (data) and heads (tensor), as data=2,tensor=4 (default: "
        "one device)")  # fmt: skip
    add("--memory", metavar="GB", type=float, default=MEMORY,
        help="memory of each device (default: 80)")  # fmt: skip
    add("--bandwidth", metavar="GB/S", type=float, default=BANDWIDTH,
        help="bandwidth of each device's memory (default: 3350, an H100 SXM's)")  # fmt: skip
    add("--tokens", metavar="N", type=int,
        help="tokens of a request's prompt (default: 131072, or as many as the model's "
        "positions leave)")  # fmt: skip
    add("--new", metavar="N", type=int, default=512, help="new tokens (default: 512)")
    options.add_list(parser, "--batch", value_type=options.number_list, default=(1, 8, 32),
        about="requests at a time")  # fmt: skip
    options.add_methods(parser, METHODS, full=False)
    options.add_budget(parser)
    options.add_list(parser, "--bytes", value_type=options.number_list, default=(),
        metavar="SHARES",
        about="also the compositions of kvjax.smallest for these shares of the bytes of the full "
        "cache in bfloat16, such as 0.06,0.3")  # fmt: skip
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
        help="of weights, keys and values (default: bfloat16)")  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Runs `kvjax plan`: prints a table, or one JSON object."""
    # Imported here: kvjax works without kvjax.models, and help is faster without its imports.
    from kvjax.models import abstract_decoder
    from kvjax.models.shapes import shape_config

    for name in ("memory", "bandwidth"):
        check_number(name, getattr(args, name), above=0)
    for requests in args.batch:
        check_count("batch", requests, 1)
    methods = {text: kvjax.parse(text, args.budget) for text in args.methods}
    config = shape_config(args.model)
    for share in args.bytes:
        small = kvjax.smallest(share, head_dim=config.head_dim)
        methods[kvjax.unparse(small)] = small
    if args.tokens is None:
        left = max(config.max_positions - args.new, 1)  # `plan` refuses what is too much
        args.tokens = min(_MOST_TOKENS, left)
    mesh = abstract_mesh(args.mesh.items())
    model = abstract_decoder(config, dtype=args.dtype, mesh=mesh)
    looked_up = looked_up_bytes(model)
    sizes = {"max_prompt": args.tokens, "max_new": args.new, "dtype": args.dtype, "mesh": mesh}
    plans = {
        text: plan(model, method, **sizes, looked_up=looked_up) for text, method in methods.items()
    }
    others = list(whole_plans(model, **sizes))
    wholes = {text: Whole.instead_of(planned, others) for text, planned in plans.items()}
    record = _record(args, plans, config.max_positions)
    for text, whole in wholes.items():
        record["methods"][text]["whole"] = None if whole is None else whole._asdict()
    if args.json:
        print(json.dumps(record))
        return
    _show(Console(highlight=False), args, record)


def looked_up_bytes(model: Any) -> int:
    """Returns the bytes per device of weights from which a decode step takes a few rows.

    They are those of the embedding of a `kvjax.models.Decoder`. If the embedding is tied, the
    result is 0, as the logits need all of it.
    """
    if model.config.tie_embeddings:
        return 0
    return bytes_on_device(model.embed.embedding.get_value())


def mesh_sizes(text: str) -> dict[str, int]:
    """Parses the axes of a mesh and their sizes, such as `data=2,tensor=4`.

    Example:
      >>> from kvjax.cli.plan_command import mesh_sizes
      >>> mesh_sizes("data=2,tensor=4")
      {'data': 2, 'tensor': 4}
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        known = name in _AXES and name not in sizes
        if not known or not size.isascii() or not size.isdigit() or not 0 < int(size[:9]) < 2**20:
            raise argparse.ArgumentTypeError(
                f"must be the sizes of data and tensor, as data=2,tensor=4, got {brief(text)}"
                f"{did_you_mean(name, _AXES) if name not in _AXES else ''}"
            )
        sizes[name] = int(size)
    return sizes


def _record(args: argparse.Namespace, plans: dict[str, Plan], positions: int) -> dict[str, Any]:
    """Returns the record that `--json` prints; bytes are per device."""
    memory, second = args.memory * GB, args.bandwidth * GB
    first = next(iter(plans.values()))
    methods = {}
    for text, planned in plans.items():
        batches = [
            {
                "requests": requests,
                "bytes": planned.held(requests),
                "fits": planned.held(requests) <= memory,
                "step_bytes": planned.step_bytes(requests),
                "step_s": planned.step_bytes(requests) / second,
            }
            for requests in args.batch
        ]
        methods[text] = {
            "request_bytes": round(planned.request.device),
            "request_host_bytes": round(planned.request.host),
            "request_room_bytes": round(planned.request.room),
            "kept_slots": planned.occupancy.kept_slots,
            "room_slots": planned.occupancy.room_slots,
            "fixed_bytes": round(planned.fixed.device),
            "requests_that_fit": planned.fits(memory),
            "batches": batches,
        }
    return {
        "model": args.model,
        "dtype": args.dtype,
        "mesh": args.mesh,
        "devices": first.devices,
        "memory_bytes": memory,
        "bandwidth_bytes_per_s": second,
        "tokens": args.tokens,
        "new": args.new,
        "positions": positions,
        "weight_bytes": first.weights,
        "methods": methods,
    }


def _show(console: Console, args: argparse.Namespace, record: dict[str, Any]) -> None:
    axes = ", ".join(f"{name} {size}" for name, size in args.mesh.items())
    fits = "fit" if record["weight_bytes"] <= record["memory_bytes"] else "do not fit"
    console.print(
        f"{args.model} in {args.dtype}, {record['devices']} x {args.memory:g} GB "
        f"({axes}): weights take {record['weight_bytes'] / GB:.2f} GB of each device and {fits}.\n"
        f"Requests of {args.tokens:,} tokens and {args.new:,} new ones; GB are 10^9 bytes.",
        markup=False,
    )
    hosted = any(method["request_host_bytes"] for method in record["methods"].values())
    headings = ["GB per request\nand device", *["and in host\nmemory"] * hosted]
    headings += ["of it\nroom", "slots per head\nkept + room", "requests\nthat fit"]
    headings += [f"step of {requests}\nms (GB held)" for requests in args.batch]
    rows = []
    for text, method in record["methods"].items():
        row = [text, f"{method['request_bytes'] / GB:.3f}"]
        if hosted:
            row.append(f"{method['request_host_bytes'] / GB:.3f}")
        row.append(f"{method['request_room_bytes'] / GB:.3f}")
        row.append(f"{method['kept_slots']:,.0f} + {method['room_slots']:,.0f}")
        row.append(f"{method['requests_that_fit']:,}")
        for batch in method["batches"]:
            time = f"{batch['step_s'] * 1e3:.2f}" if batch["fits"] else "-"
            row.append(f"{time} ({batch['bytes'] / GB:.1f})")
        rows.append(Row(row))
    columns = [name_column(), *map(number_column, headings)]
    print_table(console, columns, rows, pad_edge=False)
    console.print(
        f"A step takes no less than its bytes at {args.bandwidth:g} GB/s: weights and caches read "
        "once.\n- : does not fit. Room is for new tokens and later prompts: a context at rest, as "
        "kvjax read saves it, takes the other bytes. Activations and temporary memory are not "
        "counted.",
        markup=False,
    )
    for text, method in record["methods"].items():
        if method["whole"] is not None:
            console.print(Whole(**method["whole"]).line(text), markup=False)
