"""PyramidInfer: each layer passes on what the newest tokens attend to (arXiv 2405.12532)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.budgets.budgets import Budget, check_budget, most_slots, rows_budget
from kvjax.budgets.layers import LayerBudget, Table, layer_table, layers_alike
from kvjax.cache.selection import evictable, keep_best
from kvjax.cache.slots import KVCache
from kvjax.cache.units import Units
from kvjax.checks import check_count, check_number
from kvjax.decisions import Keep, Mark, Retain, group_scores, over_heads
from kvjax.devices import all_heads
from kvjax.protocol import PASSED, Card, Extent, KVTransform, Needs, Step
from kvjax.serialization import named, pytree_node, static_value
from kvjax.transforms.held_budget import PromptBudget
from kvjax.transforms.pyramidinfer.schedule import CosineBudget, TokensEntering, generated_kept
from kvjax.transforms.snapkv import by_query_head, window_attention

Tables = tuple[Table, Table]  # tokens that stay in a layer's cache, and tokens that it passes on
OBSERVED = "observed"  # column of the attention that generated tokens have received so far


@named("pyramidinfer")
@dataclass(frozen=True)
class PyramidInfer(KVTransform):
    """Keeps the prompt tokens that the newest fifth of the prompt attends to, fewer in each layer.

    In a prompt of L tokens, the newest `w = 1 + ⌊newest · L⌋` stay in every layer; the others are
    the context. A token's score is the attention that it receives from the queries of the newest w,
    averaged over all heads of the layer. The queries are weighted linearly, from 1 (oldest) to
    `emphasis` (newest). The first `sinks` tokens stay too. All heads of a layer keep the same
    tokens.

    Without a budget this is the paper's form. If n context tokens enter layer l of N, `⌊n · r_l⌋`
    of them enter layer l + 1, with `r_l = ratio + (1 - ratio)/2 · (1 + cos(πl/N))`; but all n do if
    `⌊n · r_l⌋` is not above `context`. Layer l caches what entered it. A model that drops the
    hidden states of the other tokens saves their computation too: see `kvjax.kept_tokens`, which
    `kvjax.models.Decoder` uses for a prompt in one piece. In any other model the layer evicts down
    to as many tokens by its own scores.

    With a budget b, only the cache is compressed. Layer l keeps `b + a · cos(π(l + ½)/N)` tokens,
    with `a = min(b, L - b)/2`; the mean over the layers is b.

    While decoding, in both forms, generated tokens form blocks of `interval` tokens. Every
    `interval` steps a flush compresses the blocks that lie before the newest w tokens: the best
    `max(⌊interval · 0.9 · g_l⌋, 1)` tokens of a block stay. Their score is the weighted attention
    of the w queries after the block, and g_l falls by a cosine from 1.0 to 0.1 over the layers. The
    prompt is not touched again. Under a budget, a flush compresses only as many of the oldest
    blocks as a layer needs to come down to its part of the budget.

    Layer l is a `PyramidInferLayer`: pass the transform to `bind`.

    Args:
      budget: average slots per layer and KV head for the prompt, or a share of it; at least
        `2 · (sinks + 1)`. None: the paper's form.
      newest: share of the prompt whose tokens observe and stay; 0.2 as in the authors' code. Under
        a budget, at most half of the slots that the sinks leave.
      sinks: number of first tokens that stay; 4 as in the authors' code, like all that follows.
      ratio: share of the context that the last layer would pass on, 0.9.
      context: number of context tokens up to which nothing is dropped, 64; at least `sinks`.
      emphasis: weight of the newest query, 1.2.
      interval: generated tokens that are compressed together, 16; None: generated tokens are never
        compressed.

    Raises:
      TypeError, ValueError: an argument is not a number; a budget below `2 · (sinks + 1)`; a share
        outside (0, 1]; `context` below `sinks`; `emphasis` not above 0; `interval` below 2.

    Example:
      >>> import kvjax
      >>> layers = kvjax.bind(kvjax.PyramidInfer(), num_layers=32)
      >>> [layer.extent(kvjax.kit.Extent(4096, 0)).prompt for layer in layers[::8]]
      [4096, 3985, 3313, 2256]
      >>> layers = kvjax.bind(kvjax.PyramidInfer(budget=0.5), num_layers=4)
      >>> [layer.extent(kvjax.kit.Extent(1024, 0)).prompt for layer in layers]
      [748, 610, 414, 276]

    References:
      Yang et al., PyramidInfer: Pyramid KV Cache Compression for High-throughput LLM Inference,
      arXiv 2405.12532.

    Deviations from the paper:
      Constants are those of the authors' configuration for Llama 2. Where a configuration does not
      set them, their code has 64 sinks, an emphasis of 1 and blocks of 1,024. The decoding stage
      follows their code too, with three differences. First, w keeps the size that the prompt gave
      it; in their code it grows with the cache. Second, blocks begin with the first generated
      token; in their code they begin one token earlier, so that the first block contains the
      prompt's last token. Third, a block waits for the next flush. The form with a budget is ours.
      Behind a method whose heads keep different tokens, each KV head decides for itself. On a
      further turn everything live is compressed as if it were one prompt, in rows that have tokens
      in it.
    """

    budget: Budget | None = None
    newest: float = 0.2
    sinks: int = 4
    ratio: float = 0.9
    context: int = 64
    emphasis: float = 1.2
    interval: int | None = 16

    card = Card(
        acts="prompt, every 16 tokens", paper="PyramidInfer, arXiv 2405.12532", when="now",
        small={"interval": 3},
    )  # fmt: skip
    minimum = property(lambda self: 2 * (self.sinks + 1))  # the smallest workable budget

    def __post_init__(self):
        check_count("sinks", self.sinks, 0)
        if self.budget is not None:
            check_budget(self.budget, self.minimum, "2 * (sinks + 1)")
        check_number("newest", self.newest, 0.0, 1.0)
        check_number("ratio", self.ratio, 0.0, 1.0)
        check_count("context", self.context, self.sinks)
        check_number("emphasis", self.emphasis, 0.0)
        if self.interval is not None:
            check_count("interval", self.interval, 2)

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """Returns the method of one layer, with its schedule."""
        layers, passed = layers_alike(layer, num_layers), None
        if self.budget is None:
            schedule = TokensEntering(self.newest, self.ratio, self.context, num_layers)
            passed = LayerBudget(schedule, range(layers.start + 1, layers.stop + 1))
        else:
            schedule = CosineBudget(self.budget, self.minimum, num_layers)
        slots = LayerBudget(schedule, layers)
        prompt = slots, passed, self.newest, self.sinks, self.emphasis
        if self.interval is None:
            return PyramidInferPrompt(*prompt)
        kept = tuple(generated_kept(self.interval, num_layers, layer) for layer in layers)
        return PyramidInferLayer(*prompt, self.interval, kept)


@static_value
@dataclass(frozen=True)
class PyramidInferPrompt(PromptBudget):
    """PyramidInfer in one layer that compresses prompts alone; made by `PyramidInfer.for_layer`.

    Args:
      budget: number of prompt tokens that stay in the layer's cache.
      passed: number of them that go on to the next layer; None: only the cache is compressed.
      newest, sinks, emphasis: as in `PyramidInfer`.
    """

    budget: LayerBudget
    passed: LayerBudget | None
    newest: float
    sinks: int
    emphasis: float

    minimum = property(lambda self: self.sinks + 1)  # the smallest workable budget

    @property
    def needs(self) -> Needs:
        """The newest queries of a prompt."""
        return Needs(query_share=self.newest)

    def observing(self, lengths: Int[np.ndarray, " L"]) -> Int[np.ndarray, " L"]:
        """Returns `1 + ⌊newest · L⌋` for prompts of these lengths."""
        return 1 + np.floor(self.newest * lengths).astype(np.int64)

    def window(self, share: Int[Array, " L"], slots: Int[Array, " L"]) -> Int[Array, " L"]:
        """Returns w: the `share` that observes, limited by the `slots` of the layer's budget."""
        room = (slots - self.sinks + 1) // 2 if self.passed is None else slots
        return share.clip(max=room).clip(min=1)

    def _window_and_budget(self, cache: KVCache, tables: Tables) -> tuple[Array, Array]:
        """Returns w and the budget of each row."""
        budget = self.rows_budget(cache, tables[0])
        share = rows_budget(self.observing, cache.length, cache.max_prompt, 1)
        return self.window(share, budget), budget

    def extent(self, extent: Extent) -> Extent:
        """Bounds the prompt to the layer's budget, and the tokens that it passes on."""
        extent = super().extent(extent)
        if self.passed is None:
            return extent
        passed = most_slots(self.passed, extent.longest_prompt, 0) + extent.pinned
        return dataclasses.replace(extent, passed=min(passed, extent.prompt))

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, Tables]:  # pyright: ignore[reportIncompatibleMethodOverride]  # its own state
        """Makes the layer's tables of budgets, and the column that marks what is passed on."""
        if self.passed is not None:
            cache = cache.with_column(PASSED, jnp.zeros(cache.shape, bool), merge="keep")
        budgets = (self.budget, layer), (self.passed, layer + 1)
        kept, passed = (layer_table(*budget, cache.max_prompt) for budget in budgets)
        return cache, (kept, passed)

    def on_prompt(self, cache: KVCache, state: Tables, step: Step) -> tuple[Keep, Tables]:
        """Keeps the newest w tokens, the sinks, and the tokens that those w queries attend to."""
        window, budget = self._window_and_budget(cache, state)
        weight = self._weight(step.query_position - (cache.length - window)[:, None], window)
        observed = window_attention(cache, step, step.query.shape[2], weight)
        keep = Keep(
            budget,
            by_query_head(observed),
            always=cache.position < self.sinks,
            newest=window,
            reduce="layer",
        )
        if self.passed is not None:
            budget = rows_budget(self.passed, cache.length, cache.max_prompt, 1, state[1])
            passed = dataclasses.replace(keep, budget=budget).kept(cache)
            keep = dataclasses.replace(keep, columns={PASSED: passed})
        return keep, state

    def _weight(self, number: Int[Array, "B ..."], window: Int[Array, " B"]) -> Array:
        """Returns the weight of query `number` of w: 1 … `emphasis`, and 0 outside the window."""
        window = window.reshape(-1, *(1,) * (number.ndim - 1))
        place = number.astype(jnp.float32) / jnp.maximum(window - 1, 1).astype(jnp.float32)
        weight = 1.0 + (self.emphasis - 1.0) * place
        return jnp.where((number >= 0) & (number < window), weight, 0.0)


@pytree_node
class Generated(NamedTuple):
    """State of a layer: its numbers, and each row's window, budget and blocks.

    Args:
      tables: state of `PyramidInferPrompt`.
      kept: generated tokens that stay of every `interval`.
      window: w.
      budget: the layer's part of the budget.
      start: position of the first token of the oldest block that is not compressed.
    """

    tables: Tables
    kept: Int[Array, ""]
    window: Int[Array, " B"]
    budget: Int[Array, " B"]
    start: Int[Array, " B"]


@static_value
@dataclass(frozen=True)
class PyramidInferLayer(PyramidInferPrompt):
    """PyramidInfer in one layer, generated tokens included; made by `PyramidInfer.for_layer`.

    Args:
      budget, passed, newest, sinks, emphasis: as in `PyramidInferPrompt`.
      interval: as in `PyramidInfer`.
      kept: generated tokens that stay of every `interval`, for each of the layers of `budget`.
    """

    interval: int
    kept: tuple[int, ...]

    @property
    def needs(self) -> Needs:
        """The newest queries of a prompt, and the attention of each decode step."""
        return Needs(query_share=self.newest, decode_mass=True)

    def extent(self, extent: Extent) -> Extent:
        """Bounds the prompt, and the generated tokens that are not compressed away.

        The tokens of up to `interval` steps wait for the next flush.
        """
        most = most_slots(self.budget, extent.longest_prompt, self.minimum)
        lengths = np.arange(extent.longest_prompt + 1)
        window = int(self.window(self.observing(lengths), self.budget(lengths)).max())  # pyright: ignore[reportArgumentType]  # these are arrays of NumPy
        extent = super().extent(extent)
        tokens = np.arange(extent.new + 1)
        # Complete blocks before the window, when the last flush was up to `interval` steps ago.
        blocks = np.maximum(tokens - self.interval - window, 0) // self.interval
        generated = int((tokens - blocks * (self.interval - max(self.kept))).max())
        # A short prompt may grow to the budget before any block is compressed.
        uncompressed = most + self.interval if self.passed is None else 0
        slots = max(extent.prompt - extent.pinned + generated, uncompressed)
        return extent.hold(slots).every(self.interval)

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, Generated]:  # pyright: ignore[reportIncompatibleMethodOverride]  # its own state
        """Makes the columns, the layer's numbers, and the numbers of rows without a prompt."""
        cache, tables = super().init(cache, layer)
        cache = cache.with_column(OBSERVED, jnp.zeros(cache.shape, jnp.float32), merge="keep")
        kept = jnp.int32(self.kept[self.budget.layers.index(layer)])
        return cache, Generated(tables, kept, *self._rows(cache, tables))

    def on_prompt(self, cache: KVCache, state: Generated, step: Step) -> tuple[Keep, Generated]:  # pyright: ignore[reportIncompatibleMethodOverride]  # its own state
        """Compresses the prompt as `PyramidInferPrompt` does; blocks are counted from its end."""
        keep, tables = super().on_prompt(cache, state.tables, step)
        rows = step.of_rows(self._rows(cache, tables), state[2:])
        return keep, Generated(tables, state.kept, *rows)

    def _rows(self, cache: KVCache, tables: Tables) -> tuple[Array, Array, Array]:
        """Returns w, the budget and the start of the first block of each row."""
        start = cache.length + 0  # a copy: the state must not share an array with the cache
        return *self._window_and_budget(cache, tables), start

    def on_step(self, cache: KVCache, state: Generated, step: Step) -> tuple[Mark, Generated]:
        """Adds the step's weighted attention to the scores of the blocks that it observes.

        The observers of a block are known in advance: the w queries after it. So a running sum over
        the steps is enough.
        """
        age = cache.position - state.start[:, None, None]
        first_observer = (age // self.interval + 1) * self.interval  # its age
        number = (cache.length - 1 - state.start)[:, None, None] - first_observer
        weight = jnp.where(age >= 0, self._weight(number, state.window), 0.0)
        received = weight * group_scores(step.mass, cache, "mean")
        return Mark({OBSERVED: cache.column(OBSERVED) + received}), state

    def on_flush(self, cache: KVCache, state: Generated, step: Step) -> tuple[Retain, Generated]:
        """Keeps the best tokens of the blocks that lie before the newest w tokens."""
        age = cache.position - state.start[:, None, None]
        blocks = Units(age, max(cache.max_new // self.interval, 1), self.interval)
        # Each block of each head is a row of its own: `[B, H · blocks, interval]`.
        score, candidates, age = (
            blocks.grid(x).reshape(age.shape[0], -1, self.interval)
            for x in (over_heads(cache.column(OBSERVED), cache), evictable(cache), age)
        )
        count = jnp.broadcast_to(state.kept, candidates.shape[:2])
        evicted = candidates & ~keep_best(score, candidates, age, count)
        evicted = evicted.reshape(*cache.shape[:2], -1, self.interval)
        complete = (cache.length - state.window - state.start) // self.interval
        due = jnp.arange(blocks.count, dtype=jnp.int32)[None] < complete[:, None]
        if self.passed is None:
            # A block is compressed only while the earlier ones do not free enough slots. Blocks
            # advance together in all heads, so the head with the most tokens decides.
            freed = evicted.sum(-1, dtype=jnp.int32)
            freed_before = jnp.cumsum(freed, axis=-1) - freed
            excess = evictable(cache).sum(-1, dtype=jnp.int32) - state.budget[:, None]
            due &= all_heads(excess[..., None] > freed_before, cache.heads).any(1)
        evicted = blocks.slots_of_tokens(evicted & due[:, None, :, None])
        start = state.start + self.interval * due.sum(-1, dtype=jnp.int32)
        return Retain(~evicted, newest=state.window), state._replace(start=start)
