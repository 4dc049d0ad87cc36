"""Quest: pages of tokens, recalled by a bound on what their keys can score (arXiv 2406.10774)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.budgets.budgets import Budget, check_budget, most_slots
from kvjax.cache.payload import take_slots, write_slots
from kvjax.cache.selection import newest
from kvjax.cache.slots import NEG_INF, KVCache
from kvjax.checks import check_count, check_flag
from kvjax.protocol import Step, View
from kvjax.transforms.recall import Recall, of_lists
from pallas_kernels import page_bounds, page_scores

PAGES = 3  # fewest that a budget must hold


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pages:
    """The index: page p of a head is its slots `p · page` to `(p + 1) · page`.

    Args:
      low, high: least and greatest value of each channel among a page's keys; 0 for no page.
      budget: pages to attend to, of each row.
    """

    low: Float[Array, "B H P D"]
    high: Float[Array, "B H P D"]
    budget: Int[Array, " B"]


@dataclass(frozen=True)
class Quest(Recall):
    """Keeps everything, and attends to the pages whose keys may score highest.

    Tokens stand in pages of `page`, in the order of their positions. Of each page P the index has
    the least and the greatest key, channel by channel, so that no token of it has a higher `q · k`
    than `u_P = Σ_c max(q_c · low_c, q_c · high_c)`. A decode step attends to the first page, to the
    newest and to those with the highest u, ties to the lower page, `budget / page` of them in all,
    listed in ascending order. The new token's key widens the bounds of its page, the newest, in
    place. In attention with a sliding window, pages that lie outside it as a whole are not taken.

    The index is `[B, H, P, D]` twice, in the dtype of the keys: 1 / `page` of keys and values.

    Args:
      budget: slots to attend to per KV head, a multiple of `page` and at least three pages. A float
        is a share of each row's tokens at the prompt's end, of which no more than `max_prompt`
        count, rounded down to whole pages, at least three.
      page: tokens of a page; 16 as in the paper.
      per_query_head: every query head chooses its own pages, as in the paper; else the greatest u
        over the group decides for a KV head.
      dense_layers: layers that stay as they are; the first two as in the paper. Give `()` to a
        model of two layers.
      first_page: always take the first page, which holds the attention sinks; False is the paper's
        form, where its u decides.

    Raises:
      TypeError, ValueError: a number out of range, `budget` below three pages or no multiple of
        `page`.

    Example:
      >>> import kvjax
      >>> kvjax.bind(kvjax.Quest(budget=1024), num_layers=3)[1:]
      (Full(), Quest(budget=1024, page=16, per_query_head=False, dense_layers=(), first_page=True))

    References:
      Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, arXiv
      2406.10774.

    Deviations from the paper:
      The default is one choice per KV head; `per_query_head=True` is the paper's. The first page is
      always taken, unless `first_page=False`: sinks have keys that their page's bounds say little
      about. The newest page is always taken too, however full it is. Over a cache that was evicted
      or merged at the prompt's end, pages are of the tokens that are left; on a further turn
      everything live is paged anew in rows that have tokens in it.
    """

    budget: Budget
    page: int = 16
    per_query_head: bool = False
    dense_layers: tuple[int, ...] = (0, 1)
    first_page: bool = True

    paper: ClassVar[str] = "Quest, arXiv 2406.10774"
    minimum = property(lambda self: PAGES * self.page)  # the smallest workable budget

    def __post_init__(self):
        super().__post_init__()
        check_flag("first_page", self.first_page)
        check_count("page", self.page, 1)
        check_budget(self.budget, self.minimum, f"{PAGES} pages of {self.page}")
        if isinstance(self.budget, int | np.integer) and self.budget % self.page:
            raise ValueError(f"budget must be a multiple of page={self.page}, got {self.budget}")

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, Pages]:
        """No pages yet."""
        batch, kv_heads, slots = cache.shape
        pages = -(-slots // self.page)
        most = max(most_slots(self.budget, cache.max_prompt, self.minimum) // self.page, PAGES)
        bounds = jnp.zeros((batch, kv_heads, pages, cache.k.shape[3]), cache.k.dtype)
        cache = self.with_lists(cache, min(most, pages) * self.page)
        return cache, Pages(bounds, bounds + 0, self._pages(cache))

    def select(self, view: View, state: Pages, query: Array) -> tuple[View, Pages]:
        """Adds the new token to its page, and takes the newest page and those of the highest u."""
        cache, length = view.cache, view.cache.lists[1]
        state = self._add(state, cache, view.slots)
        score = page_scores(
            query.reshape(*cache.shape[:2], cache.group, -1), state.low, state.high,
            implementation=view.implementation,
        )  # fmt: skip
        if not self.per_query_head:
            score = score.max(2)
        score = score.reshape(score.shape[0], -1, score.shape[-1])
        tokens, seen = of_lists(cache.used, cache), None
        if view.window is not None:
            seen = of_lists(self._seen(cache, view.window), cache)
        there, most = -(-tokens // self.page), length // self.page
        pages = self._choose(score, there, state.budget, most, seen)
        slot = pages[..., None] * self.page + _numbers(self.page)[None]
        slot = slot.reshape(*pages.shape[:2], length)
        return view.take(jnp.where(slot < tokens[..., None], slot, -1)), state

    def on_prompt(self, cache: KVCache, state: Pages, step: Step) -> tuple[None, Pages]:
        """Makes the pages of everything live, which stands in the order of positions."""
        slot = jax.lax.broadcasted_iota(jnp.int32, cache.shape, 2)
        # Keys as they are now, not as attention saw them: a part before may have merged them.
        bounds = page_bounds(cache.k.read(), slot, cache.used, self.page, state.low.shape[2])
        return None, step.of_rows(Pages(*bounds, self._pages(cache)), state)

    def _pages(self, cache: KVCache) -> Int[Array, " B"]:
        """Pages that each row attends to."""
        return jnp.maximum(self.rows_budget(cache) // self.page, PAGES)

    def _add(self, state: Pages, cache: KVCache, slots: Int[Array, "B H 1"]) -> Pages:
        """Bounds with the new token's key in them, unless the row has none in this step.

        It is done before attention, where the scores are then computed from the new bounds. XLA
        would copy bounds that are to be overwritten after they have been read.
        """
        key = cache.k.read(jnp.minimum(slots, cache.slots - 1))
        first = (slots % self.page == 0)[..., None]
        page = jnp.where(slots < cache.slots, slots // self.page, state.low.shape[2])

        def widen(bound: Array, extremum) -> Array:
            old = take_slots(bound, jnp.minimum(page, bound.shape[2] - 1))
            return write_slots(bound, page, jnp.where(first, key, extremum(old, key)))

        low, high = widen(state.low, jnp.minimum), widen(state.high, jnp.maximum)
        return dataclasses.replace(state, low=low, high=high)

    def _seen(self, cache: KVCache, window: int) -> Bool[Array, "B H P"]:
        """Pages that do not lie outside the window as a whole."""
        pages = -(-cache.slots // self.page)
        more = pages * self.page - cache.slots
        visible = jnp.pad(newest(cache, window), ((0, 0), (0, 0), (0, more)))
        return visible.reshape(*cache.shape[:2], pages, self.page).any(-1)

    def _choose(
        self,
        score: Float[Array, "B K P"],
        there: Int[Array, "B K"],
        budget: Int[Array, " B"],
        most: int,
        seen: Bool[Array, "B K P"] | None,
    ) -> Int[Array, "B K N"]:
        """The first and the newest of the pages there and the best others; P where there is none.

        Of those that are `seen`; None: all of them. In ascending order.
        """
        pages = score.shape[2]
        number, there = _numbers(pages), there[..., None]
        score = jnp.where(number < there, score, NEG_INF)
        always = number == there - 1
        if self.first_page:
            always |= number == 0
        score = jnp.where(always, jnp.inf, score)
        if seen is not None:  # the newest page is among them
            score = jnp.where(seen, score, NEG_INF)
            there = seen.sum(-1, keepdims=True, dtype=jnp.int32)
        # One more entry: XLA on CPU takes the top P of P by a sort.
        score = jnp.pad(score, ((0, 0), (0, 0), (0, 1)), constant_values=NEG_INF)
        _, best = jax.lax.top_k(score, most)
        taken = _numbers(most) < jnp.minimum(there, budget[:, None, None])
        return jnp.sort(jnp.where(taken, best, pages), axis=-1)


def _numbers(count: int) -> Int[Array, "1 1 N"]:
    return jnp.arange(count, dtype=jnp.int32)[None, None]
