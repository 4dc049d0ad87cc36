"""StreamingLLM: attention sinks and the newest tokens (arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.budgets.budgets import Budget, check_budget
from kvjax.cache.slots import KVCache
from kvjax.checks import check_count, check_flag
from kvjax.decisions import Keep
from kvjax.protocol import Card, Needs, Step
from kvjax.serialization import named
from kvjax.transforms.held_budget import Budgets, HeldBudget


@named("streaming_llm")
@dataclass(frozen=True)
class StreamingLLM(HeldBudget):
    """Keeps the first `sinks` tokens and the newest `budget - sinks`.

    While decoding, each new token replaces the oldest one that is not a sink. After a step the
    cache therefore never holds more than `budget` tokens, generated ones included.

    Args:
      budget: live slots per KV head, sinks included; a float is a share of each row's prompt.
      sinks: tokens at positions 0 … sinks − 1 that always stay; 4 as in the paper.
      reposition: rotate keys by their rank in the cache instead of their position, and the query by
        the last rank, as the paper does. Keys are then stored unrotated, and `attend` needs `rope`.
        False by default: original positions.

    Raises:
      TypeError, ValueError: `budget` is not a number, below `sinks + 1` or a share outside (0, 1].

    Example:
      >>> import kvjax
      >>> kvjax.StreamingLLM(budget=256).extent(kvjax.kit.Extent(prompt=4096, new=1000)).total
      257

    References:
      Xiao et al., Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453.

    Deviations from the paper:
      The whole prompt attends to itself, and eviction happens at its end; the paper streams the
      prompt through the window. Positions are the original ones unless `reposition=True`.
    """

    budget: Budget
    sinks: int = 4
    reposition: bool = False

    card = Card(
        acts="prompt, every step", paper="StreamingLLM, arXiv 2309.17453", when="endless",
        examples=("--method streaming_llm --budget 1024",),
    )  # fmt: skip
    minimum = property(lambda self: self.sinks + 1)  # the smallest workable budget

    @property
    def needs(self) -> Needs:
        """Keys without rotation where they are repositioned."""
        return Needs(unrotated_keys=self.reposition, reposition=self.reposition)

    def __post_init__(self):
        check_count("sinks", self.sinks, 0)
        check_flag("reposition", self.reposition)
        check_budget(self.budget, self.minimum, "sinks + 1")

    def on_step(self, cache: KVCache, state: Budgets, step: Step) -> tuple[Keep, Budgets]:
        """Keeps the sinks and the newest of the other tokens."""
        sinks = cache.position < self.sinks
        recent = state - self.sinks
        return Keep(state, None, always=sinks, newest=recent, newest_first=True), state
