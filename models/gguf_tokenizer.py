"""The tokenizer and the chat template that a GGUF file has in its metadata.

`transformers` reads them too, but needs PyTorch for it, knows few architectures, and takes texts
apart in GPT-2's way where it does not know how the model does. The tokenizer is therefore made here
from `tokenizers`, and an unknown way of taking texts apart is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.generation.chat import CHAT_STARTS
from kvjax.messages import brief, one_line, quiet

from .gguf_header import GgufHeader, read_header
from .gguf_special_tokens import CONTROL, NORMAL, USER_DEFINED, token_types

_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")  # of the tokens of Phi-3
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a space in SentencePiece's tokens


class _Splitting(NamedTuple):
    """How a byte-level tokenizer takes a text apart before it merges.

    Attributes:
      pattern: what is one piece; None: as GPT-2 does.
      digits: digits stand alone, before the pattern is looked for.
      whole_pieces: a piece that is a token is not merged from smaller ones.
      begins: a text begins with the first token where the file does not say so.
      composed: characters are brought into Unicode's form NFC first.
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
    """Words with one sign before them, numbers, signs with line ends after them, spaces."""
    signs = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
    return "|".join((_CONTRACTIONS, _LEAD + r"\p{L}+", numbers, signs, _SPACES))


def _by_case(numbers: str, ending: str = "") -> str:
    """The same, but a capital letter after a small one begins a word."""
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
"""Ways of taking texts apart, by their `tokenizer.ggml.pre`."""


def gguf_tokenizer(path: Path) -> Any:
    """The tokenizer of a GGUF file, with its chat template.

    Args:
      path: the file.

    Returns:
      A `transformers` tokenizer.

    Raises:
      ValueError: the file cannot be read; it has no tokenizer, or one that is not supported; an
        entry of it is missing or wrong. One line names the file and the entry.
    """
    entries = _Entries(read_header(path))
    kind = entries.get("model", str, needed=True)
    if kind not in ("gpt2", "llama"):
        raise entries.error(
            f"tokenizer.ggml.model {brief(kind)} is not supported; supported: gpt2, llama"
        )
    tokens = entries.items("tokens", str, "texts", needed=True)
    types = entries.items("token_type", int, "integers", len(tokens)) or [NORMAL] * len(tokens)
    special = _special_tokens(entries, tokens)
    begins, ends = (entries.get(f"add_{name}_token", bool) for name in ("bos", "eos"))
    if begins is None:
        begins = kind == "llama" or _splitting(entries).begins
    try:
        with quiet():  # transformers has much to say, such as that there is no PyTorch
            make = _byte_level if kind == "gpt2" else _sentencepiece
            made = make(entries, tokens, types, special)
            template = entries.template()
            types = token_types(
                tokens, types, template,
                lambda text: made.encode(text, add_special_tokens=False).ids,
            )  # fmt: skip
            _add_tokens(made, tokens, types, entries.is_phi3())
            _add_ends(made, special, begins, bool(ends))
            # Imported here: models work without a tokenizer, and this takes a while.
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast(
                tokenizer_object=made,
                chat_template=template,
                clean_up_tokenization_spaces=False,
                **{CHAT_STARTS: begins and "bos_token" in special},  # kept by `save_pretrained`
                **{name: token for name, (token, _) in special.items()},
            )
    except ValueError:
        raise
    except Exception as error:  # tokenizers raise plain exceptions
        raise entries.error(f"its tokenizer cannot be made: {one_line(error)}") from error


class _Entries:
    """The metadata of a file's tokenizer."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header

    def error(self, message: str) -> ValueError:
        return ValueError(f"{self._header.path}: {message}")

    def get(self, name: str, kind: type, *, needed: bool = False) -> Any:
        """The entry of this name; None where it is missing, and is not needed."""
        value = self._header.metadata.get(f"tokenizer.ggml.{name}")
        if value is None and not needed:
            return None
        if type(value) is not kind:  # a truth value is no integer here
            shown = "it is missing" if value is None else f"got {brief(value)}"
            raise self.error(f"tokenizer.ggml.{name} must be of type {kind.__name__}, {shown}")
        return value

    def items(
        self, name: str, kind: type, what: str, count: int | None = None, *, needed: bool = False
    ) -> Any:
        """The list of this name, of `count` items; None where it is missing, and is not needed."""
        items = self.get(name, list, needed=needed)
        if items is None:
            return None
        if not items or not all(type(item) is kind for item in items):
            raise self.error(f"tokenizer.ggml.{name} must be a list of {what}, got {brief(items)}")
        if count not in (None, len(items)):
            raise self.error(
                f"tokenizer.ggml.{name} must have one entry for each of {count} tokens, "
                f"got {len(items)}"
            )
        return items

    def template(self) -> str | None:
        given = self._header.metadata.get("tokenizer.chat_template")
        if given is not None and not isinstance(given, str):
            raise self.error(f"tokenizer.chat_template must be text, got {brief(given)}")
        return given

    def is_phi3(self) -> bool:
        """Whether the model is one of Phi-3, by its name, as llama.cpp finds out."""
        name = str(self._header.metadata.get("general.name", "")).lower()
        return "phi-3" in name or "phi3" in name


def _special_tokens(entries: _Entries, tokens: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Name in `transformers` → token and id, of those that the file has."""
    found = {}
    for name, theirs in _SPECIAL.items():
        index = entries.get(f"{theirs}_token_id", int)
        if index is None:
            continue
        if not 0 <= index < len(tokens):
            raise entries.error(
                f"tokenizer.ggml.{theirs}_token_id must be below the {len(tokens)} tokens, "
                f"got {index}"
            )
        found[name] = tokens[index], index
    return found


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
    """A tokenizer whose tokens are sequences of bytes."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    way = _splitting(entries)
    made = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=_merges(entries),
            ignore_merges=way.whole_pieces,
        )
    )
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=way.pattern is None)
    parts = [pre_tokenizers.Digits(individual_digits=True)] if way.digits else []
    if way.pattern is not None:
        parts.append(pre_tokenizers.Split(Regex(way.pattern), "isolated"))
    made.pre_tokenizer = pre_tokenizers.Sequence([*parts, bytes_of])
    made.decoder = decoders.ByteLevel()
    if way.composed:
        made.normalizer = normalizers.NFC()
    return made


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
    """A tokenizer whose tokens are texts with a sign for a space; other characters are bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    if entries.get("merges", list):
        pairs = _merges(entries)
    else:
        scores = entries.items("scores", float, "numbers", len(tokens))
        if scores is None:
            raise entries.error("tokenizer.ggml.scores is missing, and so is tokenizer.ggml.merges")
        pairs = _scored(tokens, types, scores)
    made = Tokenizer(
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
    made.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _SPACE)])
    spaces = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    last = [decoders.Strip(" ", 1, 0)] if before else []
    made.decoder = decoders.Sequence([*spaces, *last])
    return made


def _scored(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Merges in the order in which SentencePiece makes them: the highest score of what comes out.

    A score belongs to a token, whichever two it is merged from. Equal scores follow the tokens'
    order.
    """
    known = {token: i for i, token in enumerate(tokens) if types[i] == NORMAL}
    found = []
    for token, index in known.items():
        for cut in range(1, len(token)):
            left, right = known.get(token[:cut]), known.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[index], index, left, right))
    return [(tokens[left], tokens[right]) for *_, left, right in sorted(found)]


def _add_tokens(made: Any, tokens: Sequence[str], types: Sequence[int], phi3: bool) -> None:
    """Makes tokens that are never merged stand as they are, wherever a text has them.

    Those of Phi-3 take the white space behind them away, but for a few; files do not say so.
    """
    from tokenizers import AddedToken

    for kind, add in ((CONTROL, made.add_special_tokens), (USER_DEFINED, made.add_tokens)):
        chosen = [token for token, own in zip(tokens, types, strict=True) if own == kind and token]
        add([
            AddedToken(
                token, normalized=False, special=kind == CONTROL,
                rstrip=phi3 and token not in _KEEP_SPACES,
            )
            for token in chosen
        ])  # fmt: skip


def _add_ends(made: Any, special: Mapping[str, tuple[str, int]], begins: bool, ends: bool) -> None:
    """Puts the first token before a text, and the end token behind it."""
    from tokenizers import processors

    before = ["bos_token"] if begins and "bos_token" in special else []
    after = ["eos_token"] if ends and "eos_token" in special else []

    def around(text: str, number: int) -> list[str]:
        return [f"{piece}:{number}" for piece in (*before, text, *after)]

    made.post_processor = processors.TemplateProcessing(
        single=around("$A", 0),
        pair=around("$A", 0) + around("$B", 1),
        special_tokens=[
            {"id": name, "ids": [special[name][1]], "tokens": [special[name][0]]}
            for name in before + after
        ],
    )
