"""RULER's questions about articles: a paragraph that answers one, among paragraphs that do not.

Templates and parameters are data of NVIDIA's RULER (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.evaluation.tasks.encoder import Encoder

from .prompt import Prompt

_ORDER = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words."
)


def article_questions(
    encoder: Encoder, rng: np.random.Generator, articles: Sequence[Sequence[dict[str, Any]]]
) -> Prompt:
    """Makes a case of `qa_1`: a question, and its paragraph among others.

    As many paragraphs as fit are there, those of the same article before those of others, and the
    question's is at a random place among them. The last one is cut off when the tokens are used up;
    it is never the question's.

    Args:
      encoder: encoder of the model's tokenizer.
      rng: draws the question, the order and the place.
      articles: paragraphs of each article, in SQuAD's format.

    Raises:
      ValueError: no question has an answer.
    """
    asked = [
        (number, paragraph["context"], question)
        for number, article in enumerate(articles)
        for paragraph in article
        for question in paragraph["qas"]
        if not question.get("is_impossible", False)
    ]
    if not asked:
        raise ValueError("no question of the data has an answer")
    number, right, question = asked[int(rng.integers(len(asked)))]
    seen, others = {right}, []
    for article in (articles[number], *(articles[i] for i in rng.permutation(len(articles)))):
        texts = dict.fromkeys(paragraph["context"] for paragraph in article)
        new = [text for text in texts if text not in seen]
        seen.update(new)
        others += [new[i] for i in rng.permutation(len(new))]
    return Prompt(
        f"{_ORDER}\n\nThe following are given documents.",
        _Documents(encoder, right, others, float(rng.random())),
        f"\n\n{_ORDER}\n\nQuestion: {question['question']}",
        " Answer:",
        tuple(dict.fromkeys(answer["text"] for answer in question["answers"])),
    )


class _Documents:
    """The numbered documents of `qa_1`.

    Args:
      encoder: encoder of the model's tokenizer.
      right: the document that answers the question.
      others: all others, in the order in which there is room for them.
      place: share of the whole documents before the right one.
    """

    def __init__(self, encoder: Encoder, right: str, others: Sequence[str], place: float) -> None:
        self._encoder, self._others, self._place = encoder, others, place
        self._right = encoder.next(f"\n{right}")
        self.least = len(self._head(1)) + len(self._right)

    def fill(self, room: int) -> list[int]:
        """Returns exactly `room` tokens.

        Raises:
          ValueError: there are not enough documents.
        """
        used, count = self.least, 0
        while count < len(self._others) and used <= room:
            used += len(self._head(count + 2)) + len(self._encoder.next(f"\n{self._others[count]}"))
            count += 1
        if used < room:
            raise ValueError(
                f"there are not enough paragraphs: {room} tokens of them are needed, and all of "
                f"the data have {used}"
            )
        whole = count - (used > room)  # the last one does not fit as a whole
        documents = [self._encoder.next(f"\n{text}") for text in self._others[:count]]
        documents.insert(int(self._place * (whole + 1)), self._right)
        tokens: list[int] = []
        for number, document in enumerate(documents, 1):
            tokens += [*self._head(number), *document]
        return tokens[:room]

    def _head(self, number: int) -> tuple[int, ...]:
        return self._encoder.next(f"\n\nDocument {number}:")
