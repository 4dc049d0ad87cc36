"""Which method to take in which situation: for `kvjax methods` and for README.md's table."""

from __future__ import annotations

from kvjax.protocol import Situation
from kvjax.registry import METHODS, STORAGE, WRAPPERS

SITUATIONS = {
    "The question is in the prompt, and everything else may go.":
        "--method snapkv --budget 0.5",
    "The question comes later, or there are many.":
        "--method clusterkv --budget 0.1",
    "It comes later, and memory is short.":
        '--method "chain(quantize, clusterkv)" --budget 0.2',
    "It comes later, and the host has memory.":
        '--method "chain(clusterkv, offload)" --budget 0.1',
    "A document is read once and asked about later, and little of it may be kept.":
        '--method "by_head(chain(own_queries, quantize(bits=4, group=64)))" --budget 0.19',
    "Memory is short, and no token may be lost: the highest fidelity.":
        "--method quantize",
    "The text has no end.":
        "--method streaming_llm --budget 1024",
}  # fmt: skip
"""Options of `kvjax generate` by situation. README.md's table has them with what they find."""


HEADINGS: dict[Situation | None, str] = {
    "lossless": "Memory is short, and no token may be lost.",
    "later": "The question comes later, and every token has to stay.",
    "document": "A document is read once and asked about later, and most tokens may go.",
    "now": "The question ends the prompt, and everything else may go.",
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
