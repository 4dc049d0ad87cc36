"""PyramidInfer: each layer passes on what the newest tokens look at (arXiv 2405.12532)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.attention.layer import PASSED
from kvjax.budgets.budgets import (
    Budget,
    check_budget,
    check_count,
    check_number,
    most_slots,
    rows_budget,
    slots_for,
)
from kvjax.budgets.layers import CosineBudget, TokensEntering, generated_kept
from kvjax.cache.slots import KVCache, evict
from kvjax.compose.wrappers import update_if
from kvjax.protocol import Extent, KVTransform, Needs, State, Step, group_scores
from kvjax.transforms.selection import evictable, keep_best, newest
from kvjax.transforms.snapkv import window_attention

OBSERVED = "observed"  # the column of attention that generated tokens have received so far


@dataclass(frozen=True)
class PyramidInfer(KVTransform):
    """Keeps the prompt tokens that the newest fifth of the prompt attends to, fewer in each layer.

    Of a prompt of L tokens, the newest `w = 1 + ⌊newest · L⌋` stay in every layer. A token's score
    is the attention that it receives from those w queries, averaged over all heads of the layer,
    where the queries weigh linearly from 1 (oldest) to `emphasis` (newest); the first `sinks`
    tokens stay too. All heads of a layer keep the same tokens.

    Without a budget, the paper's form: of the n tokens that enter layer l of N besides the newest
    w, `⌊n · r_l⌋` enter layer l + 1, `r_l = ratio + (1 - ratio)/2 · (1 + cos(πl/N))`, all n where
    that is no more than `context`. Layer l caches what entered it. A model that drops the hidden
    states of the others (`kvjax.kept_tokens`; `kvjax.models.Decoder` does, for a prompt in one
    piece) saves their computation too. In any other model the layer evicts down to as many tokens
    by its own scores.

    With a budget b, the cache alone: layer l keeps `b + a · cos(π(l + ½)/N)` tokens, with
    `a = min(b, L - b)/2`, whose mean over the layers is b.

    While decoding, in both forms: whenever the newest w have left `interval` generated tokens
    behind, the best `max(⌊interval · 0.9 · g_l⌋, 1)` of them stay, by the weighted attention of the
    w queries after them; g_l falls by a cosine from 1.0 to 0.1. The prompt is not touched again.
    Under a budget that waits until a layer holds more than its part of it.

    Layer l is a `PyramidInferLayer`: give the transform to `bind`.

    Args:
      budget: average slots per layer and KV head for the prompt, or a share of it; None: the
        paper's form. At least `2 · (sinks + 1)`.
      newest: share of the prompt whose tokens observe and stay; 0.2 as in the authors' code. Under
        a budget, at most half of the slots that the sinks leave.
      sinks: first tokens that stay; 4 as in the authors' code, like all that follows.
      ratio: what the last layer would pass on, 0.9.
      context: context tokens up to which nothing is dropped, 64; at least `sinks`.
      emphasis: weight of the newest query, 1.2.
      interval: generated tokens that are compressed together, 16; None: none ever.

    Raises:
      TypeError, ValueError: no number, a budget below `2 · (sinks + 1)`, a share outside (0, 1],
        `context` below `sinks`, `emphasis` not above 0, `interval` below 2.

    Example:
      >>> import kvjax
      >>> layers = kvjax.bind(kvjax.PyramidInfer(), num_layers=32)
      >>> [layer.extent(kvjax.Extent(4096, 0)).prompt for layer in layers[::8]]
      [4096, 3985, 3313, 2256]
      >>> layers = kvjax.bind(kvjax.PyramidInfer(budget=0.5), num_layers=4)
      >>> [layer.extent(kvjax.Extent(1024, 0)).prompt for layer in layers]
      [748, 610, 414, 276]

    References:
      Yang et al., PyramidInfer: Pyramid KV Cache Compression for High-throughput LLM Inference,
      arXiv 2405.12532.

    Deviations from the paper:
      Constants and the decoding stage are those of the authors' code, except that w keeps the size
      that the prompt gave it; there it grows. The form with a budget is ours. Behind a method whose
      heads keep different tokens, each KV head decides for itself. On a further turn everything
      live is compressed as one prompt.
    """

    budget: Budget | None = None
    newest: float = 0.2
    sinks: int = 4
    ratio: float = 0.9
    context: int = 64
    emphasis: float = 1.2
    interval: int | None = 16

    paper: ClassVar[str] = "PyramidInfer, arXiv 2405.12532"
    bound = property(lambda self: False)
    frees_while_decoding = property(lambda self: self.interval is not None)

    def __post_init__(self):
        check_count("sinks", self.sinks, 0)
        if self.budget is not None:
            check_budget(self.budget, 2 * (self.sinks + 1), "2 * (sinks + 1)")
        check_number("newest", self.newest, 0.0, 1.0)
        check_number("ratio", self.ratio, 0.0, 1.0)
        check_count("context", self.context, self.sinks)
        check_number("emphasis", self.emphasis, 0.0)
        if self.interval is not None:
            check_count("interval", self.interval, 2)

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """The method of one layer, with its schedule."""
        if self.budget is None:
            schedule = self.newest, self.ratio, self.context, num_layers
            slots, passed = (TokensEntering(*schedule, at) for at in (layer, layer + 1))
        else:
            slots = CosineBudget(self.budget, 2 * (self.sinks + 1), num_layers, layer)
            passed = None
        kept = self.interval and generated_kept(self.interval, num_layers, layer)
        return PyramidInferLayer(
            slots, passed, self.newest, self.sinks, self.emphasis, self.interval, kept
        )


@dataclass(frozen=True)
class PyramidInferLayer(KVTransform):
    """PyramidInfer in one layer; made by `PyramidInfer.for_layer`.

    Args:
      budget: prompt tokens that stay in this layer's cache.
      passed: those of them that go on to the next layer; None: the cache alone is compressed.
      newest, sinks, emphasis, interval: as in `PyramidInfer`.
      kept: generated tokens that stay of every `interval`.
    """

    budget: Budget
    passed: Budget | None
    newest: float
    sinks: int
    emphasis: float
    interval: int | None
    kept: int | None

    paper: ClassVar[str] = PyramidInfer.paper
    frees_while_decoding = property(lambda self: self.interval is not None)

    @property
    def minimum(self) -> int:
        """The smallest workable budget."""
        return self.sinks + 1

    @property
    def needs(self) -> Needs:
        """The newest share of a prompt's queries, and the attention of every decode step."""
        return Needs(query_share=self.newest, decode_mass=self.interval is not None)

    def window(self, lengths: Int[np.ndarray, " L"]) -> Int[np.ndarray, " L"]:
        """w, for prompts of these lengths."""
        window = 1 + np.floor(self.newest * lengths).astype(np.int64)
        slots = slots_for(self.budget, lengths, self.minimum)
        room = (slots - self.sinks + 1) // 2 if self.passed is None else slots
        return np.maximum(np.minimum(window, room), 1)

    def extent(self, extent: Extent) -> Extent:
        """The layer's budget, and the generated tokens that are never compressed away."""
        most = most_slots(self.budget, extent.longest_prompt, self.minimum)
        extent = extent.keep(most)
        if self.interval is None:
            return extent
        window = most_slots(self.window, extent.longest_prompt, 1)
        tokens = np.arange(extent.new + 1)
        blocks = np.maximum(tokens - 1 - window, 0) // self.interval  # before the newest came
        generated = int((tokens - blocks * (self.interval - self.kept)).max())
        waiting = most + 1 if self.passed is None else 0
        return extent.hold(max(extent.prompt - extent.pinned + generated, waiting))

    def passes(self, extent: Extent) -> int | None:
        """Most prompt tokens that go on to the next layer."""
        if self.passed is None:
            return None
        return min(most_slots(self.passed, extent.longest_prompt, 0) + extent.pinned, extent.prompt)

    def init(self, cache: KVCache) -> tuple[KVCache, State]:
        """Per row: w, the budget, and the first generated token that is not yet compressed."""
        if self.passed is not None:
            cache = cache.with_column(PASSED, jnp.zeros(cache.shape, bool), merge="keep")
        if self.interval is not None:
            cache = cache.with_column(OBSERVED, jnp.zeros(cache.shape, jnp.float32), merge="keep")
        window, budget, _ = self._rows(cache)
        return cache, (window, budget, jnp.zeros_like(cache.length))

    def _rows(self, cache: KVCache) -> tuple[Int[Array, " B"], ...]:
        sizes = (
            rows_budget(slots, cache.length, cache.max_prompt, self.minimum)
            for slots in (self.window, self.budget)
        )
        return *sizes, cache.length

    def update(self, cache: KVCache, state: State, step: Step) -> tuple[KVCache, State]:
        """Compresses a prompt at its end, and generated tokens `interval` at a time."""
        if step.prompt_done:
            return self._compress_prompt(cache, state, step)
        if step.phase == "decode" and self.interval is not None:
            return self._compress_generated(cache, state, step)
        return cache, state

    def _compress_prompt(self, cache: KVCache, state: State, step: Step) -> tuple[KVCache, State]:
        # A row without a query had no prompt in this call, and nothing to judge its tokens by.
        asked = (step.query_position >= 0).any(-1)
        rows = zip(self._rows(cache), state, strict=True)
        state = tuple(jnp.where(asked, now, before) for now, before in rows)
        window, budget, _ = state
        score = over_heads(group_scores(self.score(cache, state, step), cache, "mean"), cache)
        score = jnp.where(cache.position < self.sinks, jnp.finfo(score.dtype).max, score)
        score = jnp.where(newest(cache, window), jnp.inf, score)

        def best(count: Int[Array, " B"]) -> Array:
            count = jnp.where(asked, count, cache.slots)
            return keep_best(score, evictable(cache), cache.position, count)

        if self.passed is not None:
            passed = rows_budget(self.passed, cache.length, cache.max_prompt, 1)
            cache = cache.with_column(PASSED, best(passed) | cache.pinned)
        return evict(cache, best(budget)), state

    def score(self, cache: KVCache, state: State, step: Step) -> Float[Array, "B Q S"]:
        """Attention that each slot receives from the newest w queries, weighted, per query head."""
        batch, _, slots = cache.shape
        window, size = state[0], step.query.shape[2]
        weight = self._weight(step.query_position - (cache.length - window)[:, None], window)
        return window_attention(cache, step, size, weight).reshape(batch, -1, slots)

    def _weight(self, number: Int[Array, "B ..."], window: Int[Array, " B"]) -> Array:
        """Weight of query `number` of w: 1 … `emphasis`, and 0 for what is none of them."""
        window = window.reshape(-1, *(1,) * (number.ndim - 1))
        place = number.astype(jnp.float32) / jnp.maximum(window - 1, 1).astype(jnp.float32)
        weight = 1.0 + (self.emphasis - 1.0) * place
        return jnp.where((number >= 0) & (number < window), weight, 0.0)

    def _compress_generated(
        self, cache: KVCache, state: State, step: Step
    ) -> tuple[KVCache, State]:
        """Adds the step's attention, and compresses the block that the newest w have left behind.

        A block's observers are known in advance, the w queries after it: a sum over steps will do.
        """
        window, budget, start = state
        age = cache.position - start[:, None, None]
        first = (age // self.interval + 1) * self.interval  # age of a block's first observer
        number = (cache.length - 1 - start)[:, None, None] - first
        weight = jnp.where(age >= 0, self._weight(number, window), 0.0)
        received = weight * group_scores(step.mass, cache, "mean")
        cache = cache.with_column(OBSERVED, cache.column(OBSERVED) + received)
        due = cache.length - window - start >= self.interval
        due &= (step.slots < cache.slots).any((1, 2))  # a row that got no token is left as it is
        if self.passed is None:
            due &= (evictable(cache).sum(-1) > budget[:, None]).any(-1)

        def compress(cache: KVCache, start: Array) -> tuple[KVCache, Array]:
            age = cache.position - start[:, None, None]
            block = evictable(cache) & (age >= 0) & (age < self.interval) & due[:, None, None]
            count = jnp.full(start.shape, self.kept, jnp.int32)
            score = over_heads(cache.column(OBSERVED), cache)
            best = keep_best(score, block, cache.position, count)
            return evict(cache, best | ~block), start + jnp.where(due, self.interval, 0)

        cache, start = update_if(due.any(), compress, cache, start)
        return cache, (window, budget, start)

    def recent(self, cache: KVCache, state: State) -> Int[Array, " B"]:
        """The newest w tokens."""
        return state[0]


def over_heads(score: Float[Array, "B H S"], cache: KVCache) -> Float[Array, "B H S"]:
    """The mean over all KV heads of a row whose slots hold the same tokens in each."""
    same = (cache.position == cache.position[:, :1]).all((1, 2), keepdims=True)
    return jnp.where(same, score.mean(1, keepdims=True), score)
