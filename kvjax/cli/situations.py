"""Which method to take in which situation: for `kvjax methods` and for README.md's table."""

from __future__ import annotations

from kvjax.protocol import Situation
from kvjax.registry import METHODS, STORAGE, WRAPPERS

SITUATIONS: dict[Situation | None, str] = {
    "now": "The question ends the prompt, and everything else may go.",
    "later": "The question comes later, and every token has to stay.",
    "document": "A document is read once and asked about later, and most tokens may go.",
    "lossless": "Memory is short, and no token may be lost.",
    "endless": "The model writes much, or the text has no end.",
    "sentences": "Sentences are asked for, and no numbers; the question is in the prompt.",
    "baseline": "Others are compared with it.",
    "composed": "Methods have to be composed.",
    None: "Registered here.",
}
"""When to take a method, by what its card says."""


def methods_for(situation: Situation | None) -> list[str]:
    """Returns the names of methods and of compositions to take in a situation."""
    composed = ["chain"] if situation == "composed" else []
    known = METHODS | WRAPPERS | STORAGE
    return composed + [name for name, method in known.items() if method.card.when == situation]


def examples_for(situation: Situation | None) -> list[str]:
    """Returns options of `kvjax generate` for a situation, from the cards of its methods."""
    known = METHODS | WRAPPERS | STORAGE
    names = (name for name in methods_for(situation) if name in known)
    return [example for name in names for example in known[name].card.examples]


def page(name: str) -> str | None:
    """Returns the place of a method's page in the repository; None for a method of one's own.

    Example:
      >>> from kvjax.cli.situations import page
      >>> page("snapkv"), page("every")
      ('docs/methods/snapkv.md', 'docs/guides/composing.md')
    """
    if name in ("chain", "every", "when_full"):
        return "docs/guides/composing.md"
    method = (METHODS | WRAPPERS | STORAGE)[name]
    return f"docs/methods/{name}.md" if method.__module__.startswith("kvjax.") else None
