"""The bundled model: a small Llama that retrieves, in its own Hugging Face folder.

`README.md` in this folder is the model card. The model was made by `training/train.py`.
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
      question: text after the document in a prompt; it ends with the beginning of the answer.
      answer: the digits that come next.
    """

    text: str
    question: str
    answer: str


def directory() -> Path:
    """Returns the Hugging Face folder, for `kvjax.models.from_pretrained` or `transformers`.

    Example:
      >>> from kvjax.models import demo, from_pretrained
      >>> from_pretrained(demo.directory()).num_layers
      4
    """
    return Path(__file__).parent


def document() -> Document:
    """Returns a document of about 4,000 tokens, and a question.

    Example:
      >>> from kvjax.models import demo
      >>> demo.document().question.splitlines()[2]
      'Question: What is the code of the orange lobster?'
    """
    qa = json.loads((directory() / "document.json").read_text(encoding="utf-8"))
    text = (directory() / "document.txt").read_text(encoding="utf-8")
    return Document(text, qa["question"], qa["answer"])


def held_out_text() -> str:
    """Returns text that training left out: help topics and docstrings of Python 3.11."""
    return (directory() / "held_out.txt").read_text(encoding="utf-8")
