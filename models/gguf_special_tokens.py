"""Which tokens of a GGUF file are special, and which of them end an answer.

A file names a few of them by their ids, and gives each token a type, which converters often get
wrong. llama.cpp therefore knows ends and the tokens of fill-in-the-middle by their texts as well,
whatever their type (`llama-vocab.cpp`). Beginnings of messages, which it does not know, are found
in the file's chat template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Types of tokens: parts of texts, special tokens, and texts that are never divided."""

_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<\N{FULLWIDTH VERTICAL LINE}end\u2581of\u2581sentence\N{FULLWIDTH VERTICAL LINE}>", "[e~[",
)  # fmt: skip
# Tokens of fill-in-the-middle that end an answer too, by the entry that names their id.
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
_STARTS = ("<start_of_turn>",)  # belongs to an end that has another form than the ones below
# llama.cpp's converter takes added tokens of this form for special ones, whatever they are called.
_BARRED = re.compile(r"[<\[]([|\N{FULLWIDTH VERTICAL LINE}]).+\1[>\]]")
_MARKER = re.compile(r"(?=.*[^\W\d_])(?=.*[^\w\s]).{3,}")  # a letter and a sign at least
_TAG = re.compile(r"</?[^<>\s/]+>")


def end_tokens(metadata: Mapping[str, Any]) -> list[Any]:
    """The tokens that end an answer in llama.cpp, in order; as they are where one is no integer.

    They are those that the file names as ends and those that have the text of one. Of the tokens of
    fill-in-the-middle, llama.cpp takes one of each kind, the first that it comes across. Here it is
    every one that is there, unless the file names one.

    Args:
      metadata: of the file.
    """
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    found = [token for token in named if token is not None]
    tokens = metadata.get("tokenizer.ggml.tokens")
    places = {text: place for place, text in enumerate(tokens)} if _are_texts(tokens) else {}
    found += [places[text] for text in _ENDS if text in places]
    for name, texts in _FIM_ENDS.items():
        given = metadata.get(f"tokenizer.ggml.{name}_token_id")
        found += [places[text] for text in texts if text in places] if given is None else [given]
    if not all(type(token) is int for token in found):
        return found
    return sorted({*found} - {places[text] for text in _no_ends(places)})


def _are_texts(tokens: Any) -> bool:
    return isinstance(tokens, list) and all(isinstance(token, str) for token in tokens)


def _no_ends(known: Mapping[str, int]) -> list[str]:
    """Texts of ends that end nothing beside other ones: parts of an answer, and a tag of HTML."""
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
    """The types of a file's tokens, with `CONTROL` for each special token.

    Special are, beside those that the file calls so:

    - tokens with the text of an end or of a token of fill-in-the-middle, whatever their type;
    - normal and user-defined tokens whose text has bars inside of its brackets, `<|user|>`;
    - those that stand in the chat template as they are and have letters and other signs: `<user>`,
      `<<SYS>>`, `[INST]`. A normal token that texts are encoded to anyway, such as `<T>` of
      programs, is an ordinary one. A user-defined one that is a tag with a counterpart, such as
      `<think>` and `</think>`, is a part of answers: it shows, as in llama.cpp and transformers.

    Args:
      tokens, types: of the file.
      template: its chat template.
      encode: text → ids, before special tokens are known.
    """
    known = {text: place for place, text in enumerate(tokens)}
    fixed = {*_ENDS, *_FIM, *_STARTS, *(t for texts in _FIM_ENDS.values() for t in texts)}
    fixed -= {*_no_ends(known)}

    def is_special(place: int, text: str, kind: int) -> bool:
        if text in fixed:
            return True
        if kind not in (NORMAL, USER_DEFINED):
            return False
        if _BARRED.fullmatch(text):
            return True
        if template is None or text not in template or not _MARKER.fullmatch(text):
            return False
        if kind == NORMAL:  # some tokenizers put a space before what a text begins with
            return place not in encode(text) and place not in encode(f"\n{text}")
        return not _TAG.fullmatch(text) or _counterpart(text) not in known

    return [
        CONTROL if is_special(place, text, kind) else kind
        for place, (text, kind) in enumerate(zip(tokens, types, strict=True))
    ]


def _counterpart(tag: str) -> str:
    """`</name>` of `<name>`, and the other way round."""
    return f"<{tag[2:]}" if tag.startswith("</") else f"</{tag[1:]}"
