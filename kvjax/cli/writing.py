"""The text of each row as it comes, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import kvjax
from kvjax.generation.continuation import Continuation


class Row:
    """One row's text.

    Args:
      decode: token ids → text.
      prompt: the tokens before it.
      stops: texts that end the row; neither they nor what follows them is part of the text.
      on_text: is given the text piece by piece, as soon as nothing can change it.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        self._continuation = Continuation(decode, prompt)
        self._stops, self._on_text = stops, on_text or (lambda text: None)
        self._certain, self._given = "", 0
        self.new_tokens, self.over = 0, False

    @property
    def text(self) -> str:
        """The text that `on_text` has been given."""
        return self._certain[: self._given]

    def add(self, tokens: Sequence[int]) -> None:
        """Takes more tokens, up to the one that completes a stop string."""
        for piece in [[token] for token in tokens] if self._stops else [tokens]:
            if self.over:
                return
            self.new_tokens += len(piece)
            self._take(self._continuation.add(piece))

    def finish(self) -> None:
        """Gives the rest of the text, after the last token."""
        if not self.over:
            self._take(self._continuation.finish())
            self._give(len(self._certain))
        self.over = True

    def _take(self, text: str) -> None:
        self._certain += text
        places = [self._certain.find(stop) for stop in self._stops]
        found = [place for place in places if place >= 0]
        if found:
            self._give(min(found))
            self.over = True
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
        if until > self._given:
            self._on_text(self._certain[self._given : until])
            self._given = until


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
      on_step: is given the most new tokens of a row so far.
      stopped: ends all rows once it is true.
    """
    if not streaming:
        result = kvjax.generate(model, prompts, **options)
        for row, tokens in zip(rows, result.tokens, strict=True):
            row.add(tokens)
    else:
        steps = kvjax.stream(model, prompts, **options)
        result = None
        for new in steps:
            most = max(map(len, new))
            for row, tokens in zip(rows, new, strict=True):
                row.add(tokens)
                if len(tokens) < most:  # it has come to an end token
                    row.finish()
            on_step(max(row.new_tokens for row in rows))
            if stopped() or all(row.over for row in rows):
                result = steps.stop()
                break
        result = result or steps.result
    for row in rows:
        row.finish()
    return result
