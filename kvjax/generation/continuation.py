"""Decodes tokens to text as they come, in whole characters and with every space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from kvjax.generation.chat import special_tokens

_UNREADABLE = "\ufffd"  # what decoders write for bytes that form no whole character
_CONTEXT = 32  # prompt tokens that are decoded with new ones; decoders look back at a few tokens


class Continuation:
    """The text that new tokens add to a prompt, handed over piece by piece.

    New tokens are decoded together with the end of the prompt: decoded alone, they would lose the
    space before the first word with a sentencepiece tokenizer. A character is held back until all
    of its bytes have come.

    Args:
      decode: function from token ids to text.
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
        self._returned = ""

    @property
    def text(self) -> str:
        """Text of all new tokens so far."""
        with_context = self._decode(self._context + self._tokens)
        if with_context.startswith(self._before):
            return with_context[len(self._before) :]
        # New tokens have completed a character of the prompt, which now reads differently.
        return self._decode(self._tokens)

    def add(self, tokens: Sequence[int]) -> str:
        """Takes more tokens and returns the new text that no later token can change."""
        self._tokens.extend(tokens)
        certain = self.text.rstrip(_UNREADABLE)
        # An incomplete character can make the ones before it unreadable, until it is complete.
        return self._rest_of(certain) if certain.startswith(self._returned) else ""

    def finish(self) -> str:
        """Returns the rest of the text, after the last token."""
        return self._rest_of(self.text)

    def _rest_of(self, text: str) -> str:
        """Returns the part of the text that has not been returned yet, and notes that it is."""
        same = takewhile(lambda pair: pair[0] == pair[1], zip(text, self._returned, strict=False))
        piece = text[sum(1 for _ in same) :]
        self._returned += piece
        return piece


class TextDecoder:
    """Decodes token ids to text, without special tokens and with every space.

    Args:
      tokenizer: of `transformers`.

    Attributes:
      special: the tokens that it leaves out, with their names.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.special = tokenizer, special_tokens(tokenizer)

    def __call__(self, tokens: Sequence[int]) -> str:
        """Returns the text of these tokens."""
        return self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def new_text(
    decode: Callable[[list[int]], str], prompt: Sequence[int], tokens: Sequence[int]
) -> str:
    """Returns the text that new tokens add to a prompt."""
    continuation = Continuation(decode, prompt)
    continuation.add(tokens)
    return continuation.text
