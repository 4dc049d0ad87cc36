"""The text of each row as it comes, up to a stop string."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import kvjax
from kvjax.generation.continuation import Continuation, Decoder

_FIRST_SIGN = 0xD800  # no text has such a character alone


class Row:
    """One row's text.

    Args:
      decode: token ids → text. One of a tokenizer leaves special tokens out.
      prompt: the tokens before it.
      stops: texts that end the row; neither they nor what follows them is part of the text. Names
        of special tokens in them stand for the tokens too.
      on_text: is given the text piece by piece, as soon as nothing can change it.

    Attributes:
      new_tokens: how many have come, up to the one that completed a stop string.
      over: no more tokens are taken.
      stopped: a stop string has come.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        self._continuation = Continuation(decode, prompt)
        special = decode.special if isinstance(decode, Decoder) else {}
        self._signs, self._stops = _signed(stops, special)
        self._on_text = on_text or (lambda text: None)
        self._certain, self._given = "", 0  # with signs in place of tokens that may end the row
        self.new_tokens, self.over, self.stopped = 0, False, False

    @property
    def text(self) -> str:
        """The text that `on_text` has been given."""
        return _unsigned(self._certain[: self._given])

    def add(self, tokens: Sequence[int]) -> None:
        """Takes more tokens, up to the one that completes a stop string."""
        for piece in [[token] for token in tokens] if self._stops else [tokens]:
            if self.over:
                return
            self.new_tokens += len(piece)
            text = self._continuation.add(piece)
            self._take(text + "".join(self._signs.get(token, "") for token in piece))

    def finish(self, end: int | None = None) -> None:
        """Gives the rest of the text, after the last token; `end` is the end token behind it."""
        if not self.over:
            sign = "" if end is None else self._signs.get(end, "")
            self._take(self._continuation.finish() + sign)
            if not self.over:
                self._give(len(self._certain))
        self.over = True

    def _take(self, text: str) -> None:
        self._certain += text
        places = [self._certain.find(stop) for stop in self._stops if stop in self._certain]
        if places:
            self._give(min(places))
            self.over = self.stopped = True
            return
        # An end that begins a stop string waits for what follows.
        begun = (
            size
            for stop in self._stops
            for size in range(1, len(stop))
            if self._certain.endswith(stop[:size])
        )
        self._give(len(self._certain) - max(begun, default=0))

    def _give(self, until: int) -> None:
        piece = _unsigned(self._certain[self._given : until])
        self._given = max(until, self._given)
        if piece:
            self._on_text(piece)


def _signed(stops: Sequence[str], special: Mapping[int, str]) -> tuple[dict[int, str], list[str]]:
    """A sign for each special token that stop strings name, and the strings with these signs."""
    named = [token for token, name in special.items() if any(name in stop for stop in stops)]
    signs = {token: chr(_FIRST_SIGN + number) for number, token in enumerate(named)}
    by_name = {special[token]: sign for token, sign in signs.items()}
    longest_first = sorted(map(re.escape, by_name), key=len, reverse=True)
    names = re.compile("|".join(longest_first))
    signed = [names.sub(lambda match: by_name[match[0]], stop) for stop in stops] if named else []
    return signs, [*stops, *signed]


def _unsigned(text: str) -> str:
    return re.sub(r"[\ud800-\udfff]", "", text)


class InOrder:
    """The texts of rows in their order: each as it comes, once those before it are over.

    Args:
      rows: take the tokens.
      headers: what is shown before each text.
      show: is given text piece by piece.
    """

    def __init__(
        self, rows: Sequence[Row], headers: Sequence[str], show: Callable[[str], None]
    ) -> None:
        self._left, self._show, self._shown = [*zip(headers, rows, strict=True)], show, 0

    def update(self) -> None:
        """Shows what has come since the last call."""
        while self._left:
            header, row = self._left[0]
            text = header + row.text + "\n" * row.over
            if len(text) > self._shown:
                self._show(text[self._shown :])
                self._shown = len(text)
            if not row.over:
                return
            self._left, self._shown = self._left[1:], 0


def write(
    model: Any,
    prompts: Sequence[Sequence[int]] | None,
    rows: Sequence[Row],
    *,
    streaming: bool,
    on_step: Callable[[int], None] = lambda count: None,
    stopped: Callable[[], bool] = lambda: False,
    **options: Any,
) -> kvjax.Generation:
    """Continues prompts until every row is over, and gives each row its text.

    Args:
      model, prompts, options: as for `kvjax.generate`.
      rows: take the tokens.
      streaming: rows take them as they come, and may end before the model would.
      on_step: is given the most new tokens of a row so far, and is called once more at the end.
      stopped: ends all rows once it is true.
    """
    if not streaming:
        result = kvjax.generate(model, prompts, **options)
        for row, tokens in zip(rows, result.tokens, strict=True):
            row.add(tokens)
    else:
        steps = kvjax.stream(model, prompts, **options)
        result, ended = None, [False] * len(rows)
        for new in steps:
            most = max(map(len, new))
            for number, (row, tokens) in enumerate(zip(rows, new, strict=True)):
                row.add(tokens)
                ended[number] |= len(tokens) < most  # it has come to an end token
            on_step(max(row.new_tokens for row in rows))
            if stopped() or all(row.over or end for row, end in zip(rows, ended, strict=True)):
                result = steps.stop()
                break
        result = result or steps.result
    for row, end in zip(rows, result.ended_by, strict=True):
        row.finish(end)
    on_step(max(row.new_tokens for row in rows))
    return result


def is_cut(row: Row, result: kvjax.Generation, number: int, most: int) -> bool:
    """Whether a row has neither ended nor been stopped, but has all the tokens it may have.

    Args:
      row: the row.
      result: of all rows; `number` is the row's.
      most: new tokens that it may have.
    """
    return not row.stopped and not result.ended[number] and row.new_tokens >= most
