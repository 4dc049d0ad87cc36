"""`kvjax methods`: lists every method that has a name."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from rich.console import Console

import kvjax
from kvjax.cli.terminal import listing, summary
from kvjax.registry import METHODS, STORAGE, WRAPPERS


def methods(args: argparse.Namespace) -> None:
    """`kvjax methods`: a table, or one JSON object."""
    if args.json:
        kinds = {"methods": METHODS, "wrappers": WRAPPERS, "storage": STORAGE}
        described = {part: _describe(names) for part, names in kinds.items()}
        sys.stdout.write(json.dumps(described) + "\n")
        return
    console = Console(highlight=False)
    width = console.width, max(map(len, METHODS | WRAPPERS | STORAGE))
    console.print(listing(METHODS, "method", *width))
    console.print(listing(WRAPPERS, "wrapper", *width))
    console.print(listing(STORAGE, "storage", *width))
    console.print(
        "budget: slots per KV head (256), or a share of the prompt (0.2).\n"
        "Compositions: chain(snapkv(window=16), h2o(budget=64)), every(snapkv, steps=64),\n"
        "chain(snapkv, quantize(bits=4)), chain(clusterkv, offload).\n"
        "A method of your own: kvjax.register, and --import MODULE.",
        markup=False,
    )


def _describe(kinds: dict[str, type[kvjax.KVTransform]]) -> dict[str, Any]:
    """Methods as JSON: a parameter without `default` is required."""

    def parameter(field: dataclasses.Field) -> dict[str, Any]:
        required = field.default is dataclasses.MISSING
        return {"name": field.name} | ({} if required else {"default": field.default})

    return {
        name: {
            "parameters": [parameter(field) for field in dataclasses.fields(kind)],
            "summary": summary(kind),
            "paper": kind.paper,
        }
        for name, kind in kinds.items()
    }
