"""Special tokens of a GGUF file, and the ones that end an answer.

A file names a few special tokens by their ids, and gives each token a type, which converters often
get wrong. llama.cpp therefore also recognises end tokens and fill-in-the-middle tokens by their
texts, whatever their type (`llama-vocab.cpp`). It does not know beginnings of messages: they are
found in the file's chat template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Types of tokens: parts of texts, special tokens, and texts that are never split."""

_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<\N{FULLWIDTH VERTICAL LINE}end\u2581of\u2581sentence\N{FULLWIDTH VERTICAL LINE}>", "[e~[",
)  # fmt: skip
# Fill-in-the-middle tokens that also end an answer, by the entry that names their id.
_FIM_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_FIM = (
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>", "\u2581<PRE>", "<|code_prefix|>",
    "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<SUF>", "\u2581<SUF>", "<|code_suffix|>",
    "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>", "\u2581<MID>", "<|code_middle|>",
    "<|prefix|>", "<|suffix|>", "<|middle|>",
)  # fmt: skip
_STARTS = ("<start_of_turn>",)  # the start token whose form is none of those below
# llama.cpp's converter treats added tokens of this form as special, whatever their name.
_BARRED = re.compile(r"[<\[]([|\N{FULLWIDTH VERTICAL LINE}]).+\1[>\]]")
_MARKER = re.compile(r"(?=.*[^\W\d_])(?=.*[^\w\s]).{3,}")  # a letter and a sign at least
_TAG = re.compile(r"</?[^<>\s/]+>")


def end_tokens(metadata: Mapping[str, Any]) -> list[Any]:
    """Returns the tokens that end an answer in llama.cpp, sorted if all are integers.

    They are the tokens that the file names as ends and those with the text of an end token.
    llama.cpp takes the first fill-in-the-middle token of each kind that it encounters. Here all
    are taken, unless the file names one.

    Args:
      metadata: metadata of the file.
    """
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = [token for token in named if token is not None]
    tokens = metadata.get("tokenizer.ggml.tokens")
    places = {text: place for place, text in enumerate(tokens)} if _are_texts(tokens) else {}
    ends += [places[text] for text in _ENDS if text in places]
    for name, texts in _FIM_ENDS.items():
        named_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        by_text = [places[text] for text in texts if text in places]
        ends += by_text if named_id is None else [named_id]
    if not all(type(token) is int for token in ends):
        return ends
    return sorted({*ends} - {places[text] for text in _no_ends(places)})


def _are_texts(tokens: Any) -> TypeGuard[list[str]]:
    return isinstance(tokens, list) and set(map(type, tokens)) <= {str}


def _no_ends(known: Mapping[str, int]) -> list[str]:
    """Returns end texts that end no answer where others do: parts of an answer, an HTML tag."""
    called = "<|call|>" in known or "<|calls|>" in known
    harmony = called and ("<|return|>" in known or "<|flush|>" in known)
    no_ends = ["<|end|>"] * harmony + ["</s>"] * ("<|tool_response>" in known)
    return [text for text in no_ends if text in known]


def token_types(
    tokens: Sequence[str],
    types: Sequence[int],
    template: str | None,
    encode: Callable[[str], list[int]],
) -> list[int]:
    """Returns the types of a file's tokens, with `CONTROL` for each special token.

    Besides the tokens that the file calls special, these are:

    - tokens with the text of an end or a fill-in-the-middle token, whatever their type;
    - normal and user-defined tokens whose text has bars inside its brackets, `<|user|>`;
    - tokens that occur in the chat template and have letters and other signs: `<user>`, `<<SYS>>`,
      `[INST]`. A normal token that texts are encoded to anyway, such as `<T>` in programs, is not
      special. A user-defined tag with a counterpart, such as `<think>` and `</think>`, is a part of
      answers: it is shown, as in llama.cpp and transformers.

    Args:
      tokens, types: tokens of the file and their types.
      template: its chat template.
      encode: text → ids, before special tokens are known.
    """
    known = {text: place for place, text in enumerate(tokens)}
    fixed = {*_ENDS, *_FIM, *_STARTS, *(t for texts in _FIM_ENDS.values() for t in texts)}
    fixed -= {*_no_ends(known)}

    def is_special(place: int, text: str, token_type: int) -> bool:
        if text in fixed:
            return True
        if token_type not in (NORMAL, USER_DEFINED):
            return False
        if _BARRED.fullmatch(text):
            return True
        if template is None or text not in template or not _MARKER.fullmatch(text):
            return False
        if token_type == NORMAL:  # some tokenizers put a space before what a text begins with
            return place not in encode(text) and place not in encode(f"\n{text}")
        return not _TAG.fullmatch(text) or _counterpart(text) not in known

    return [
        CONTROL if is_special(place, text, token_type) else token_type
        for place, (text, token_type) in enumerate(zip(tokens, types, strict=True))
    ]


def _counterpart(tag: str) -> str:
    """Returns `</name>` for `<name>`, and the other way round."""
    return f"<{tag[2:]}" if tag.startswith("</") else f"</{tag[1:]}"
