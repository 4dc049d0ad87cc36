"""KVCrush: tokens that stand in for groups of evicted ones (arXiv 2503.00022)."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.budgets.budgets import Budget, most_slots, rows_budget
from kvjax.budgets.layers import Table, layer_table
from kvjax.cache.selection import evictable, keep_best
from kvjax.cache.slots import KVCache
from kvjax.cache.units import Units
from kvjax.checks import check_choice, check_flag
from kvjax.compose.foreseen import foreseen
from kvjax.compose.walks import walk
from kvjax.compose.wrappers import check_evicts
from kvjax.decisions import Keep, Mark, Retain
from kvjax.devices import all_heads
from kvjax.protocol import (
    Card,
    Extent,
    KVTransform,
    Needs,
    State,
    Step,
    Wrapper,
    accumulated_attention,
    is_bound,
)
from kvjax.serialization import named, pytree_node
from kvjax.transforms.kvcrush.base import check_share, split_budget
from kvjax.transforms.kvcrush.representatives import (
    Anchor,
    Pick,
    anchor_bits,
    bucket_representatives,
    nearest_to_centroids,
)
from kvjax.transforms.kvcrush.units import Granularity, unit_size, whole_units
from kvjax.transforms.random import check_seed, layer_key, uniform
from pallas_kernels import hamming_distance, pack_bits
from pallas_kernels.base.annotations import NoneElsewhere

REPRESENTATIVE = "representative"


@pytree_node
class KVCrushState(NamedTuple):
    """State of KVCrush.

    Args:
      key: random key of the draws; None: nothing is drawn.
      count: table of the layer's numbers of representatives.
      base: state of the base.
    """

    key: Array | None
    count: Table  # pyright: ignore[reportIncompatibleMethodOverride]  # a field, no method of tuples
    base: State


@named("kvcrush")
@dataclass(frozen=True)
class KVCrush(Wrapper):
    """Keeps, beside what its base keeps, a few of the tokens that the base evicts.

    At a prompt's end every token is described by a vector of bits, one per query head. A bit says
    whether the base would retain the token if that query head decided alone; so each head has as
    many ones as the base keeps tokens. Each KV head orders the n tokens that it evicts by the
    Hamming distance of their bits to an anchor (ties to the lower position). It cuts them into R
    buckets, of which bucket i has the ranks `⌊i·n/R⌋ … ⌊(i + 1)·n/R⌋ − 1`. One token of each bucket
    is kept as its representative; where n ≤ R, all tokens are. Representatives are pinned: while
    decoding they count neither in the base's budget nor among its candidates. At the end of a
    further prompt they compete again.

    Args:
      base: any evicting method, or `Every` or `WhenFull` of one.
      representatives: R, in addition to the base's own budget.
      share: instead of `representatives`, a share of the base's budget B. `R = round(share · B)`,
        and the base keeps B − R slots in each row and layer, but never fewer than its smallest
        workable budget. 0.25 if neither is given, as in the paper; a smaller one may do better
        (RESULTS.md has figures).
      anchor: bits that distances are measured from. `"random"`: random bits. `"mean"`: ones where
        more than half of a row's tokens have one; these are zeros where the base keeps less than
        half. `"median"`: ones where more tokens have one than at the median bit; these are zeros
        where all heads hold the same tokens and units are tokens. `"alternate"`: 0101….
      pick: `"middle"`, a bucket's lower median, or `"random"`, as in the paper.
      granularity: size of a unit: `"token"`, `"chunk"` (8 tokens), `"page"` (32), or a number of
        tokens at neighbouring positions. A unit's bits are those of its tokens, joined. Among the
        tokens that the base does not always keep, whole units are then evicted, by the sum of the
        base's scores. A representative is a whole unit. Budgets still count tokens: slots that do
        not make up a whole unit stay free.
      kmeans: instead of bits and buckets, form R clusters of the evicted keys and keep the token
        nearest to each centroid: the paper's expensive comparison. Works with single tokens only,
        and uses neither anchor nor pick.
      seed: seed of the draws, below 2**32. They depend only on seed, layer, KV head and position.

    Raises:
      TypeError: `base` is not a transform; another argument has the wrong type.
      ValueError: `base` does not evict, holds another KVCrush, or has no budget to share; both
        `representatives` and `share`; a share outside (0, 1) or that leaves the base too little;
        fewer representatives than a unit; an unknown anchor, pick or granularity; a seed too large.

    Example:
      >>> import kvjax
      >>> tx = kvjax.KVCrush(kvjax.SnapKV(budget=1024))  # 768 + 256
      >>> tx.extent(kvjax.kit.Extent(prompt=4096, new=100)).total
      1124
      >>> tx = kvjax.KVCrush(kvjax.H2O(budget=512), representatives=128)
      >>> tx.extent(kvjax.kit.Extent(prompt=4096, new=100)).total
      641

    References:
      Jha et al., KVCrush: Key Value Cache Size-Reduction Using Similarity in Head-Behaviour, arXiv
      2503.00022.

    Deviations from the paper:
      With one anchor and R buckets, the paper's "bucket with the lowest distance" is not well
      defined. Here buckets of equal size along the distance keep every group represented.
      `pick="middle"` draws nothing, and has the error of a random pick (RESULTS.md, "What the
      defaults are worth"). Nothing beside the base keeps the first 32 and the newest 128 tokens, as
      in the paper's runs with pages. Behind it, `Quantize` stores all that stays in the same number
      of bits, where the paper lets them follow the tokens' importance. Bits are those of all heads
      of a layer (of a group of `HeadGroups`), as in the paper, but every KV head evicts, and keeps
      representatives, for itself. A base without a score (StreamingLLM) gets its bits from
      accumulated attention alone, and evicts single tokens. A row whose prompt the base keeps
      completely has no representatives, and grows only to the base's part of the budget. Over
      PyramidInfer at the paper's ratios, all hidden states go on to the next layer.
    """

    representatives: int | None = None
    share: float | None = None
    anchor: Anchor = "random"
    pick: Pick = "middle"
    granularity: Granularity = "token"
    kmeans: bool = False
    seed: int = 0

    card = Card(acts="prompt", paper="KVCrush, arXiv 2503.00022", when="now", couples_heads=True)
    draws = property(lambda self: not self.kmeans and "random" in (self.anchor, self.pick))
    unit = property(lambda self: unit_size(self.granularity))  # tokens per unit

    def __post_init__(self):
        check_evicts(self.base, "KVCrush")
        if any(isinstance(part, KVCrush) for part in walk(self.base)):
            raise ValueError(f"KVCrush cannot go around another one, got {self.base!r}")
        check_share(self.representatives, self.share)
        check_seed(self.seed)
        check_choice("anchor", self.anchor, get_args(Anchor))
        check_choice("pick", self.pick, get_args(Pick))
        check_flag("kmeans", self.kmeans)
        unit_size(self.granularity)
        if self.kmeans and self.unit > 1:
            raise ValueError(f"kmeans=True clusters tokens, got granularity={self.granularity!r}")
        # Before `for_layer` there are no budgets to look at.
        number = self.split[1] if is_bound(self.base) else self.unit
        if not callable(number) and number < self.unit:
            raise ValueError(
                f"representatives must be at least {self.unit}, one unit of "
                f"granularity={self.granularity!r}, got {number}"
            )

    @property
    def split(self) -> tuple[KVTransform, Budget]:
        """Base with its part of the budget, and number of representatives."""
        if self.representatives is not None:
            return self.base, self.representatives
        return split_budget(self.base, 0.25 if self.share is None else float(self.share))

    @property
    def inner(self) -> KVTransform:
        """The base with its part of the budget."""
        return self.split[0]

    @property
    def needs(self) -> Needs:
        """Needs of the base, and accumulated attention where its decision has no score."""
        decision = foreseen(self.base, "prompt")
        scored = isinstance(decision, Keep) and decision.score is not None
        received = not (self.kmeans or scored or decision is None)
        return self.base.needs.union(Needs(accumulated_attention=received))

    def extent(self, extent: Extent) -> Extent:
        """Adds the representatives, as pinned slots; all hidden states go to the next layer."""
        extent = extent.pin(most_slots(self.split[1], extent.longest_prompt, 0))
        return dataclasses.replace(super().extent(extent), passed=None)

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, KVCrushState]:
        """Makes the layer's key and table, and the column that marks representatives."""
        unmarked = jnp.zeros(cache.shape, bool)
        cache = cache.with_column(REPRESENTATIVE, unmarked, merge="keep")
        cache, state = super().init(cache, layer)
        key = layer_key(self.seed, layer) if self.draws else None
        count = layer_table(self.split[1], layer, cache.max_prompt)
        return cache, KVCrushState(key, count, state.base)

    def on_prompt(
        self, cache: KVCache, state: KVCrushState, step: Step
    ) -> tuple[Retain | Mark | None, KVCrushState]:
        """Retains the tokens that the base keeps, and representatives of those that it evicts."""
        # Earlier representatives are candidates again: the base must see them unpinned.
        earlier = cache.column(REPRESENTATIVE) & cache.live
        cache = cache.replace(pinned=cache.pinned & ~earlier)
        decision, state = super().on_prompt(cache, state, step)
        if decision is None or isinstance(decision, Mark):
            return decision, state
        kept, bits = self._behaviour(cache, decision)  # pyright: ignore[reportArgumentType]  # it keeps
        evicted = cache.live & ~kept
        chosen = self._representatives(cache, step, bits, evicted, state)
        # A head from which the base evicts nothing keeps its earlier representatives.
        chosen = jnp.where(evicted.any(-1, keepdims=True), chosen, earlier)
        return Retain(
            kept | chosen,
            newest=decision.newest,  # pyright: ignore[reportAttributeAccessIssue]  # it keeps
            pinned=cache.pinned | chosen,
            columns={**decision.columns, REPRESENTATIVE: chosen},
            rows=decision.rows,
        ), state

    def _behaviour(
        self, cache: KVCache, decision: Keep | Retain
    ) -> tuple[Bool[Array, "B H S"], Bool[Array, "B Q S"] | None]:
        """Returns the tokens that the base keeps, in whole units, and every token's bits.

        The bits are None with k-means, which does not use them.
        """
        kept = decision.kept(cache)
        if self.kmeans:
            return kept, None
        if not isinstance(decision, Keep) or decision.score is None:
            received = accumulated_attention(cache)
            return kept, head_bits(received, cache, kept, cache.pinned & cache.live)
        score, always = decision.score.astype(jnp.float32), decision.stays(cache)
        if score.shape[1] < cache.shape[1] * cache.group:  # one score per KV head
            score = jnp.repeat(score, cache.group, axis=1)
        score = jnp.where(jnp.isnan(score), -jnp.inf, score)
        bits = head_bits(score, cache, kept, always)
        if self.unit > 1:
            reduce = "mean" if decision.reduce == "layer" else decision.reduce
            kept = whole_units(cache, kept, self.unit, score, always, reduce)
        return kept, bits

    def _representatives(
        self,
        cache: KVCache,
        step: Step,
        bits: Bool[Array, "B Q S"] | NoneElsewhere,
        evicted: Bool[Array, "B H S"],
        state: KVCrushState,
    ) -> Bool[Array, "B H S"]:
        """Groups evicted tokens by keys or by distance to the anchor, and picks one of each."""
        budget, longest, key = self.split[1], cache.max_prompt, state.key
        count = rows_budget(budget, cache.length, longest, 0, state.count)
        most = most_slots(budget, longest, 0)
        if self.kmeans:
            return nearest_to_centroids(
                step.keys, evicted, cache.position, count, most, step.implementation
            )
        units = Units.of(cache, self.unit)
        vectors = units.join(bits, cache.heads)
        present = all_heads(units.any(cache.live), cache.heads).any(1)
        anchor_key, pick_key = (None, None) if key is None else jax.random.split(key)
        anchor = anchor_bits(self.anchor, vectors, present, anchor_key)
        distance = hamming_distance(pack_bits(vectors), pack_bits(anchor)[:, None])
        draw = None
        if self.pick == "random":
            draw = functools.partial(uniform, pick_key, heads=cache.heads)  # pyright: ignore[reportArgumentType]  # there is one where it `draws`
        buckets, most = count // self.unit, most // self.unit
        chosen = bucket_representatives(distance, units.any(evicted), buckets, most, draw)
        return evicted & units.slots(chosen)


def head_bits(
    score: Float[Array, "B Q S"],
    cache: KVCache,
    kept: Bool[Array, "B H S"],
    always: Bool[Array, "B H S"],
) -> Bool[Array, "B Q S"]:
    """Returns the tokens that each query head would retain if it decided alone.

    A query head retains as many as its KV head has `kept`: those that are `always` kept, and then
    the others with its highest scores.
    """
    candidates = evictable(cache)
    count = (candidates & kept).sum(-1, dtype=jnp.int32)
    candidates, position, count, always = (
        jnp.repeat(x, cache.group, axis=1) for x in (candidates, cache.position, count, always)
    )
    return keep_best(jnp.where(always, jnp.inf, score), candidates, position, count) | always
