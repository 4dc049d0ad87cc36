"""Text of each row as it is written, up to a stop string."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import kvjax
from kvjax.generation.continuation import Continuation, TextDecoder

_FIRST_SIGN = 0xD800  # a surrogate, which no decoded text contains


class Row:
    """The text of one row.

    Args:
      decode: returns the text of token ids; a tokenizer's leaves special tokens out.
      prompt: tokens before the text.
      stops: texts that end the row. They and the text after them are not part of the row's text.
        Names of special tokens in them match these tokens too.
      on_text: receives the text piece by piece, once later tokens cannot change it.

    Attributes:
      new_tokens: number of tokens so far, up to the one that completed a stop string.
      over: whether the row takes no more tokens.
      stopped: whether a stop string has ended the row.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        self._continuation = Continuation(decode, prompt)
        special = decode.special if isinstance(decode, TextDecoder) else {}
        self._signs, self._stops = _signed(stops, special)
        self._on_text = on_text or (lambda text: None)
        # Text with signs for special tokens that may end the row, and the length passed on.
        self._certain, self._passed = "", 0
        self.new_tokens, self.over, self.stopped = 0, False, False

    @property
    def text(self) -> str:
        """The text that `on_text` has received."""
        return _unsigned(self._certain[: self._passed])

    def add(self, tokens: Sequence[int]) -> None:
        """Adds tokens, up to the one that completes a stop string."""
        for piece in [[token] for token in tokens] if self._stops else [tokens]:
            if self.over:
                return
            self.new_tokens += len(piece)
            text = self._continuation.add(piece)
            self._take(text + "".join(self._signs.get(token, "") for token in piece))

    def finish(self, end: int | None = None) -> None:
        """Passes the rest of the text on, after the last token; `end` is the row's end token."""
        if not self.over:
            sign = "" if end is None else self._signs.get(end, "")
            self._take(self._continuation.finish() + sign)
            if not self.over:
                self._pass_on(len(self._certain))
        self.over = True

    def _take(self, text: str) -> None:
        """Adds text, passes on all that cannot be part of a stop string, and looks for these."""
        self._certain += text
        places = [self._certain.find(stop) for stop in self._stops if stop in self._certain]
        if places:
            self._pass_on(min(places))
            self.over = self.stopped = True
            return
        # An end of the text that may begin a stop string waits for the next tokens.
        begun = (
            size
            for stop in self._stops
            for size in range(1, len(stop))
            if self._certain.endswith(stop[:size])
        )
        self._pass_on(len(self._certain) - max(begun, default=0))

    def _pass_on(self, until: int) -> None:
        piece = _unsigned(self._certain[self._passed : until])
        self._passed = max(until, self._passed)
        if piece:
            self._on_text(piece)


def _signed(stops: Sequence[str], special: Mapping[int, str]) -> tuple[dict[int, str], list[str]]:
    """Returns a sign for each special token that stop strings name, and the stop strings.

    The stop strings are the original ones and those with signs in place of names.
    """
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
    """Shows the texts of rows in order: each as it is written, once the rows before it are over.

    Args:
      rows: the rows, which take the tokens.
      headers: text shown before each row's text.
      show: receives text piece by piece.
    """

    def __init__(
        self, rows: Sequence[Row], headers: Sequence[str], show: Callable[[str], None]
    ) -> None:
        self._remaining = [*zip(headers, rows, strict=True)]
        self._show, self._shown = show, 0

    def update(self) -> None:
        """Shows the text that was added since the last call."""
        while self._remaining:
            header, row = self._remaining[0]
            text = header + row.text + "\n" * row.over
            if len(text) > self._shown:
                self._show(text[self._shown :])
                self._shown = len(text)
            if not row.over:
                return
            self._remaining, self._shown = self._remaining[1:], 0


def write(
    model: Any,
    prompts: Sequence[Sequence[int] | None] | None,
    rows: Sequence[Row],
    *,
    streaming: bool,
    on_step: Callable[[int], None] = lambda count: None,
    stopped: Callable[[], bool] = lambda: False,
    **options: Any,
) -> kvjax.Generation:
    """Continues prompts until every row is over, and adds each row's tokens to it.

    Args:
      model, prompts, options: as for `kvjax.generate`.
      rows: the rows, which take the tokens.
      streaming: whether rows take tokens after every step, and may end before the model does.
      on_step: receives the new tokens of the longest row so far; it is called once more at the end.
      stopped: all rows end once this returns true.
    """
    if not streaming:
        result = kvjax.generate(model, prompts, **options)
        for row, tokens in zip(rows, result.tokens, strict=True):
            row.add(tokens)
    else:
        steps = kvjax.stream(model, prompts, **options)
        result, ended = None, [False] * len(rows)
        for new_tokens in steps:
            longest = max(map(len, new_tokens))
            for number, (row, tokens) in enumerate(zip(rows, new_tokens, strict=True)):
                row.add(tokens)
                ended[number] |= len(tokens) < longest  # the row has reached an end token
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
    """Returns whether a row was cut: it reached its maximum of tokens without an end or a stop.

    Args:
      row: the row.
      result: generation of all rows.
      number: index of the row.
      most: maximum new tokens of the row.
    """
    return not row.stopped and not result.ended[number] and row.new_tokens >= most
