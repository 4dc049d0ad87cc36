"""The bundled model: a small Llama that retrieves, in a Hugging Face folder of its own.

See the model card, `README.md` in this folder; `training/train.py` made it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

__all__ = ["Document", "directory", "document", "held_out_text"]


class Document(NamedTuple):
    """A long text with one answer in it.

    Args:
      text: the document.
      question: what follows the document in a prompt; the answer is begun at its end.
      answer: the digits that come next.
    """

    text: str
    question: str
    answer: str


def directory() -> Path:
    """The Hugging Face folder, for `kvjax.models.from_pretrained` or `transformers`.

    Example:
      >>> from kvjax.models import demo, from_pretrained
      >>> from_pretrained(demo.directory()).num_layers
      4
    """
    return Path(__file__).parent


def document() -> Document:
    """A document of about 4,000 tokens, and a question.

    Example:
      >>> from kvjax.models import demo
      >>> demo.document().question.splitlines()[2]
      'Question: What is the code of the orange lobster?'
    """
    asked = json.loads((directory() / "document.json").read_text(encoding="utf-8"))
    text = (directory() / "document.txt").read_text(encoding="utf-8")
    return Document(text, asked["question"], asked["answer"])


def held_out_text() -> str:
    """Text that the model was not trained on: help topics and docstrings of Python 3.11."""
    return (directory() / "held_out.txt").read_text(encoding="utf-8")
