"""Small files in the format of SQuAD 2.0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ANSWERS = ("a grey heron", "a heron", "the bird")  # of which the second is the shortest
IMPOSSIBLE = "Who sank the harbour?"


def question(text: str, *answers: str) -> dict[str, Any]:
    given = [{"text": answer, "answer_start": 0} for answer in answers]
    return {"question": text, "answers": given, "is_impossible": not answers}


def paragraph(name: str) -> dict[str, Any]:
    """Two questions of which one has answers, about a text of some 90 characters."""
    asked = [question(IMPOSSIBLE), question(f"What stands in {name}?", *ANSWERS)]
    text = f"In {name} stands a grey heron all day long, and it waits for the boats to come in."
    return {"context": text, "qas": asked}


def article(name: str, paragraphs: int) -> dict[str, Any]:
    return {"title": name, "paragraphs": [paragraph(f"{name} {n}") for n in range(paragraphs)]}


def write(path: Path, *articles: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"version": "v2.0", "data": list(articles)}))
    return path
