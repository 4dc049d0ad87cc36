"""The tokenizer and the chat template in the metadata of a GGUF file.

`transformers` reads them too, but needs PyTorch for it, knows few architectures, and splits texts
in GPT-2's way if it does not know the model's. The tokenizer is therefore made here from
`tokenizers`, and an unknown way of splitting texts is refused.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import kvjax
from kvjax.files import keep_recently_used, user_cache, write_whole
from kvjax.generation.chat import CHAT_STARTS
from kvjax.messages import brief, one_line, quiet

from .gguf_header import GgufHeader, read_header
from .gguf_special_tokens import CONTROL, NORMAL, USER_DEFINED, token_types

_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")  # tokens of Phi-3 that keep spaces after them
_MOST_BYTES = 2**28  # of all tokenizers that are kept
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a space in SentencePiece's tokens


class _Splitting(NamedTuple):
    """Rules by which a byte-level tokenizer splits a text before it merges.

    Attributes:
      pattern: pattern of a piece; None: that of GPT-2.
      digits: whether digits are split off, before the pattern applies.
      whole_pieces: whether a piece that is a token is taken as it is, without merges.
      begins: whether a text begins with the start token if the file does not say so.
      composed: whether characters are first brought into Unicode's form NFC.
    """

    pattern: str | None = None
    digits: bool = False
    whole_pieces: bool = False
    begins: bool = False
    composed: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _by_words(numbers: str) -> str:
    """Returns a pattern of words with one sign before, numbers, signs with line ends, spaces."""
    signs = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
    return "|".join((_CONTRACTIONS, _LEAD + r"\p{L}+", numbers, signs, _SPACES))


def _by_case(numbers: str, ending: str = "") -> str:
    """Returns the pattern of `_by_words`, but a capital after a small letter begins a word."""
    words = f"{_LEAD}{_UPPER}*{_LOWER}+{ending}", f"{_LEAD}{_UPPER}+{_LOWER}*{ending}"
    return "|".join((*words, numbers, r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES))


_LLAMA3 = _Splitting(_by_words(r"\p{N}{1,3}"), whole_pieces=True, begins=True)
_CL100K = _Splitting(_by_words(r"\p{N}{1,3}"))
_QWEN2 = _Splitting(_by_words(r"\p{N}"))
_SPLITTINGS = {
    "gpt-2": _Splitting(),
    "olmo": _Splitting(),
    "smollm": _Splitting(digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _CL100K,
    "dbrx": _CL100K,
    "chatglm-bpe": _CL100K,
    "glm4": _CL100K,
    "qwen2": _QWEN2._replace(composed=True),
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _Splitting(_by_case(r"\p{N}"), whole_pieces=True, begins=True),
    "gpt-4o": _Splitting(_by_case(r"\p{N}{1,3}", f"{_CONTRACTIONS}?")),
}
"""Ways of splitting texts, by their `tokenizer.ggml.pre`."""


def gguf_tokenizer(path: Path) -> Any:
    """Makes the tokenizer of a GGUF file, with its chat template.

    It is kept in the folder `tokenizers` of the user's cache (see `kvjax.files.user_cache`), and
    loaded from there for any file with the same header.

    Args:
      path: the file.

    Returns:
      A `transformers` tokenizer.

    Raises:
      ValueError: the file cannot be read; it has no tokenizer, or one that is not supported; an
        entry is missing or wrong. One line names the file and the entry.
    """
    entries = _Entries(read_header(path))
    model = entries.get("model", str, needed=True)
    if model not in ("gpt2", "llama"):
        raise entries.error(
            f"tokenizer.ggml.model {brief(model)} is not supported; supported: gpt2, llama"
        )
    tokens = entries.items("tokens", str, "texts", needed=True)
    types = entries.items("token_type", int, "integers", len(tokens)) or [NORMAL] * len(tokens)
    special = _special_tokens(entries, tokens)
    begins, ends = (entries.get(f"add_{name}_token", bool) for name in ("bos", "eos"))
    # Without the entry, SentencePiece's texts and some byte-level ones begin with the start token.
    if begins is None:
        begins = model == "llama" or _splitting(entries).begins
    template, kept = entries.template(), _kept(entries.header)
    try:
        with quiet():  # transformers prints much, such as that there is no PyTorch
            # Imported here, since the import is slow and models work without a tokenizer.
            from transformers import PreTrainedTokenizerFast

            complete = functools.partial(
                PreTrainedTokenizerFast,
                chat_template=template,
                clean_up_tokenization_spaces=False,
                **{CHAT_STARTS: begins and "bos_token" in special},  # kept by `save_pretrained`
                **{name: token for name, (token, _) in special.items()},
            )
            if kept is not None and kept.exists():
                # A damaged file, for which `tokenizers` raises any exception, is made again.
                with contextlib.suppress(Exception):
                    return complete(tokenizer_file=str(kept))
            make = _byte_level if model == "gpt2" else _sentencepiece
            tokenizer = make(entries, tokens, types, special)
            types = token_types(
                tokens, types, template,
                lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
            )  # fmt: skip
            _add_tokens(tokenizer, tokens, types, entries.is_phi3())
            _add_ends(tokenizer, special, begins, bool(ends))
            if kept is not None:
                _keep(tokenizer, kept)
            return complete(tokenizer_object=tokenizer)
    except ValueError:
        raise
    except Exception as error:  # tokenizers raise plain exceptions
        raise entries.error(f"its tokenizer cannot be made: {one_line(error)}") from error


def _kept(header: GgufHeader) -> Path | None:
    """Returns where the tokenizer of a file is kept, or would be; None if nothing is kept."""
    root = user_cache()
    if root is None:
        return None
    import tokenizers  # imported here as in `gguf_tokenizer`

    made_from = f"{kvjax.__version__} {tokenizers.__version__} {header.digest}"
    return root / "tokenizers" / f"{hashlib.sha256(made_from.encode()).hexdigest()[:32]}.json"


def _keep(tokenizer: Any, path: Path) -> None:
    """Writes a tokenizer for later processes, if the folder can be written to.

    Loading it takes less time than merges and special tokens take to be made.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(path, tokenizer.to_str())
        keep_recently_used(path.parent.glob("*.json"), _MOST_BYTES)


class _Entries:
    """Metadata of a file's tokenizer."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header

    def error(self, message: str) -> ValueError:
        return ValueError(f"{self.header.path}: {message}")

    def get(self, name: str, expected: type, *, needed: bool = False) -> Any:
        """Returns the entry of this name; None if it is missing and not needed."""
        value = self.header.metadata.get(f"tokenizer.ggml.{name}")
        if value is None and not needed:
            return None
        if type(value) is not expected:  # a truth value is not an integer here
            shown = "it is missing" if value is None else f"got {brief(value)}"
            raise self.error(f"tokenizer.ggml.{name} must be of type {expected.__name__}, {shown}")
        return value

    def items(
        self,
        name: str,
        expected: type,
        plural: str,
        count: int | None = None,
        *,
        needed: bool = False,
    ) -> Any:
        """Returns the list of this name, of `count` items; None if missing and not needed."""
        items = self.get(name, list, needed=needed)
        if items is None:
            return None
        if set(map(type, items)) != {expected}:
            raise self.error(
                f"tokenizer.ggml.{name} must be a list of {plural}, got {brief(items)}"
            )
        if count not in (None, len(items)):
            raise self.error(
                f"tokenizer.ggml.{name} must have one entry for each of {count} tokens, "
                f"got {len(items)}"
            )
        return items

    def template(self) -> str | None:
        template = self.header.metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise self.error(f"tokenizer.chat_template must be text, got {brief(template)}")
        return template

    def is_phi3(self) -> bool:
        """Returns whether the model is a Phi-3, by its name, as in llama.cpp."""
        name = str(self.header.metadata.get("general.name", "")).lower()
        return "phi-3" in name or "phi3" in name


def _special_tokens(entries: _Entries, tokens: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Returns name in `transformers` → token and id, for special tokens that the file has."""
    special = {}
    for name, entry in _SPECIAL.items():
        index = entries.get(f"{entry}_token_id", int)
        if index is None:
            continue
        if not 0 <= index < len(tokens):
            raise entries.error(
                f"tokenizer.ggml.{entry}_token_id must be below the {len(tokens)} tokens, "
                f"got {index}"
            )
        special[name] = tokens[index], index
    return special


def _splitting(entries: _Entries) -> _Splitting:
    name = entries.get("pre", str, needed=True)
    if name not in _SPLITTINGS:
        raise entries.error(
            f"tokenizer.ggml.pre {brief(name)} is not supported; supported: "
            f"{', '.join(_SPLITTINGS)}"
        )
    return _SPLITTINGS[name]


def _byte_level(
    entries: _Entries, tokens: Sequence[str], types: Sequence[int], special: Mapping[str, Any]
) -> Any:
    """Makes a tokenizer whose tokens are sequences of bytes."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    splitting = _splitting(entries)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=_merges(entries),
            ignore_merges=splitting.whole_pieces,
        )
    )
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None)
    parts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitting.digits else []
    if splitting.pattern is not None:
        parts.append(pre_tokenizers.Split(Regex(splitting.pattern), "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    if splitting.composed:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _merges(entries: _Entries) -> list[tuple[str, str]]:
    merges = entries.items("merges", str, "texts", needed=True)
    pairs = [tuple(merge.split(" ")) for merge in merges]
    wrong = next((i for i, pair in enumerate(pairs) if len(pair) != 2 or not all(pair)), None)
    if wrong is not None:
        raise entries.error(
            f"tokenizer.ggml.merges must have two tokens with a space between, got "
            f"{brief(merges[wrong])}"
        )
    return pairs


def _sentencepiece(
    entries: _Entries, tokens: Sequence[str], types: Sequence[int], special: Mapping[str, Any]
) -> Any:
    """Makes a tokenizer of texts with a sign for a space; unknown characters become bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    if entries.get("merges", list):
        pairs = _merges(entries)
    else:
        scores = entries.items("scores", float, "numbers", len(tokens))
        if scores is None:
            raise entries.error("tokenizer.ggml.scores is missing, and so is tokenizer.ggml.merges")
        pairs = _scored(tokens, types, scores)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=pairs,
            unk_token=special["unk_token"][0] if "unk_token" in special else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    before = entries.get("add_space_prefix", bool) is not False
    first = [normalizers.Prepend(_SPACE)] if before else []
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _SPACE)])
    spaces = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    last = [decoders.Strip(" ", 1, 0)] if before else []
    tokenizer.decoder = decoders.Sequence([*spaces, *last])
    return tokenizer


def _scored(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Returns merges in SentencePiece's order: by the highest score of the resulting token.

    The score of a token does not depend on the two that it is merged from. Equal scores follow the
    order of the tokens.
    """
    known = {token: i for i, token in enumerate(tokens) if types[i] == NORMAL}
    merges: list[tuple[float, int, int, int]] = []
    for token, index in known.items():
        for cut in range(1, len(token)):
            start, end = known.get(token[:cut]), known.get(token[cut:])
            if start is not None and end is not None:
                merges.append((-scores[index], index, start, end))
    return [(tokens[start], tokens[end]) for *_, start, end in sorted(merges)]


def _add_tokens(tokenizer: Any, tokens: Sequence[str], types: Sequence[int], phi3: bool) -> None:
    """Adds the tokens that are recognised anywhere in a text and never merged.

    Those of Phi-3, except for a few, remove the white space after them, which files do not say.
    """
    from tokenizers import AddedToken

    for added_type, add in (
        (CONTROL, tokenizer.add_special_tokens), (USER_DEFINED, tokenizer.add_tokens),
    ):  # fmt: skip
        chosen = [
            token
            for token, token_type in zip(tokens, types, strict=True)
            if token_type == added_type and token
        ]
        add([
            AddedToken(
                token, normalized=False, special=added_type == CONTROL,
                rstrip=phi3 and token not in _KEEP_SPACES,
            )
            for token in chosen
        ])  # fmt: skip


def _add_ends(
    tokenizer: Any, special: Mapping[str, tuple[str, int]], begins: bool, ends: bool
) -> None:
    """Puts the start token before a text, and the end token after it."""
    from tokenizers import processors

    before = ["bos_token"] if begins and "bos_token" in special else []
    after = ["eos_token"] if ends and "eos_token" in special else []

    def around(text: str, number: int) -> list[str]:
        return [f"{piece}:{number}" for piece in (*before, text, *after)]

    tokenizer.post_processor = processors.TemplateProcessing(
        single=around("$A", 0),
        pair=around("$A", 0) + around("$B", 1),
        special_tokens=[
            {"id": name, "ids": [special[name][1]], "tokens": [special[name][0]]}
            for name in before + after
        ],
    )
