"""Lists of methods, from the classes in `kvjax/registry.py` and their cards."""

from __future__ import annotations

import inspect
import re

from tables import markdown

from kvjax.cli.situations import page
from kvjax.registry import METHODS, STORAGE, WRAPPERS

ALL = METHODS | WRAPPERS | STORAGE
ARXIV = re.compile(r"arXiv (\d{4}\.\d{5})")


def methods(folder: str) -> str:
    """The methods that have a page.

    Args:
      folder: of the pages, as a link from where the table stands.
    """
    lines = []
    for name, method in ALL.items():
        if page(name) != f"docs/methods/{name}.md":
            continue
        shown = f"{name}(BASE)" if name in WRAPPERS else name
        shown = f"chain(…, {name})" if name in STORAGE else shown
        summary = (inspect.getdoc(method) or "").partition("\n")[0].rstrip(".")
        source = method.card.paper.partition(", ")[2]
        paper = ARXIV.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", source)
        link = f"[`{shown}`]({folder}{name}.md)"
        lines.append([link, f"`{method.__qualname__}`", summary, method.card.acts, paper])
    return markdown(["name", "class", "what it does", "acts", "paper"], lines)


def imports() -> str:
    """The lines of `kvjax/__init__.pyi` that make the methods public."""
    places = sorted((method.__module__, method.__qualname__) for method in ALL.values())
    return "\n".join(
        f"from {place.removeprefix('kvjax')} import {name} as {name}" for place, name in places
    )


def papers(by_hand: str) -> str:
    """The papers of methods for CITATION.cff, as docstrings refer to them.

    Args:
      by_hand: the entries that are written by hand, whose papers are left out.
    """
    methods_of: dict[str, list[type]] = {}
    for method in ALL.values():
        source = method.card.paper.partition(", ")[2]
        if source and source.replace(" ", ":") not in by_hand:
            methods_of.setdefault(source, []).append(method)
    entries = []
    for source, methods in methods_of.items():
        references = " ".join((inspect.getdoc(methods[0]) or "").split())
        reference = re.findall(rf"(\w+) et al\., ([^.]+?), [^.]*{source}", references)
        author, title = reference[0]
        number = ARXIV.fullmatch(source)
        place = f"    conference:\n      name: {source}"
        if number:
            place = f'    identifiers:\n      - type: other\n        value: "arXiv:{number[1]}"'
        entries.append("\n".join([
            f"  - type: {'article' if number else 'conference-paper'}",
            f'    title: "{title}"',
            "    authors:", f"      - family-names: {author}", "      - name: others",
            f"    year: {'20' + number[1][:2] if number else source.split()[-1]}",
            place,
            f"    notes: {', '.join(method.__qualname__ for method in methods)}",
        ]))  # fmt: skip
    return "\n".join(entries)
