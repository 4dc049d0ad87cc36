"""Tokens of texts that follow each other in a prompt, and the places at which a text may be cut."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import regex
from jaxtyping import Bool, Int

_STOP, _CLOSING = r"[\p{Sentence_Terminal}--\p{ASCII}]", r"[\p{Pe}\p{Pf}]"

# The stops of ASCII stand inside words and numbers too, so white space must follow them. Other
# stops need none, and closing quotes and brackets after them belong to the sentence.
_BETWEEN_SENTENCES = regex.compile(
    rf"(?<=[.!?]) |(?<={_STOP}{_CLOSING}*)(?!{_STOP}|{_CLOSING}) ?(?=.)", regex.VERSION1
)
_SENTENCE_END = regex.compile(rf"[.\n]|{_STOP}+{_CLOSING}*", regex.VERSION1)

_NEAR = 100  # tokens or characters from a wanted place to the sentence end that is used instead


def sentences_of(text: str) -> list[str]:
    """Returns the sentences of a text, with white space reduced to single spaces.

    A sentence ends with `.`, `!` or `?` before white space, or with a stop of another script, such
    as `。`, `।` and `؟`: a character with the property `Sentence_Terminal` of Unicode.

    Example:
      >>> from kvjax.evaluation.tasks.encoder import sentences_of
      >>> sentences_of("Boats go.  They come! 船出发了。它们回来了！")
      ['Boats go.', 'They come!', '船出发了。', '它们回来了！']
    """
    return _BETWEEN_SENTENCES.split(" ".join(text.split()))


@dataclass(frozen=True)
class EncodedText:
    """A text and its tokens.

    Args:
      text: the text.
      tokens: its tokens.
      spans: for each token, the index of its first character, and the index after its last one.
    """

    text: str
    tokens: Int[np.ndarray, " N"]
    spans: Int[np.ndarray, "N 2"]

    @functools.cached_property
    def whole(self) -> Bool[np.ndarray, " N+1"]:
        """Whether characters before and after each place between tokens are whole.

        A character is what readers take for one, a grapheme cluster of Unicode: a letter with its
        vowel signs and accents. Tokens of single bytes, and some of several, end inside it.
        """
        starts, ends = self.spans.T
        begins = np.ones(len(self.text) + 1, bool)
        if not self.text.isascii():
            lengths = [len(character) for character in regex.findall(r"\X", self.text)]
            begins[:] = False
            begins[np.cumsum([0, *lengths])] = True
        # Tokens of one character have equal first characters, or they overlap.
        inside = (ends[:-1] <= starts[1:]) & (starts[:-1] < starts[1:]) & begins[starts[1:]]
        return np.concatenate(([True], inside, [True]))[: len(self.tokens) + 1]

    @functools.cached_property
    def sentence_ends(self) -> Bool[np.ndarray, " N+1"]:
        """Whether a sentence ends at each place between tokens.

        It ends with a full stop, a line break, or a stop of another script as in `sentences_of`.
        """
        ends = np.zeros(len(self.text) + 1, bool)
        ends[[match.end() for match in _SENTENCE_END.finditer(self.text)]] = True
        # Spaces at a token's end are behind the sentence, and a token of spaces ends none.
        written = [self.text[start:end].rstrip(" ") for start, end in self.spans.tolist()]
        last = [
            start + len(characters) if characters else 0
            for start, characters in zip(self.spans[:, 0].tolist(), written, strict=True)
        ]
        return self.whole & np.concatenate(([False], ends[last]))

    @property
    def characters(self) -> Int[np.ndarray, " N+1"]:
        """Number of characters before each place between tokens."""
        return np.concatenate(([0], self.spans[:, 1]))

    def count_before(self, character: int) -> int:
        """Returns the number of tokens before the one that has a character, given by its index."""
        starts, ends = self.spans.T
        # Tokens of single bytes may have empty spans, at the beginning of their character.
        return int(((starts < character) & (ends <= character)).sum())


@dataclass(frozen=True)
class Filler:
    """Tokens of a text in which sentences are hidden, and what stands at the places between them.

    Args:
      tokens: the tokens.
      whole: whether the characters around each place are whole.
      ends: whether a sentence ends at each place.
      characters: number of characters before each place.
    """

    tokens: Int[np.ndarray, " N"]
    whole: Bool[np.ndarray, " N+1"]
    ends: Bool[np.ndarray, " N+1"]
    characters: Int[np.ndarray, " N+1"]

    def cut(self, start: int, dots: Sequence[int]) -> Filler:
        """Returns as many tokens as there are dots, from a token on.

        Dots take the place of a character that would be cut at the end. Both ends count as ends of
        sentences.
        """
        room = len(dots)
        places = slice(start, start + room + 1)
        whole, ends = self.whole[places].copy(), self.ends[places].copy()
        kept = int(np.flatnonzero(whole)[-1])
        tokens = np.concatenate((self.tokens[start : start + kept], dots[kept:])).astype(np.int32)
        whole[-1] = ends[0] = ends[-1] = True
        return Filler(tokens, whole, ends, self.characters[places] - self.characters[start])

    def place_at(self, wanted: float, *, from_there: bool) -> int:
        """Returns the sentence end that is nearest to a wanted place, or the first one from there.

        If that is more than 100 tokens and more than 100 characters away, it returns the wanted
        place, or the nearest one that is in no character. The filler's own beginning and end, where
        no sentence need end, count up to 100 tokens.
        """
        ends, whole = np.flatnonzero(self.ends), np.flatnonzero(self.whole)
        middle = round(wanted)
        end = int(ends[np.searchsorted(ends, wanted)] if from_there else _nearest(ends, wanted))
        inside = 0 < end < len(self.tokens)
        characters = abs(int(self.characters[end] - self.characters[middle]))
        near = abs(end - wanted) <= _NEAR or (inside and characters <= _NEAR)
        return end if near else _nearest(whole, middle)


def _nearest(places: Int[np.ndarray, " P"], wanted: float) -> int:
    return int(places[np.abs(places - wanted).argmin()])


class Encoder:
    """Encodes texts that follow each other in one prompt.

    Special tokens that are spelled out in a text are read as text.

    Args:
      tokenizer: tokenizer of the model, from `transformers`.

    Raises:
      ValueError: the tokenizer cannot say which characters a token stands for.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError("tasks need a tokenizer with a tokenizer.json, the model's has none")
        self._tokenizer = tokenizer
        self._letter = self.first("a")
        self.encode_next = functools.lru_cache(2**16)(self._encode_next)
        self._dot = self.next(".")

    def first(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of the text that a prompt begins with."""
        return tuple(self.encode_first(text).tokens.tolist())

    def next(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of a text that begins with white space and follows another text."""
        return tuple(self.encode_next(text).tokens.tolist())

    def dots(self, count: int) -> list[int]:
        """Returns `count` tokens of dots: they stand for a character that does not fit."""
        return [*self._dot * count][:count]

    def encode_first(self, text: str) -> EncodedText:
        """Encodes the text that a prompt begins with."""
        encoded = self._tokenizer(
            text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True,
            verbose=False,
        )  # fmt: skip
        spans = np.array(encoded.offset_mapping, np.int64).reshape(-1, 2)
        return EncodedText(text, np.array(encoded.input_ids, np.int32), spans)

    def _encode_next(self, text: str) -> EncodedText:
        """Encodes a text that begins with white space and follows another text.

        Some tokenizers add a space before every text. Encoding the text after a letter avoids that,
        except for tokenizers that join white space to the word before it.
        """
        joined, letter = self.encode_first("a" + text), self._letter
        if tuple(joined.tokens[: len(letter)].tolist()) != letter:
            return self.encode_first(text)
        rest = slice(len(letter), None)
        return EncodedText(text, joined.tokens[rest], joined.spans[rest] - 1)
