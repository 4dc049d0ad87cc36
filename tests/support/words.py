"""A tokenizer whose texts have the tokens that a test gives them."""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.transforms.kvzip.repetition import FIRST, FURTHER


class Words:
    """Encodes the instructions of KVzip's probe.

    Args:
      first, further: the tokens of the one before the first piece, and before a further one.
    """

    def __init__(self, first: Sequence[int] = (), further: Sequence[int] = ()) -> None:
        self._tokens = {FIRST: list(first), FURTHER: list(further)}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the tokens of an instruction."""
        assert not add_special_tokens
        return self._tokens[text]
