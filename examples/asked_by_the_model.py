"""A method of one's own with a probe: the model asks about a document, and what it looks at stays.

    python examples/asked_by_the_model.py

The model is asked for three questions about a document that it has read, and writes them. Then the
document is read once more, with the request and the questions behind it, and a slot's score is the
largest attention probability that it receives from any of their queries. What stays beside
documents, how budgets are kept, heads, rows, meshes, contexts and exports are the library's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Array, Bool, Float, Int

import kvjax
from kvjax.kit import Asking, DocumentBudget, KVCache, Needs, Received, Step

REQUEST = "\n\nThree questions about the text above:\n1. "


@dataclass(frozen=True)
class Questions(Received):
    """The request for questions, and what the model writes then.

    Args:
      tokens: that it may write.
    """

    tokens: int = 48

    instructions: ClassVar[tuple[str, ...]] = (REQUEST,)

    def pieces(
        self, documents: Sequence[Sequence[int]], width: int, asking: Asking
    ) -> Int[np.ndarray, "B 1 R"]:
        """Lets the model write, with its full cache; without words it just goes on."""
        request = [] if asking.encode is None else list(asking.encode(REQUEST))
        prompts = [[*document, *request] for document in documents]
        written = kvjax.generate(asking.model, prompts, max_new_tokens=self.tokens).tokens
        looking = np.full((len(documents), 1, len(request) + self.tokens), -1, np.int32)
        for row, questions in zip(looking, written, strict=True):
            ids = [*request, *questions]
            row[0, : len(ids)] = ids
        return looking


@dataclass(frozen=True)
class Asked(DocumentBudget):
    """Keeps the tokens of a document that the model's own questions look at.

    Args:
      budget, sinks, window, room: as in `kvjax.kit.DocumentBudget`.
      tokens: that the model may write.
    """

    tokens: int = 48

    @property
    def needs(self) -> Needs:
        """The questions."""
        return Needs(probe=Questions(self.tokens))

    def scores(
        self, cache: KVCache, state: Any, step: Step, document: Bool[Array, "B H S"]
    ) -> Float[Array, "B H S"]:
        """Returns what the questions look at."""
        return step.record.slots["received"]


kvjax.register("asked", Asked)


def main() -> list[str]:
    """Reads the bundled document with a fifth of its tokens, and returns answers about it."""
    from kvjax.models import demo, from_pretrained, load_tokenizer

    model, tokenizer = from_pretrained(demo.directory()), load_tokenizer(demo.directory())
    document = demo.document()
    ids = tokenizer(document.text).input_ids
    context = kvjax.read(
        model, [ids], transform=Asked(budget=0.2), max_prompt=len(ids) + 64, max_new=16,
        document=tokenizer,
    )  # fmt: skip
    question = tokenizer(document.question, add_special_tokens=False).input_ids
    result = kvjax.generate(model, [question], context=context, max_new_tokens=12)
    print(f"{kvjax.nbytes(context.caches):,} bytes; expected: {document.answer}")
    answers = [tokenizer.decode(tokens) for tokens in result.tokens]
    print(*answers, sep="\n")
    return answers


if __name__ == "__main__":
    main()
