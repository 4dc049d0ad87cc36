"""Converts texts to tokens, plainly or as messages of the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
"""Text between the document and the question in a user's message."""

_PLACED = "the text that the model's chat template puts"


class Dialogue:
    """Converts prompts, documents with questions, and turns of a conversation to tokens.

    With a template, each text is a user's message. Without one, it is fed as it is, after the
    special tokens that the tokenizer puts before a text.

    Args:
      tokenizer: tokenizer of the model, from `transformers`.
      system: a system message before everything else.
      raw: whether to leave out the template.
      chat: whether the tokenizer must have a template.

    Attributes:
      templated: whether the template is used.
      end_tokens: tokens that end an answer, besides the end tokens of the model's configuration.

    Raises:
      ValueError: a template is needed and there is none, or the template fails.
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
        """Returns the tokens of a prompt, or of the first turn of a conversation."""
        if not self.templated:
            return raw_tokens(self._tokenizer, text)
        rendered = render_chat(self._tokenizer, [*self._system, _message(text)])
        tokens = self._encode(rendered, text, self._before, self._after)
        return with_start(self._tokenizer, tokens)

    # A document and its question are one message, but the document is read before the question is
    # known. So the template is rendered twice, each time with a marker in place of the absent text,
    # and split at the marker. The two parts join to the full message if the template's text around
    # a message does not depend on the message, which is checked.

    def document(self, text: str) -> list[int]:
        """Returns the tokens of a document that a question follows: the beginning of a message.

        Raises:
          ValueError: the template's text after this document differs from that after others.
        """
        if not self.templated:
            return raw_tokens(self._tokenizer, text)
        rendered, after = self._parts(_message(text + INSTRUCTION + TEXT), split_at=(TEXT,))
        if after != self._after:
            raise ValueError(
                f"{_PLACED} after a document depends on the document: --raw leaves the template out"
            )
        tokens = self._encode(rendered, text, self._before, "")
        return with_start(self._tokenizer, tokens)

    def question(self, text: str) -> list[int]:
        """Returns the tokens of a question about a document: the end of the document's message.

        Raises:
          ValueError: the template's text before a document depends on this question.
        """
        if not self.templated:
            return self._following("\n", text, text)
        text = text.strip()
        _, instruction, _ = self._parts(
            _message(ANSWER + INSTRUCTION + TEXT), split_at=(ANSWER, TEXT)
        )
        before, rendered = self._parts(_message(TEXT + INSTRUCTION + text), split_at=(TEXT,))
        if before != self._before or not rendered.startswith(instruction):
            raise ValueError(
                f"{_PLACED} before a document depends on the question: ask it together with the "
                "document, by kvjax generate"
            )
        rendered = rendered[len(instruction) :]
        return self._following(instruction, rendered, text, "", self._after)

    def turn(self, text: str, ended_by: Sequence[int]) -> list[int]:
        """Returns the tokens that a further turn adds to a conversation.

        They begin with the template's text after an answer. If that text has the token that ended
        the answer, the token has been read already, and the turn begins after it. Another end token
        is not part of the template, and the full text follows it.

        Args:
          text: the user's message.
          ended_by: end tokens of the previous answer, which were read; () if it has none.

        Raises:
          ValueError: the template's text before the previous answer depends on this message.
        """
        if not self.templated:
            return self._following("\n", text, text)
        earlier, between, after = self._parts(*CONVERSATION, split_at=(ANSWER, TEXT))
        before, rendered = self._parts(*CONVERSATION[:-1], _message(text), split_at=(ANSWER,))
        if before != earlier:
            raise ValueError(f"{_PLACED} at the beginning depends on later messages")
        tokens = self._following("\n", rendered, text, between, after)
        for place, token in enumerate(tokens):
            if token in ended_by:
                return tokens[place + 1 :]
            # Only white space may come before the end token.
            if self._tokenizer.decode([token]).strip():
                break
        return tokens

    def _check_system(self) -> None:
        """Raises ValueError if the template leaves out the system message."""
        if not self._system:
            return
        try:
            chat_parts(self._tokenizer, [{"role": "system", "content": ANSWER}, MESSAGE], ANSWER)
        except ValueError as error:
            render_chat(self._tokenizer, [MESSAGE])  # raises if the system message is not the cause
            raise ValueError(f"{error}; leave out --system") from error

    def _parts(self, *messages: Mapping[str, str], split_at: Sequence[str]) -> list[str]:
        """Returns the parts of the rendered conversation around markers in the messages."""
        return chat_parts(self._tokenizer, [*self._system, *messages], *split_at)

    def _encode(self, rendered: str, text: str, before: str = "", after: str = "") -> list[int]:
        """Returns the tokens of a rendered template; names of special tokens in `text` are text.

        Args:
          rendered: the rendered template with the text in it.
          text: the text that the template was given.
          before, after: the template's text around other messages.

        Raises:
          ValueError: the text names special tokens, and the template's text around it is not
            `before` and `after`, so that the names cannot be told from the template's own tokens.
        """
        if self._special.isdisjoint(self._tokens(text)):
            return self._tokens(rendered)
        message = rendered.removeprefix(before).removesuffix(after)
        if before + message + after != rendered:
            raise ValueError(
                f"{_PLACED} around a text depends on the text, which has names of special tokens: "
                "leave these out, or take --raw"
            )
        tokens = self._tokenizer(message, add_special_tokens=False, split_special_tokens=True)
        return [*self._tokens(before), *tokens.input_ids, *self._tokens(after)]

    def _following(
        self, anchor: str, rendered: str, text: str, before: str = "", after: str = ""
    ) -> list[int]:
        """Returns `_encode` of a text that follows `anchor`, without the tokens of `anchor`."""
        # Some tokenizers put a space before a text, which `anchor` avoids.
        anchor_tokens = self._tokens(anchor)
        tokens = self._encode(anchor + rendered, text, anchor + before, after)
        if tokens[: len(anchor_tokens)] == anchor_tokens:
            return tokens[len(anchor_tokens) :]
        return self._encode(rendered, text, before, after)

    def _tokens(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False).input_ids if text else []


def _message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
