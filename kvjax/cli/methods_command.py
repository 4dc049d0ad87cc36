"""`kvjax methods`: lists all registered methods by situation, or describes one of them."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvjax.cli.situations import SITUATIONS, examples_for, methods_for, page
from kvjax.compose.chain import chain
from kvjax.messages import brief, did_you_mean
from kvjax.protocol import KVTransform
from kvjax.registry import METHODS, STORAGE, WRAPPERS

DESCRIPTION = """\
Lists the methods of compression by the situation in which to take them, or says
what a method does: its parameters, its page and its paper."""
EXAMPLES = """\
examples:
  kvjax methods
  kvjax methods snapkv"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="a method, or chain (default: all)")


def run(args: argparse.Namespace) -> None:
    """Runs `kvjax methods`: prints a list or a method, or one JSON object."""
    console = Console(highlight=False)
    if args.name is not None:
        description = _one(args.name)
        if args.json:
            print(json.dumps(description))
        else:
            _show(console, description)
        return
    registries = {"methods": METHODS, "wrappers": WRAPPERS, "storage": STORAGE}
    descriptions = {
        heading: {name: _description(method) for name, method in registry.items()}
        for heading, registry in registries.items()
    }
    if args.json:
        print(json.dumps(descriptions))
    else:
        _show_all(console)


def _description(method: type[KVTransform]) -> dict[str, Any]:
    """Describes a method as `--json` prints it; a parameter without `default` is required."""
    meanings = _arguments(inspect.getdoc(method) or "")
    parameters = [
        {"name": field.name, "about": meanings.get(field.name, "")}
        | ({} if field.default is dataclasses.MISSING else {"default": field.default})
        for field in dataclasses.fields(method)
    ]
    return {"parameters": parameters, "summary": _summary(method), "paper": method.card.paper}


def _one(name: str) -> dict[str, Any]:
    """Describes a method or a composition by name.

    Raises:
      ValueError: there is none of this name.
    """
    known = METHODS | WRAPPERS | STORAGE
    if name == "chain":
        about = {"name": name, "when": SITUATIONS["composed"], "page": page(name)}
        return {**about, "parameters": [], "summary": _summary(chain), "paper": ""}
    if name not in known:
        names = (*known, "chain")
        raise ValueError(
            f"there is no method {brief(name)}{did_you_mean(name.partition('(')[0], names)} "
            "(see kvjax methods)"
        )
    about = {"name": name, "when": SITUATIONS[known[name].card.when], "page": page(name)}
    return {**about, **_description(known[name])}


def _summary(method: object) -> str:
    """Returns the first line of a docstring."""
    return (inspect.getdoc(method) or "").partition("\n")[0].replace("`", "")


def _arguments(doc: str) -> dict[str, str]:
    """Returns the meaning of each argument in a docstring.

    Example:
      >>> from kvjax.cli.methods_command import _arguments
      >>> _arguments("Does.\\n\\nArgs:\\n  a, b: two\\n    numbers.\\n\\nRaises:\\n  c: no.")
      {'a': 'two numbers.', 'b': 'two numbers.'}
    """
    section = re.search(r"(?ms)^Args:\n(.*?)(?=^\S|\Z)", doc)
    meanings = {}
    for entry in re.split(r"(?m)^  (?=\S)", section[1] if section else "")[1:]:
        names, _, meaning = entry.partition(": ")
        for name in names.split(", "):
            meanings[name] = " ".join(meaning.replace("`", "").split())
    return meanings


def _show_all(console: Console) -> None:
    """Prints which method to take, and all names with what they do."""
    known = METHODS | WRAPPERS | STORAGE | {"chain": chain}
    width = max(map(len, known)) + 2
    for situation, heading in SITUATIONS.items():
        names = methods_for(situation)
        if not names:
            continue
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(width=width)
        table.add_column(overflow="fold")
        for name in names:
            table.add_row(Text(f"  {name}"), Text(_summary(known[name])))
        console.print(Text(heading, style="bold"))
        for example in examples_for(situation):
            line = Text(f"kvjax generate {example}", style="green")
            console.print(Padding(line, (0, 0, 0, 2)))
        console.print(table)
        console.print()
    console.print(
        "kvjax methods NAME has parameters, page and paper. A budget is a number of slots per "
        "KV head (256) or a share of the prompt (0.2). kvjax.register and --import MODULE add "
        "methods of your own.",
        markup=False,
    )


def _show(console: Console, description: Mapping[str, Any]) -> None:
    """Prints what is known of a method."""
    name = description["name"]
    console.print(Text(name, style="bold"))
    console.print(Text(description["summary"]))
    if description["when"]:
        console.print(Text(f"\nWhen: {description['when']}"))
    named = re.compile(rf"\b{name}\b")
    for example in (each for situation in SITUATIONS for each in examples_for(situation)):
        if named.search(example):
            console.print(Text(f"kvjax generate {example}", style="green"))
    for parameter in description["parameters"]:
        console.print(Text(f"\n{_parameter(parameter)}", style="bold"))
        console.print(Padding(Text(parameter["about"], overflow="fold"), (0, 0, 0, 2)))
    console.print()
    for label in ("page", "paper"):
        if description[label]:
            console.print(Text(f"{label}: {description[label]}", style="dim"))


def _parameter(parameter: Mapping[str, Any]) -> str:
    """Formats a parameter: `"window=16"`, its name if required, "method" for a wrapper's base."""
    name = parameter["name"]
    if name == "base":
        return "METHOD"
    return f"{name}={parameter['default']!r}" if "default" in parameter else name
