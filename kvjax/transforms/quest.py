"""Quest: pages of tokens, recalled by what their keys can score (arXiv 2406.10774)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kvjax.budgets.budgets import Budget, check_budget, most_slots
from kvjax.cache.payload import take_slots, write_slots
from kvjax.cache.selection import newest
from kvjax.cache.slots import NEG_INF, KVCache
from kvjax.checks import check_count, check_flag, check_number
from kvjax.protocol import Card, Step, View
from kvjax.serialization import named, pytree_node
from kvjax.transforms.recall import Recall, of_lists
from pallas_kernels import page_bounds, page_moments, page_scores
from pallas_kernels.base.annotations import NoneElsewhere

PAGES = 3  # smallest number of pages that a budget must hold


@pytree_node
class Moments(NamedTuple):
    """Mean and variance of a page's keys, by channel, each key as heavy as its mass."""

    mean: Float[Array, "B H *P D"]
    variance: Float[Array, "B H *P D"]

    def with_key(self, key: Float[Array, "B H D"], before: Float[Array, "B H 1"]) -> Moments:
        """Returns the moments with one more key, of mass 1 (Welford's update).

        Args:
          before: mass of the keys before it.
        """
        # Nothing of the page before stays, not even what is not a number.
        mean, variance = (
            jnp.where(before > 0, old, new) for old, new in zip(self, (key, 0.0), strict=True)
        )
        new_mean = mean + (key - mean) / (before + 1)
        squares = before * variance + (key - mean) * (key - new_mean)
        return Moments(new_mean, squares / (before + 1))


@pytree_node
@dataclass(frozen=True)
class Pages:
    """Index of pages: page p of a head is its slots `p · page` to `(p + 1) · page`.

    Args:
      low, high: bounds of each channel of a page's keys; 0 where there is no page.
      budget: number of pages that each row attends to.
      newest: mean and variance of the newest page's keys, in float32; None with the paper's bounds.
    """

    low: Float[Array, "B H P D"]
    high: Float[Array, "B H P D"]
    budget: Int[Array, " B"]
    newest: Moments | NoneElsewhere


@named("quest")
@dataclass(frozen=True)
class Quest(Recall):
    """Keeps everything, and attends to the pages whose keys may score highest.

    Tokens are stored in pages of `page` tokens, in the order of their positions. For each page P
    the index holds two bounds of each channel of its keys, `low = mean − spread · deviation` and
    `high = mean + spread · deviation`. By them the page scores

        u_P = Σ_c max(q_c · low_c, q_c · high_c) = q · mean + spread · Σ_c |q_c| deviation_c

    This is what an average key of the page scores, and more where its keys differ. With
    `spread=None` the bounds are the least and the greatest value, as in the paper, so that no token
    of the page has a higher `q · k` than u. But a page then scores as its best key would if the
    extremes of all channels met in that key, which they hardly do.

    A decode step attends to `budget / page` pages: the first one, the newest one, and those with
    the highest u (ties go to the lower page). They are listed in ascending order. The new token's
    key changes the bounds of its page, the newest, in place. In attention with a sliding window,
    pages that lie entirely outside the window are not taken.

    The index is `[B, H, P, D]` twice, in the dtype of the keys: 1 / `page` of the size of keys and
    values. Mean and variance of the newest page's keys are kept in float32, but for the paper's
    bounds.

    Args:
      budget: slots to attend to per KV head, a multiple of `page` and at least three pages. A float
        is a share of each row's tokens at the prompt's end, of which no more than `max_prompt`
        count. It is rounded down to whole pages, at least three.
      page: tokens per page; 16 as in the paper.
      per_query_head: every query head chooses its own pages, as in the paper. False: the greatest u
        over the group decides for a KV head.
      dense_layers: layers that attend to everything; the first two as in the paper. Give `()` to a
        model of two layers.
      first_page: always take the first page, which holds the attention sinks. False is the paper's
        form, where u decides about the first page too.
      spread: how many deviations bounds are from the mean. None: the paper's bounds. With 1, steps
        that read a tenth keep more of what two models know about prose than with the paper's
        bounds, and find as many needles or more, by an index of the same size
        (docs/results/selections.md, "Pages by means").

    Raises:
      TypeError, ValueError: a number out of range; `budget` below three pages or not a multiple
        of `page`; `spread` not above 0.

    Example:
      >>> import kvjax
      >>> [type(layer).__name__ for layer in kvjax.bind(kvjax.Quest(budget=1024), num_layers=3)]
      ['Full', 'Full', 'Quest']

    References:
      Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, arXiv
      2406.10774.

    Deviations from the paper:
      By default bounds are one deviation from the mean of a page's keys; `spread=None` is the
      paper's, the least and the greatest value. The default is one choice per KV head;
      `per_query_head=True` is the paper's. The first page is always taken, unless
      `first_page=False`, since a page's bounds say little about the keys of sinks. The newest page
      is always taken too, however full it is. Behind a method that evicts or merges at the prompt's
      end, pages consist of the tokens that remain. On a further turn everything live is paged anew,
      in rows that have tokens in it.
    """

    budget: Budget
    page: int = 16
    per_query_head: bool = False
    dense_layers: tuple[int, ...] = (0, 1)
    first_page: bool = True
    spread: float | None = 1.0

    card = Card(
        acts="prompt, every step", paper="Quest, arXiv 2406.10774", when="later", small={"page": 4}
    )
    minimum = property(lambda self: PAGES * self.page)  # the smallest workable budget

    def __post_init__(self):
        super().__post_init__()
        check_flag("first_page", self.first_page)
        check_count("page", self.page, 1)
        if self.spread is not None:
            check_number("spread", self.spread, 0.0)
        check_budget(self.budget, self.minimum, f"{PAGES} pages of {self.page}")
        if isinstance(self.budget, int | np.integer) and self.budget % self.page:
            raise ValueError(f"budget must be a multiple of page={self.page}, got {self.budget}")

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, Pages]:
        """Makes an index without pages."""
        batch, kv_heads, slots = cache.shape
        pages = -(-slots // self.page)
        most = max(most_slots(self.budget, cache.max_prompt, self.minimum) // self.page, PAGES)
        cache = self.with_lists(cache, min(most, pages) * self.page)
        head_dim = cache.k.shape[3]

        def zeros(*of_head: int, dtype: DTypeLike) -> tuple[Array, Array]:
            x = jnp.zeros((batch, kv_heads, *of_head, head_dim), dtype)
            return x, x + 0  # a second array: one buffer must not be donated twice

        newest = None if self.spread is None else Moments(*zeros(dtype=jnp.float32))
        bounds = zeros(pages, dtype=cache.k.dtype)
        return cache, Pages(*bounds, self._pages_budget(cache), newest)

    def select(self, view: View, state: Pages, query: Array) -> tuple[View, Pages]:
        """Adds the new token to its page, then selects the pages with the highest u."""
        cache, length = view.cache, view.cache.lists[1]
        state = self._with_new_token(state, cache, view.slots)
        score = page_scores(
            query.reshape(*cache.shape[:2], cache.group, -1), state.low, state.high,
            implementation=view.implementation,
        )  # fmt: skip
        if not self.per_query_head:
            score = score.max(2)
        score = score.reshape(score.shape[0], -1, score.shape[-1])
        tokens, visible = of_lists(cache.used, cache), None
        if view.window is not None:
            visible = of_lists(self._visible_pages(cache, view.window), cache)
        num_pages, most = -(-tokens // self.page), length // self.page
        pages = self._best_pages(score, num_pages, state.budget, most, visible)
        slot = pages[..., None] * self.page + _numbers(self.page)[None]
        slot = slot.reshape(*pages.shape[:2], length)
        return view.take(jnp.where(slot < tokens[..., None], slot, -1)), state

    def on_prompt(self, cache: KVCache, state: Pages, step: Step) -> tuple[None, Pages]:
        """Indexes everything live; slots are in the order of positions when a prompt ends."""
        slot = jax.lax.broadcasted_iota(jnp.int32, cache.shape, 2)
        # Keys are read from the cache and not taken from `step.keys`: an earlier part of a chain
        # may have merged some since attention saw them.
        keys, budget = cache.k.read(), self._pages_budget(cache)
        size = cache.used, self.page, state.low.shape[2]
        if self.spread is None:
            pages = Pages(*page_bounds(keys, slot, *size), budget, None)
            return None, step.of_rows(pages, state)
        moments = Moments(*page_moments(keys, jnp.exp(cache.log_mass), slot, *size))
        bounds = _around(moments, self.spread, keys.dtype)
        last = jnp.maximum(cache.used - 1, 0)[..., None] // self.page
        newest = Moments(*(take_slots(x, last)[:, :, 0] for x in moments))
        return None, step.of_rows(Pages(*bounds, budget, newest), state)

    def _pages_budget(self, cache: KVCache) -> Int[Array, " B"]:
        """Returns the number of pages that each row attends to."""
        return jnp.maximum(self.rows_budget(cache) // self.page, PAGES)

    def _with_new_token(self, state: Pages, cache: KVCache, slots: Int[Array, "B H 1"]) -> Pages:
        """Adds the new token to the newest page, in rows that have one.

        This happens before attention, so that scores are computed from the new bounds. XLA would
        copy bounds that are overwritten after they have been read.
        """
        slot = jnp.minimum(slots, cache.slots - 1)
        key, there = cache.k.read(slot), slots < cache.slots
        page = jnp.where(there, slots // self.page, state.low.shape[2])
        if self.spread is not None:
            tokens = page * self.page + _numbers(self.page)
            before = take_slots(cache.log_mass, jnp.minimum(tokens, cache.slots - 1))
            before = jnp.exp(jnp.where(tokens < slots, before, NEG_INF)).sum(-1, keepdims=True)
            changed = state.newest.with_key(key[:, :, 0].astype(jnp.float32), before)
            pairs = zip(changed, state.newest, strict=True)
            newest = Moments(*(jnp.where(there, new, old) for new, old in pairs))
            bounds = _around(newest, self.spread, state.low.dtype)
            low, high = (x[:, :, None] for x in bounds)
            return dataclasses.replace(
                state, low=write_slots(state.low, page, low),
                high=write_slots(state.high, page, high), newest=newest,
            )  # fmt: skip

        def widen(bounds: Array, extremum) -> Array:
            bound = take_slots(bounds, jnp.minimum(page, bounds.shape[2] - 1))
            opens_page = (slots % self.page == 0)[..., None]
            return write_slots(bounds, page, jnp.where(opens_page, key, extremum(bound, key)))

        low, high = widen(state.low, jnp.minimum), widen(state.high, jnp.maximum)
        return dataclasses.replace(state, low=low, high=high)

    def _visible_pages(self, cache: KVCache, window: int) -> Bool[Array, "B H P"]:
        """Marks the pages that have a token inside the sliding window."""
        pages = -(-cache.slots // self.page)
        padding = pages * self.page - cache.slots
        visible = jnp.pad(newest(cache, window), ((0, 0), (0, 0), (0, padding)))
        return visible.reshape(*cache.shape[:2], pages, self.page).any(-1)

    def _best_pages(
        self,
        score: Float[Array, "B K P"],
        num_pages: Int[Array, "B K"],
        budget: Int[Array, " B"],
        most: int,
        visible: Bool[Array, "B K P"] | None,
    ) -> Int[Array, "B K N"]:
        """Returns the first page, the newest and the best others, in ascending order.

        Entries beyond the budget or the number of pages are P. Only pages that are `visible` are
        taken; None: all of them.
        """
        pages = score.shape[2]
        number, num_pages = _numbers(pages), num_pages[..., None]
        score = jnp.where(number < num_pages, score, NEG_INF)
        always = number == num_pages - 1
        if self.first_page:
            always |= number == 0
        score = jnp.where(always, jnp.inf, score)
        if visible is not None:  # the newest page is always visible
            score = jnp.where(visible, score, NEG_INF)
            num_pages = visible.sum(-1, keepdims=True, dtype=jnp.int32)
        # With P + 1 entries: XLA on CPU would take the top P of P entries by a full sort.
        score = jnp.pad(score, ((0, 0), (0, 0), (0, 1)), constant_values=NEG_INF)
        _, best = jax.lax.top_k(score, most)
        taken = _numbers(most) < jnp.minimum(num_pages, budget[:, None, None])
        return jnp.sort(jnp.where(taken, best, pages), axis=-1)


def _around(keys: Moments, spread: float, dtype: DTypeLike) -> tuple[Array, Array]:
    """Returns bounds that are `spread` deviations from the mean."""
    apart = spread * jnp.sqrt(keys.variance)
    return (keys.mean - apart).astype(dtype), (keys.mean + apart).astype(dtype)


def _numbers(count: int) -> Int[Array, "1 1 N"]:
    """Returns 0 … count − 1 along the last axis."""
    return jnp.arange(count, dtype=jnp.int32)[None, None]
