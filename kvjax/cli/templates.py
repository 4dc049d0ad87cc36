"""How texts become tokens: as they are, or as messages of the model's chat template."""

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
"""What a user's message says between a document and a question."""

_DEPENDS = "the model's chat template makes what it puts"


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
        rendered = render_chat(self._tokenizer, [*self._system, _message(text)])
        tokens = self._encode(rendered, text, self._before, self._after)
        return with_start(self._tokenizer, tokens)

    # A document and its question are one message, of which the document is read before the question
    # is known. The template is therefore rendered twice, each time with a marker in place of the
    # text that is not there, and split at the marker. The two parts join to the whole message where
    # what the template has around a text does not depend on the text, which is checked.

    def document(self, text: str) -> list[int]:
        """A document that questions follow: the beginning of one message.

        Raises:
          ValueError: the template has something else behind this text than behind others.
        """
        if not self.templated:
            return raw_tokens(self._tokenizer, text)
        rendered, after = self._parts(_message(text + INSTRUCTION + TEXT), split_at=(TEXT,))
        if after != self._after:
            raise ValueError(
                f"{_DEPENDS} behind a document depend on its text: --raw leaves it out"
            )
        tokens = self._encode(rendered, text, self._before, "")
        return with_start(self._tokenizer, tokens)

    def question(self, text: str) -> list[int]:
        """A question about a document that has been read: the end of its message.

        Raises:
          ValueError: the template has something else before a document with this question.
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
                f"{_DEPENDS} before a document depend on the question: ask it together with the "
                "document, by kvjax generate"
            )
        rendered = rendered[len(instruction) :]
        return self._following(instruction, rendered, text, "", self._after)

    def turn(self, text: str, ended_by: Sequence[int]) -> list[int]:
        """What a further turn adds to a conversation.

        It begins with what the template has behind an answer. Of that, the token that ended the
        answer has been read; another end token has no such place in the template, and all of it
        follows.

        Args:
          text: what the user says.
          ended_by: the end token of the answer before, which has been read; () if it has none.

        Raises:
          ValueError: the template has something else before an answer when this text follows.
        """
        if not self.templated:
            return self._following("\n", text, text)
        earlier, between, after = self._parts(*CONVERSATION, split_at=(ANSWER, TEXT))
        before, rendered = self._parts(*CONVERSATION[:-1], _message(text), split_at=(ANSWER,))
        if before != earlier:
            raise ValueError(f"{_DEPENDS} at the beginning depend on what is said later")
        tokens = self._following("\n", rendered, text, between, after)
        for place, token in enumerate(tokens):
            if token in ended_by:
                return tokens[place + 1 :]
            if self._tokenizer.decode([token]).strip():
                break
        return tokens

    def _check_system(self) -> None:
        """Raises ValueError where there is a system message that the template does not show."""
        if not self._system:
            return
        try:
            chat_parts(self._tokenizer, [{"role": "system", "content": ANSWER}, MESSAGE], ANSWER)
        except ValueError as error:
            render_chat(self._tokenizer, [MESSAGE])  # raises where something else is at fault
            raise ValueError(f"{error}; leave out --system") from error

    def _parts(self, *messages: Mapping[str, str], split_at: Sequence[str]) -> list[str]:
        """What the rendered conversation has before, between and after markers in the messages."""
        return chat_parts(self._tokenizer, [*self._system, *messages], *split_at)

    def _encode(self, rendered: str, text: str, before: str = "", after: str = "") -> list[int]:
        """Tokens of a rendered template; names of special tokens in `text` are mere text.

        Args:
          rendered: with the text.
          text: as it was given to the template.
          before, after: what the template has around other texts.

        Raises:
          ValueError: the text has such names, and the template has something else around it, so
            that they cannot be told from the template's own.
        """
        if self._special.isdisjoint(self._tokens(text)):
            return self._tokens(rendered)
        shown = rendered.removeprefix(before).removesuffix(after)
        if before + shown + after != rendered:
            raise ValueError(
                f"{_DEPENDS} around a text depend on the text, which has names of special tokens: "
                "leave these out, or take --raw"
            )
        tokens = self._tokenizer(shown, add_special_tokens=False, split_special_tokens=True)
        return [*self._tokens(before), *tokens.input_ids, *self._tokens(after)]

    def _following(
        self, anchor: str, rendered: str, text: str, before: str = "", after: str = ""
    ) -> list[int]:
        """`_encode` of what follows `anchor`, in whose tokens it has no part."""
        # Some tokenizers put a space before what they take for the beginning of a text.
        first = self._tokens(anchor)
        whole = self._encode(anchor + rendered, text, anchor + before, after)
        if whole[: len(first)] == first:
            return whole[len(first) :]
        return self._encode(rendered, text, before, after)

    def _tokens(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False).input_ids if text else []


def _message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
