"""Ring buffer of a layer with a sliding window: the tokens that later queries can still see."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kvjax.cache.selection import newest
from kvjax.cache.slots import KVCache
from kvjax.checks import check_count
from kvjax.decisions import Retain
from kvjax.protocol import Extent, KVTransform, State, Step
from kvjax.serialization import static_value


@static_value
@dataclass(frozen=True)
class Ring(KVTransform):
    """Keeps the tokens of a sliding window and no others: exact in a layer that has that window.

    A query at position p sees the positions `p - window + 1 … p`. No later query sees
    `p - window + 1`: its slot is free, and the next token takes it. So `window` slots are enough
    for a text of any length, and a cache has `min(window, max_prompt + max_new)` of them between
    calls. During a prompt it has slots for the prompt too, since the queries of a prompt of T
    tokens see `window - 1` tokens before it.

    Tokens are dropped by position, not by number: where a prompt has gaps in its positions, fewer
    than `window` tokens are held.

    `kvjax.bind` uses it in the layers whose `windows` are shorter than a text may become.

    Args:
      window: W, as given to `kvjax.attend`; it includes the query's own token.

    Raises:
      TypeError, ValueError: `window` is not an int, or below 1.

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
        """Bounds the cache to the window; between calls the next query's own token is missing."""
        held = extent.keep(max(self.window - 1, 1)).hold(self.window)
        return dataclasses.replace(held, window=self.window)

    def on_step(self, cache: KVCache, state: State, step: Step) -> tuple[Retain, State]:
        """Keeps the tokens that the next query sees, after a step and at the end of a prompt."""
        return Retain(newest(cache, self.window - 1)), state

    on_prompt = on_step
