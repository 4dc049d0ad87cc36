"""What the pictures show: the bundled model, a prompt with a hidden number, and caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

import kvjax
from kvjax.evaluation import Haystack
from kvjax.models import Decoder, demo, from_pretrained, load_tokenizer

TOKENS, DEPTH, STEPS = 512, 0.4, 16
BUDGET = 0.2


class Material(NamedTuple):
    """What all pictures are drawn from.

    Args:
      model: the bundled one.
      prompt: token ids.
      answer: the first and the last position of the number that is asked for.
    """

    model: Decoder
    prompt: list[int]
    answer: tuple[int, int]

    @classmethod
    def load(cls) -> Material:
        """Loads the model and hides the number."""
        model, tokenizer = from_pretrained(demo.directory()), load_tokenizer(demo.directory())
        haystack = Haystack(tokenizer, demo.held_out_text())
        case = haystack.case("needle", length=TOKENS, depth=DEPTH, seed=1)
        number = tokenizer(f" {case.answers[0]}", add_special_tokens=False).input_ids
        starts = range(len(case.prompt) - len(number))
        first = next(i for i in starts if list(case.prompt[i : i + len(number)]) == number)
        return cls(model, list(case.prompt), (first, first + len(number) - 1))

    def caches(self, transform: kvjax.KVTransform) -> Sequence[Any]:
        """The caches of all layers after the prompt."""
        return kvjax.read(self.model, [self.prompt], transform=transform, max_new=STEPS + 1).caches


def new_figure(height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """A figure as wide as a page, and its axes."""
    figure = Figure(figsize=(7.2, height), layout="constrained")
    return figure, figure.subplots(rows, columns, sharex=rows > 1)
