"""Text from tokens as they come, without half characters and lost spaces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

_UNREADABLE = "\ufffd"  # what decoders put where bytes are no whole character
_CONTEXT = 32  # prompt tokens that are decoded along; a decoder looks back at a few at most


class Continuation:
    """The text that new tokens add to a prompt, handed over piece by piece.

    Tokens are decoded behind the end of the prompt: alone, a sentencepiece tokenizer would take the
    space before the first word away. A character whose bytes have not all come yet is held back.

    Args:
      decode: token ids → text.
      prompt: token ids of the prompt.

    Example:
      >>> from kvjax.generation.continuation import Continuation
      >>> text = Continuation(lambda ids: bytes(ids).decode(errors="replace"), list(b"Caf"))
      >>> text.add([0xC3]), text.add([0xA9, 0x21]), text.finish()
      ('', 'é!', '')
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._context = list(prompt)[-_CONTEXT:]
        self._before = decode(self._context)
        self._tokens: list[int] = []
        self._given = ""

    @property
    def text(self) -> str:
        """The whole text of the new tokens so far."""
        whole = self._decode(self._context + self._tokens)
        if whole.startswith(self._before):
            return whole[len(self._before) :]
        return self._decode(self._tokens)

    def add(self, tokens: Sequence[int]) -> str:
        """Takes more tokens, returns what is certain and has not been returned before."""
        self._tokens.extend(tokens)
        certain = self.text.rstrip(_UNREADABLE)
        # An incomplete character can make the ones before it unreadable, until it is complete.
        return self._give(certain) if certain.startswith(self._given) else ""

    def finish(self) -> str:
        """Everything that has not been returned yet: no further tokens will come."""
        return self._give(self.text)

    def _give(self, text: str) -> str:
        same = takewhile(lambda pair: pair[0] == pair[1], zip(text, self._given, strict=False))
        piece = text[sum(1 for _ in same) :]
        self._given += piece
        return piece
