"""Which method to take in which situation: for `kvjax methods` and for README.md's table."""

from __future__ import annotations

SITUATIONS = {
    "The question is in the prompt, and everything else may go.":
        "--method snapkv --budget 0.5",
    "The question comes later, or there are many.":
        "--method clusterkv --budget 0.1",
    "The same, and memory is short.":
        '--method "chain(quantize, clusterkv)" --budget 0.2',
    "The same, and the host has memory.":
        '--method "chain(clusterkv, offload)" --budget 0.1',
    "Single facts are asked of a document that is read once, and little of it may be kept.":
        '--method "by_head(kvzip(fit=True))" --budget 0.05',
    "Memory is short, and no token may be lost: the highest fidelity.":
        "--method quantize",
    "The text has no end.":
        "--method streaming_llm --budget 1024",
}  # fmt: skip
"""Options of `kvjax generate` by situation. README.md's table has them with what they find."""

GROUPS = {
    "Memory is short, and no token may be lost.": ("quantize", "offload"),
    "The question comes later, and every token has to stay.": ("clusterkv", "quest", "infinigen"),
    "Single facts are asked later, and most tokens may go.": ("kvzip", "by_head"),
    "The question ends the prompt, and everything else may go.": (
        "snapkv", "pyramidkv", "pyramidinfer", "kvcrush", "layer_budget", "spindlekv", "codebook",
    ),
    "The model writes much, or the text has no end.": (
        "streaming_llm", "h2o", "cam", "every", "when_full",
    ),
    "The gist is enough, and single facts are not asked for.": ("chelsea", "kvmerger"),
    "Others are compared with it.": ("full",),
    "Methods have to be composed.": ("chain", "everywhere"),
}  # fmt: skip
"""Names of methods and of compositions by the situation in which to take them."""


def situation(name: str) -> str | None:
    """Returns the situation in which to take a method; None for a method of one's own."""
    return next((text for text, names in GROUPS.items() if name in names), None)


def page(name: str) -> str | None:
    """Returns the place of a method's page in the repository; None for a method of one's own.

    Example:
      >>> from kvjax.cli.situations import page
      >>> page("snapkv"), page("every")
      ('docs/methods/snapkv.md', 'docs/guides/composing.md')
    """
    if name in ("chain", "every", "when_full"):
        return "docs/guides/composing.md"
    return None if situation(name) is None else f"docs/methods/{name}.md"
