"""KVCrush: tokens that stand in for groups of evicted ones (arXiv 2503.00022)."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, get_args

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
    Extent,
    KVTransform,
    Needs,
    State,
    Step,
    Wrapper,
    accumulated_attention,
    is_bound,
)
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

REPRESENTATIVE = "representative"


class KVCrushState(NamedTuple):
    """The key of the draws (None: nothing is drawn), the layer's budgets, and the base's state."""

    key: Array | None
    count: Table
    base: State


@dataclass(frozen=True)
class KVCrush(Wrapper):
    """Keeps, beside what its base keeps, a few of the tokens that the base evicts.

    At a prompt's end every token is a vector of bits, one per query head: whether the base would
    retain it if that head decided alone, so that each head has as many ones as the base keeps
    tokens. Each KV head orders the n tokens that it evicts by the Hamming distance of their bits to
    an anchor (ties to the lower position), cuts them into R buckets, bucket i being the ranks
    `⌊i·n/R⌋ … ⌊(i + 1)·n/R⌋ − 1`, and keeps one token of each, its representative; all of them
    where n ≤ R. Representatives are pinned: while decoding they stand outside the base's budget and
    candidates. At the end of a further prompt they compete again.

    Args:
      base: any evicting method, or `Every` or `WhenFull` of one.
      representatives: R, beside the base's own budget.
      share: of the base's budget B, in its place: `R = round(share · B)`, and the base has B − R
        slots, in each row and layer; never fewer than it works with. 0.25 if neither is given, as
        in the paper; a smaller one may serve better (RESULTS.md has figures).
      anchor: `"random"` bits; `"mean"`: ones where more than half of a row's tokens have one (zeros
        where the base keeps less than half); `"median"`: ones where more tokens have one than at
        the median bit (zeros where all heads hold the same tokens, and units are tokens);
        `"alternate"`: 0101….
      pick: `"middle"`, a bucket's lower median, or `"random"`, as in the paper.
      granularity: `"token"`, `"chunk"` (8 tokens), `"page"` (32), or a number of tokens: units of
        so many positions. A unit's bits are those of its tokens, joined. Of what the base does not
        always keep it then evicts whole units, by the sum of its scores; each unit has one
        representative, all of its tokens. Budgets still count tokens: what is no whole unit of
        them stays free.
      kmeans: instead of bits and buckets, R clusters of the evicted keys, and the token nearest to
        each centroid: the paper's expensive comparison. Tokens only; no anchor, no pick.
      seed: of the draws, below 2**32; they depend on seed, layer, KV head and position alone.

    Raises:
      TypeError: `base` is not a transform, a number is none.
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
      With one anchor and R buckets, "the bucket with the lowest distance" is no function: equal
      buckets along the distance keep every group represented. `pick="middle"` is deterministic.
      Bits are those of all heads of a layer (of a group of `HeadGroups`), as in the paper, but
      every KV head evicts, and is represented, for itself. A base without a score (StreamingLLM)
      has its bits from accumulated attention alone, and evicts single tokens. A row whose prompt
      the base keeps whole has no representatives, and the base's part of the budget to grow to.
      Over PyramidInfer at the paper's ratios, all hidden states go on to the next layer.
    """

    representatives: int | None = None
    share: float | None = None
    anchor: Anchor = "random"
    pick: Pick = "middle"
    granularity: Granularity = "token"
    kmeans: bool = False
    seed: int = 0

    paper: ClassVar[str] = "KVCrush, arXiv 2503.00022"
    draws = property(lambda self: not self.kmeans and "random" in (self.anchor, self.pick))
    unit = property(lambda self: unit_size(self.granularity))  # tokens per unit
    inner = property(lambda self: self.split[0])  # the base with its part of the budget

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
        """The base with its part of the budget, and the number of representatives."""
        if self.representatives is not None:
            return self.base, self.representatives
        return split_budget(self.base, 0.25 if self.share is None else float(self.share))

    @property
    def needs(self) -> Needs:
        """The base's, and accumulated attention where its decision has no score."""
        decision = foreseen(self.base, "prompt")
        scored = isinstance(decision, Keep) and decision.score is not None
        received = not (self.kmeans or scored or decision is None)
        return self.base.needs.union(Needs(accumulated_attention=received))

    def extent(self, extent: Extent) -> Extent:
        """The base's, and the representatives. All hidden states go to the next layer."""
        extent = extent.pin(most_slots(self.split[1], extent.longest_prompt, 0))
        return dataclasses.replace(super().extent(extent), passed=None)

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, KVCrushState]:
        """The layer's key and budgets, and the column that marks representatives."""
        none = jnp.zeros(cache.shape, bool)
        cache = cache.with_column(REPRESENTATIVE, none, merge="keep")
        cache, state = super().init(cache, layer)
        key = layer_key(self.seed, layer) if self.draws else None
        count = layer_table(self.split[1], layer, cache.max_prompt)
        return cache, KVCrushState(key, count, state.base)

    def on_prompt(
        self, cache: KVCache, state: KVCrushState, step: Step
    ) -> tuple[Retain | Mark | None, KVCrushState]:
        """Retains what the base keeps, and representatives of what it evicts."""
        earlier = cache.column(REPRESENTATIVE) & cache.live
        cache = cache.replace(pinned=cache.pinned & ~earlier)
        decision, state = super().on_prompt(cache, state, step)
        if decision is None or isinstance(decision, Mark):
            return decision, state
        kept, bits = self._behaviour(cache, decision)
        gone = cache.live & ~kept
        chosen = self._representatives(cache, step, bits, gone, state)
        # Where the base evicts nothing, it has left a row alone.
        chosen = jnp.where(gone.any(-1, keepdims=True), chosen, earlier)
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
        """What the base keeps, in whole units, and every token's bits, which k-means needs not."""
        kept = decision.kept(cache)
        if self.kmeans:
            return kept, None
        if not isinstance(decision, Keep) or decision.score is None:
            received = accumulated_attention(cache)
            return kept, head_bits(received, cache, kept, cache.pinned & cache.live)
        score, always = decision.score.astype(jnp.float32), decision.stays(cache)
        if score.shape[1] < cache.shape[1] * cache.group:
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
        bits: Bool[Array, "B Q S"] | None,
        gone: Bool[Array, "B H S"],
        state: KVCrushState,
    ) -> Bool[Array, "B H S"]:
        """Groups what is gone by keys, or by the distance to the anchor, and picks one of each."""
        budget, longest, key = self.split[1], cache.max_prompt, state.key
        count = rows_budget(budget, cache.length, longest, 0, state.count)
        most = most_slots(budget, longest, 0)
        if self.kmeans:
            return nearest_to_centroids(
                step.keys, gone, cache.position, count, most, step.implementation
            )
        units = Units.of(cache, self.unit)
        vectors = units.join(bits, cache.heads)
        there = all_heads(units.any(cache.live), cache.heads).any(1)
        anchor_key, pick_key = (None, None) if key is None else jax.random.split(key)
        anchor = anchor_bits(self.anchor, vectors, there, anchor_key)
        distance = hamming_distance(pack_bits(vectors), pack_bits(anchor)[:, None])
        draw = None
        if self.pick == "random":
            draw = functools.partial(uniform, pick_key, heads=cache.heads)
        buckets, most = count // self.unit, most // self.unit
        chosen = bucket_representatives(distance, units.any(gone), buckets, most, draw)
        return gone & units.slots(chosen)


def head_bits(
    score: Float[Array, "B Q S"],
    cache: KVCache,
    kept: Bool[Array, "B H S"],
    always: Bool[Array, "B H S"],
) -> Bool[Array, "B Q S"]:
    """Whether a query head would retain a token if it decided alone.

    It retains as many as the KV head has `kept`: those that are `always` kept, and then the others
    with its highest scores.
    """
    candidates = evictable(cache)
    k = (candidates & kept).sum(-1, dtype=jnp.int32)
    candidates, position, k, always = (
        jnp.repeat(x, cache.group, axis=1) for x in (candidates, cache.position, k, always)
    )
    return keep_best(jnp.where(always, jnp.inf, score), candidates, position, k) | always
