"""How texts become tokens: as they are, or as messages of the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.messages import brief, printable

INSTRUCTION = "\n\nAnswer this question about the text above:\n"
"""What a user's message says between a document and a question."""

# What stands for a text when a template is rendered, to see what comes before and after it.
_TEXT, _ANSWER = "kvjax-text-stands-here", "kvjax-answer-stands-here"


class Dialogue:
    """Tokens of prompts, of documents with questions, and of the turns of a conversation.

    With a template each text is a user's message; without one it is fed as it is.

    Args:
      tokenizer: of the model, from `transformers`.
      system: a system message before everything else.
      raw: the template is not used.
      chat: there has to be a template.

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
        if self.templated:
            self._before, self._after = self._parts([_message(_TEXT)], _TEXT)

    def prompt(self, text: str) -> list[int]:
        """A prompt, or the first turn of a conversation."""
        if not self.templated:
            return self._tokenizer(text).input_ids
        return self._encode(self._before, text, self._after)

    def document(self, text: str) -> list[int]:
        """A document that questions follow: the beginning of one message."""
        if not self.templated:
            return self._tokenizer(text).input_ids
        # The template is rendered once, with a marker in place of document and question, and is
        # split there. What comes before the marker is read with the document, and what comes after
        # it with the question: joined, the two are one message.
        return self._encode(self._before, text, INSTRUCTION)

    def question(self, text: str) -> list[int]:
        """A question about a document that has been read: the end of its message."""
        if not self.templated:
            return self._following("\n", "", text)
        return self._following(INSTRUCTION, "", text.strip(), self._after)

    def turn(self, text: str, ended_by: Sequence[int]) -> list[int]:
        """What a further turn adds to a conversation.

        Args:
          text: what the user says.
          ended_by: end tokens of which the answer before has one, which has been read; () if it has
            none.
        """
        if not self.templated:
            return self._following("\n", "", text)
        messages = [_message("Hello"), _message(_ANSWER, "assistant"), _message(_TEXT)]
        _, between, after = self._parts(messages, _ANSWER, _TEXT)
        tokens = self._following("\n", between, text, after)
        return tokens[1:] if tokens[0] in ended_by else tokens

    def _parts(self, messages: Sequence[Mapping[str, str]], *markers: str) -> list[str]:
        """What the rendered template has before, between and after markers."""
        try:
            rest = self._tokenizer.apply_chat_template(
                [*self._system, *messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template may fail in any way
            reason = printable(" ".join(str(error).split()))
            raise ValueError(f"the model's chat template fails: {reason}") from error
        parts = []
        for marker in markers:
            if rest.count(marker) != 1:
                raise ValueError(
                    "the model's chat template must show each message once and as it is, got "
                    f"{brief(rest)}"
                )
            before, rest = rest.split(marker)
            parts.append(before)
        return [*parts, rest]

    def _encode(self, before: str, text: str, after: str = "") -> list[int]:
        """Tokens of the three joined; names of special tokens in `text` are mere text."""
        if not any(name in text for name in self._tokenizer.all_special_tokens):
            return self._tokens(before + text + after)
        own = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        return [*self._tokens(before), *own, *self._tokens(after)]

    def _following(self, anchor: str, before: str, text: str, after: str = "") -> list[int]:
        """Tokens of the last three joined, as they are where `anchor` comes first."""
        # Some tokenizers put a space before what they take for the beginning of a text.
        first, whole = self._tokens(anchor), self._encode(anchor + before, text, after)
        if whole[: len(first)] == first:
            return whole[len(first) :]
        return self._encode(before, text, after)

    def _tokens(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False).input_ids if text else []


def _message(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}
