"""SpindleKV's eviction: deep layers keep less of a prompt than shallow ones (arXiv 2507.06517)."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from kvjax.budgets.layers import LayerBudget, Table, layers_alike
from kvjax.cache.selection import newest
from kvjax.cache.slots import KVCache
from kvjax.checks import check_count, check_flag, check_number
from kvjax.decisions import Keep
from kvjax.protocol import Card, KVTransform, Needs, Step
from kvjax.serialization import named, static_value
from kvjax.transforms.held_budget import PromptBudget
from kvjax.transforms.snapkv import MOST_WINDOW, by_query_head, window_attention
from kvjax.transforms.spindlekv.schedule import SpindleBudget


@named("layer_budget")
@dataclass(frozen=True)
class LayerBudgetEviction(KVTransform):
    """Keeps the newest tokens of a prompt and those that they attend to, fewer in each layer.

    The W newest tokens always stay; the others are the context. With L tokens in a prompt, the
    share of the context that stays is `r_c = (r·L - W) / (L - W)` on average over layers. It falls
    linearly from layer 0 to the last, with `α = (1 + β) / 2`:

        β < r_c ≤ α:  from min(1, 2·r_c - β) to β         α < r_c:  from 1 to 2·r_c - 1

    For `r_c ≤ β` every layer has `max(r_c, 0)`. A layer keeps the W newest tokens and the
    `⌊r_c(layer) · (L - W)⌋` context tokens with the highest score. The score of token `a` is
    `Σ_t p[t, a] / (L - a)`, summed over the last W queries t. Decoding evicts nothing. Pass the
    transform to `bind`.

    Args:
      reserve: r, the share of each row's tokens that the layers keep on average, window included.
      window: W; 32, since the paper does not give it.
      beta: β, 0.05 as in the paper.
      unfold: every query head decides for itself and has slots of its own (the paper's "repeat").
        The cache then has Q lists, and a token is stored once per query head that keeps it; a
        `Codebook` stores its vector once all the same. False: a KV head decides by the mean over
        its query heads.

    Raises:
      TypeError, ValueError: an argument is not a number; `reserve` or `beta` outside (0, 1];
        `window` below 1.

    Example:
      >>> import kvjax
      >>> layers = kvjax.bind(kvjax.LayerBudgetEviction(reserve=0.5), num_layers=3)
      >>> [layer.extent(kvjax.kit.Extent(1024, 0)).prompt for layer in layers]
      [942, 512, 81]

    References:
      Tang et al., SpindleKV: A Novel KV Cache Reduction Method Balancing Both Shallow and Deep
      Layers, arXiv 2507.06517, section 3.3.

    Deviations from the paper:
      For `r_c > α` the paper prints `1 - 2·r_c` for the last layer, which is negative; `2·r_c - 1`
      keeps the mean. A further turn compresses everything live as if it were one prompt.
    """

    reserve: float
    window: int = 32
    beta: float = 0.05
    unfold: bool = False

    card = Card(
        acts="prompt", paper="SpindleKV, arXiv 2507.06517", when="now",
        small={"reserve": 0.5, "window": 4},
    )  # fmt: skip

    def __post_init__(self):
        check_number("reserve", self.reserve, 0.0, 1.0)
        check_count("window", self.window, 1, MOST_WINDOW)
        check_number("beta", self.beta, 0.0, 1.0)
        check_flag("unfold", self.unfold)

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """Returns the eviction of one layer, with its schedule."""
        schedule = SpindleBudget(self.reserve, self.window, self.beta, num_layers)
        budget = LayerBudget(schedule, layers_alike(layer, num_layers))
        return LayerEviction(budget, self.window, self.unfold)


@static_value
@dataclass(frozen=True)
class LayerEviction(PromptBudget):
    """SpindleKV's eviction in one layer; made by `LayerBudgetEviction.for_layer`.

    Args:
      budget: slots kept of the prompt, window included.
      window, unfold: as in `LayerBudgetEviction`.
    """

    budget: LayerBudget
    window: int
    unfold: bool

    minimum = property(lambda self: self.window)  # the smallest workable budget

    @property
    def needs(self) -> Needs:
        """The last queries of a prompt."""
        return Needs(query_window=self.window, unfold=self.unfold)

    def on_prompt(self, cache: KVCache, state: Table, step: Step) -> tuple[Keep, Table]:
        """Keeps the newest tokens and those with the highest attention divided by age."""
        budget = self.rows_budget(cache, state)
        received = window_attention(cache, step, self.window)
        age = (cache.length[:, None, None] - cache.position).astype(jnp.float32)  # L - a
        context = cache.live & ~newest(cache, self.window)
        score = received * jnp.where(context, 1.0 / age, 0.0)[:, :, None]
        return Keep(budget, by_query_head(score), newest=self.window), state
