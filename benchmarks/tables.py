"""Tables of the pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    rule = "|" + "---|" * len(headings)
    return "\n".join(
        ["| " + " | ".join(headings) + " |", rule] + [f"| {' | '.join(row)} |" for row in rows]
    )
