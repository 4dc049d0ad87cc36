"""Puts a tokenizer's special tokens or chat template around a text that is to be continued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.messages import brief, one_line

CHAT_STARTS = "chat_starts_with_bos"
"""Option of tokenizers: a rendered template that lacks their first token gets it in front."""

# Markers that stand for texts when a template is rendered, to see what comes around the texts.
TEXT, ANSWER = "kvjax-text-stands-here", "kvjax-answer-stands-here"
MESSAGE = {"role": "user", "content": TEXT}
CONVERSATION = (
    {"role": "user", "content": "Hello"}, {"role": "assistant", "content": ANSWER}, MESSAGE,
)  # fmt: skip


def raw_tokens(tokenizer: Any, text: str) -> list[int]:
    """Returns the tokens of a text that is to be continued as it is.

    The tokenizer's special tokens come before it. Special tokens after a text, such as an end
    token, are left out, because a text to be continued has not ended.
    """
    encoded = tokenizer(text, return_special_tokens_mask=True)
    tokens, added = list(encoded.input_ids), list(encoded.special_tokens_mask)
    while added and added[-1]:
        tokens.pop()
        added.pop()
    return tokens


def begins_twice(tokenizer: Any, tokens: Sequence[int]) -> bool:
    """Returns whether a raw text contains the first token that the tokenizer also puts before it.

    Args:
      tokens: tokens of the raw text, with the tokenizer's special tokens.
    """
    twice = [tokenizer.bos_token_id] * 2
    return list(tokens[:2]) == twice and raw_tokens(tokenizer, "a")[:1] == twice[:1]


def with_start(tokenizer: Any, tokens: Sequence[int]) -> list[int]:
    """Returns the tokens of a rendered chat template, with the tokenizer's first token if needed.

    In general the template itself contains that token, as in transformers. If a GGUF file asks for
    it before every text, it is put before a template too, but only once, as in llama.cpp.
    """
    first = [tokenizer.bos_token_id] if tokenizer.init_kwargs.get(CHAT_STARTS) else []
    return [*first, *tokens] if list(tokens[:1]) != first else list(tokens)


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str:
    """Renders messages with the chat template, up to where an answer begins.

    Raises:
      ValueError: the template fails.
    """
    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template is a program, which may raise anything
        raise ValueError(f"the model's chat template fails: {one_line(error)}") from error


def chat_parts(tokenizer: Any, messages: Sequence[Mapping[str, str]], *markers: str) -> list[str]:
    """Returns the parts of a rendered template before, between and after markers in messages.

    Raises:
      ValueError: the template fails, or does not show each marker exactly once and unchanged.
    """
    rest, parts = render_chat(tokenizer, messages), []
    for marker in markers:
        if rest.count(marker) != 1:
            raise ValueError(
                "the model's chat template must show each message once and as it is, got "
                f"{brief(rest)}"
            )
        before, rest = rest.split(marker)
        parts.append(before)
    return [*parts, rest]


def chat_end_tokens(tokenizer: Any) -> tuple[int, ...]:
    """Returns the tokens that end an answer in a chat, whatever a model's configuration says.

    The chat template renders a conversation. The first token after an answer that is not white
    space ends the answer, if it is one of the tokens that are added to the vocabulary, such as
    `<|im_end|>`. Ordinary text that follows an answer ends nothing.

    Args:
      tokenizer: of `transformers`.

    Returns:
      One token; none if there is no template, if it cannot render a conversation, or if ordinary
      text follows an answer.

    Example:
      >>> import kvjax
      >>> from kvjax.models import demo, load_tokenizer
      >>> tokenizer = load_tokenizer(demo.directory())
      >>> kvjax.models.chat_end_tokens(tokenizer)
      ()
      >>> tokenizer.chat_template = (
      ...     "{% for message in messages %}{{ message['content'] }}</s>{% endfor %}")
      >>> tokenizer.decode(kvjax.models.chat_end_tokens(tokenizer))
      '</s>'
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return ()
    try:
        between = chat_parts(tokenizer, CONVERSATION, ANSWER, TEXT)[1]
    except ValueError:  # the template is for something else, such as a single message
        return ()
    tokens = tokenizer(between, add_special_tokens=False).input_ids
    first = next((token for token in tokens if tokenizer.decode([token]).strip()), None)
    return () if first is None or first not in tokenizer.added_tokens_decoder else (first,)


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Returns the special tokens, which decoders leave out of a text, with their names."""
    added = tokenizer.added_tokens_decoder.items()
    return {token: str(name) for token, name in added if name.special}
