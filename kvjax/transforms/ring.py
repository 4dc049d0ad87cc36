"""The ring of a layer with a sliding window: the tokens that a later query can still see."""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.cache.selection import newest
from kvjax.cache.slots import KVCache
from kvjax.checks import check_count
from kvjax.decisions import Retain
from kvjax.protocol import Extent, KVTransform, State, Step


@dataclass(frozen=True)
class Ring(KVTransform):
    """Keeps the tokens of a sliding window and no others: exact in a layer that has that window.

    A query at position p sees the positions `p - window + 1 … p`. When it has been answered,
    `p - window + 1` is seen by nobody any more: its slot is free, and the next token takes it. So
    `window` slots are enough for any text, and a cache has `min(window, max_prompt + max_new)` of
    them between calls. While a prompt is read it has slots for the prompt too, since the queries of
    a prompt of T tokens see `window - 1` tokens before it.

    Which tokens go is a matter of positions, not of their number: where a prompt comes with gaps,
    fewer than `window` are held.

    `kvjax.bind` gives it to the layers whose `windows` are shorter than a text may become.

    Args:
      window: W, as given to `kvjax.attend`; the query's own token is one of them.

    Raises:
      TypeError, ValueError: `window` is no int, or below 1.

    Example:
      >>> import kvjax
      >>> kvjax.Ring(window=1024).extent(kvjax.kit.Extent(prompt=32_768, new=512)).total
      1024
      >>> kvjax.Ring(window=1024).extent(kvjax.kit.Extent(prompt=200, new=64)).total
      264
    """

    window: int

    def __post_init__(self):
        check_count("window", self.window, 1)

    def extent(self, extent: Extent) -> Extent:
        """What the next query sees beside its own token, and that token."""
        return extent.keep(max(self.window - 1, 1)).hold(self.window)

    def on_step(self, cache: KVCache, state: State, step: Step) -> tuple[Retain, State]:
        """Keeps what the next query sees, at the end of a prompt as after a step."""
        return Retain(newest(cache, self.window - 1)), state

    on_prompt = on_step
