"""How texts become tokens: as they are, or as messages of the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvjax.generation.chat import (
    ANSWER,
    CONVERSATION,
    MESSAGE,
    TEXT,
    chat_end_tokens,
    chat_parts,
    raw_tokens,
    render_chat,
    special_tokens,
    with_start,
)

INSTRUCTION = "\n\nAnswer this question about the text above:\n"
"""What a user's message says between a document and a question."""

_SYSTEM = "kvjax-system-stands-here"


class Dialogue:
    """Tokens of prompts, of documents with questions, and of the turns of a conversation.

    With a template each text is a user's message; without one it is fed as it is, behind the
    special tokens that the tokenizer begins a text with.

    Args:
      tokenizer: of the model, from `transformers`.
      system: a system message before everything else.
      raw: the template is not used.
      chat: there has to be a template.

    Attributes:
      templated: whether the template is used.
      end_tokens: what ends an answer beside the end tokens of the model's configuration.

    Raises:
      ValueError: a template is wanted and there is none, or it does not work.
    """

    def __init__(
        self, tokenizer: Any, *, system: str | None = None, raw: bool = False, chat: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self.templated = not raw and getattr(tokenizer, "chat_template", None) is not None
        if not self.templated and (chat or system is not None):
            reason = "--raw leaves it out" if raw else "the model's tokenizer has none"
            raise ValueError(f"{'--chat' if chat else '--system'} needs a chat template: {reason}")
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._special = special_tokens(tokenizer).keys() - {tokenizer.unk_token_id}
        self.end_tokens: tuple[int, ...] = ()
        if self.templated:
            self._check_system()
            self._before, self._after = chat_parts(tokenizer, [*self._system, MESSAGE], TEXT)
            self.end_tokens = chat_end_tokens(tokenizer)

    def prompt(self, text: str) -> list[int]:
        """A prompt, or the first turn of a conversation."""
        if not self.templated:
            return raw_tokens(self._tokenizer, text)
        return with_start(self._tokenizer, self._encode(self._before, text, self._after))

    def document(self, text: str) -> list[int]:
        """A document that questions follow: the beginning of one message."""
        if not self.templated:
            return raw_tokens(self._tokenizer, text)
        # The template is rendered once, with a marker in place of document and question, and is
        # split there. What comes before the marker is read with the document, and what comes after
        # it with the question: joined, the two are one message.
        return with_start(self._tokenizer, self._encode(self._before, text, INSTRUCTION))

    def question(self, text: str) -> list[int]:
        """A question about a document that has been read: the end of its message."""
        if not self.templated:
            return self._following("\n", "", text)
        return self._following(INSTRUCTION, "", text.strip(), self._after)

    def turn(self, text: str, ended_by: Sequence[int]) -> list[int]:
        """What a further turn adds to a conversation.

        It begins with what the template has behind an answer. Of that, the token that ended the
        answer has been read; another end token has no such place in the template, and all of it
        follows.

        Args:
          text: what the user says.
          ended_by: the end token of the answer before, which has been read; () if it has none.
        """
        if not self.templated:
            return self._following("\n", "", text)
        messages = [*self._system, *CONVERSATION]
        _, between, after = chat_parts(self._tokenizer, messages, ANSWER, TEXT)
        tokens = self._following("\n", between, text, after)
        for place, token in enumerate(tokens):
            if token in ended_by:
                return tokens[place + 1 :]
            if self._tokenizer.decode([token]).strip():
                break
        return tokens

    def _check_system(self) -> None:
        """Raises ValueError where there is a system message and the template takes none."""
        if not self._system:
            return
        system = {"role": "system", "content": _SYSTEM}
        try:
            shown = _SYSTEM in render_chat(self._tokenizer, [system, MESSAGE])
        except ValueError as error:
            render_chat(self._tokenizer, [MESSAGE])  # raises where something else is at fault
            raise ValueError(f"{error}; it takes no system message: leave out --system") from error
        if not shown:
            raise ValueError(
                "the model's chat template does not show the system message: leave out --system"
            )

    def _encode(self, before: str, text: str, after: str = "") -> list[int]:
        """Tokens of the three joined; names of special tokens in `text` are mere text."""
        whole, around = self._tokens(before + text + after), map(self._tokens, (before, after))
        if self._count_special(whole) == sum(map(self._count_special, around)):
            return whole
        own = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        return [*self._tokens(before), *own, *self._tokens(after)]

    def _count_special(self, tokens: Sequence[int]) -> int:
        return sum(token in self._special for token in tokens)

    def _following(self, anchor: str, before: str, text: str, after: str = "") -> list[int]:
        """Tokens of the last three joined, as they are where `anchor` comes first."""
        # Some tokenizers put a space before what they take for the beginning of a text.
        first, whole = self._tokens(anchor), self._encode(anchor + before, text, after)
        if whole[: len(first)] == first:
            return whole[len(first) :]
        return self._encode(before, text, after)

    def _tokens(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False).input_ids if text else []
