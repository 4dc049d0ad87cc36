"""What a model's tokenizer puts around a text to be continued: special tokens, a template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.messages import brief, one_line

CHAT_STARTS = "chat_starts_with_bos"
"""An option of tokenizers: their first token is put before a rendered template that has none."""

# What stands for a text when a template is rendered, to see what comes before and after it.
TEXT, ANSWER = "kvjax-text-stands-here", "kvjax-answer-stands-here"
MESSAGE = {"role": "user", "content": TEXT}
CONVERSATION = (
    {"role": "user", "content": "Hello"}, {"role": "assistant", "content": ANSWER}, MESSAGE,
)  # fmt: skip


def raw_tokens(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text that is to be continued as it is.

    The tokenizer's special tokens come before it. Those that it puts behind a text, such as an end
    token, are left out: what is continued has not ended.
    """
    encoded = tokenizer(text, return_special_tokens_mask=True)
    tokens, added = list(encoded.input_ids), list(encoded.special_tokens_mask)
    while added and added[-1]:
        tokens.pop()
        added.pop()
    return tokens


def begins_twice(tokenizer: Any, tokens: Sequence[int]) -> bool:
    """Whether a raw text has brought the first token that the tokenizer puts before it anyway."""
    twice = [tokenizer.bos_token_id] * 2
    return list(tokens[:2]) == twice and raw_tokens(tokenizer, "a")[:1] == twice[:1]


def with_start(tokenizer: Any, tokens: Sequence[int]) -> list[int]:
    """Tokens of a rendered chat template, with the first token of all where it belongs there.

    As in transformers it is the template that says so. The tokenizer of a GGUF file that wants its
    first token before every text has it before a template too, and once, as in llama.cpp.
    """
    first = [tokenizer.bos_token_id] if tokenizer.init_kwargs.get(CHAT_STARTS) else []
    return [*first, *tokens] if list(tokens[:1]) != first else list(tokens)


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str:
    """The text that the chat template makes of messages, up to where an answer begins.

    Raises:
      ValueError: the template fails.
    """
    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template may fail in any way
        raise ValueError(f"the model's chat template fails: {one_line(error)}") from error


def chat_parts(tokenizer: Any, messages: Sequence[Mapping[str, str]], *markers: str) -> list[str]:
    """What the rendered template has before, between and after the markers in messages.

    Raises:
      ValueError: the template fails, or does not show each marker once and as it is.
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
    """The tokens that end an answer in a chat, whatever a model's configuration says.

    They are what follows an answer when the chat template renders a conversation: the first token
    after it that is no white space, if that is one of the tokens that are added to the vocabulary,
    such as `<|im_end|>`. Ordinary text that follows an answer ends nothing.

    Args:
      tokenizer: of `transformers`.

    Returns:
      One token, or none where there is no template, or none that shows a conversation.

    Example:
      >>> import kvjax
      >>> from kvjax.models import demo, load_tokenizer
      >>> tokenizer = load_tokenizer(demo.directory())
      >>> kvjax.chat_end_tokens(tokenizer)
      ()
      >>> tokenizer.chat_template = (
      ...     "{% for message in messages %}{{ message['content'] }}</s>{% endfor %}")
      >>> tokenizer.decode(kvjax.chat_end_tokens(tokenizer))
      '</s>'
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return ()
    try:
        between = chat_parts(tokenizer, CONVERSATION, ANSWER, TEXT)[1]
    except ValueError:  # it is made for something else, such as a single message
        return ()
    tokens = tokenizer(between, add_special_tokens=False).input_ids
    first = next((token for token in tokens if tokenizer.decode([token]).strip()), None)
    return (first,) if first in tokenizer.added_tokens_decoder else ()


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Tokens that are no text, and their names: those that decoders leave out."""
    added = tokenizer.added_tokens_decoder.items()
    return {token: str(name) for token, name in added if name.special}
