"""A prompt as the tokens of the model that is to read it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvjax.generation.continuation import Continuation
from kvjax.generation.generate import Generation

if TYPE_CHECKING:
    from kvjax.models import DecoderConfig


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt in tokens, with what is needed to check it and to decode what follows it.

    Args:
      tokens: token ids of the prompt.
      config: of the model; its weights have not been loaded.
      decode: token ids → text.
    """

    tokens: list[int]
    config: DecoderConfig
    decode: Callable[[Sequence[int]], str]

    @classmethod
    def of(cls, text: str, folder: Path) -> Self:
        """A text in the tokens of the model in a folder, whose configuration is read too."""
        # Imported here: kvjax does without kvjax.models, and help without what they import.
        from kvjax.models import load_tokenizer, read_config

        config = read_config(folder)  # before the tokenizer: it says what is not supported
        tokenizer = load_tokenizer(folder)
        decode = functools.partial(
            tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return cls(tokenizer(text).input_ids, config, decode)

    def continuation(self) -> Continuation:
        """Turns new tokens into the text that they add to the prompt."""
        return Continuation(self.decode, self.tokens)

    def new_text(self, result: Generation) -> str:
        """The text that a finished generation adds to the prompt."""
        continuation = self.continuation()
        continuation.add(result.tokens[0])
        return continuation.text
