"""Writes text that the model never saw: `python -m kvjax.models.demo.training.held_out FILE`.

The bundled `held_out.txt` comes from Python 3.11.7.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .corpus import python_documents, split_documents


def held_out_text() -> str:
    """The held-out documents, without the paragraphs that stand in a training document too."""
    training, held_out = split_documents(python_documents())
    seen = {""} | {paragraph.strip() for text in training for paragraph in text.split("\n\n")}
    paragraphs = (paragraph for text in held_out for paragraph in text.split("\n\n"))
    kept = (paragraph for paragraph in paragraphs if paragraph.strip() not in seen)
    return "\n\n".join(kept) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m kvjax.models.demo.training.held_out",
        description="Writes the held-out text.",
    )
    parser.add_argument("file", type=Path)
    parser.parse_args().file.write_text(held_out_text(), encoding="utf-8")
