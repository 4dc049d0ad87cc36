"""`kvjax methods`: lists all registered methods."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.text import Text

from kvjax.protocol import KVTransform
from kvjax.registry import METHODS, STORAGE, WRAPPERS

DESCRIPTION = "Lists the methods of compression with their parameters and papers."
EXAMPLES = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds nothing: the command has no options of its own."""


def run(args: argparse.Namespace) -> None:
    """Runs `kvjax methods`: prints a list, or one JSON object."""
    registries = {"methods": METHODS, "wrappers": WRAPPERS, "storage": STORAGE}
    descriptions = {
        heading: {name: _description(method) for name, method in registry.items()}
        for heading, registry in registries.items()
    }
    if args.json:
        print(json.dumps(descriptions))
        return
    console = Console(highlight=False)
    for heading, methods in descriptions.items():
        console.print(Padding(Text(heading, style="underline"), (1, 0)))
        for name, method in methods.items():
            console.print(Text(name, style="bold"))
            parameters = ", ".join(map(_parameter, method["parameters"])) or "-"
            about = Text(method["summary"], overflow="fold")
            if method["paper"]:
                about.append(f"\n{method['paper']}", style="dim")
            details = Group(Text(parameters, overflow="fold"), about)
            console.print(Padding(details, (0, 0, 1, 2)))
    console.print(
        "budget: slots per KV head (256), or a share of the prompt (0.2).\n"
        "Compositions: chain(snapkv(window=16), h2o(budget=64)), every(snapkv, steps=64),\n"
        "chain(snapkv, quantize(bits=4)), chain(clusterkv, offload).\n"
        "A method of your own: kvjax.register, and --import MODULE.",
        markup=False,
    )


def _description(method: type[KVTransform]) -> dict[str, Any]:
    """Describes a method as `--json` prints it; a parameter without `default` is required."""
    parameters = [
        {"name": field.name}
        | ({} if field.default is dataclasses.MISSING else {"default": field.default})
        for field in dataclasses.fields(method)
    ]
    summary = (inspect.getdoc(method) or "").partition("\n")[0].replace("`", "")
    return {"parameters": parameters, "summary": summary, "paper": method.paper}


def _parameter(parameter: Mapping[str, Any]) -> str:
    """Formats a parameter: `"window=16"`, its name if required, "method" for a wrapper's base."""
    name = parameter["name"]
    if name == "base":
        return "method"
    return f"{name}={parameter['default']!r}" if "default" in parameter else name
