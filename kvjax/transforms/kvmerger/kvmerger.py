"""KVMerger: merges neighbouring tokens with similar keys (arXiv 2407.08454)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.budgets.budgets import Budget
from kvjax.cache.payload import max_into, sum_into, take_slots, write_slots
from kvjax.cache.selection import evictable, keep_best, newest
from kvjax.cache.slots import KVCache, slot_numbers, sorted_slots
from kvjax.checks import check_choice, check_number
from kvjax.decisions import Merge
from kvjax.protocol import Card, Extent, Needs, Step
from kvjax.serialization import named
from kvjax.transforms.kvmerger.unmerged import Unmerged
from kvjax.transforms.random import check_seed, layer_key, uniform
from pallas_kernels import join_anchors, pair_cosine, pair_distance
from pallas_kernels.base.annotations import NoneElsewhere
from pallas_kernels.grouping.cosine import above


@named("kvmerger")
@dataclass(frozen=True)
class KVMerger(Unmerged):
    """Merges neighbours whose keys are similar, at the prompt's end.

    The newest tokens, and those that have received the most attention, stay as they are. The others
    are visited from the last to the first: a token joins its right neighbour's merging set while
    `cos(k_i, k_{i+1}) > ε`. With a budget, the most similar pairs join until it is met. A set S
    becomes one slot at the position of its pivot p, the token that has received the most attention:

    `k = Σ_S w_i k_i`, `v = Σ_S w_i v_i`, `w_i = g_i / Σ_S g`, `g_i = exp(-|k_p - k_i|² / 2σ²)`

    and log|S| is added to its logit.

    Args:
      budget: slots kept of the prompt per KV head; generated tokens come on top. A float is a share
        of each row's tokens so far, of which no more than `max_prompt` count. None: `epsilon`
        decides.
      epsilon: ε in (-1, 1], 0.75 in the paper. All pairs above it are merged, and with a budget
        further ones until the budget is met. Without a budget the cache's capacity stays as it is,
        since the number of merged pairs depends on the text. None: the budget decides.
      recent: newest tokens that stay, an int, or a share of the row's tokens. The default is the
        paper's share: 0.17 at a budget of half the prompt and 0.08 at 35 %, linear between and
        scaled with the budget outside. At least 64 tokens stay, or seven eighths of a smaller
        budget. Without a budget it is 0.17.
      heavy: further tokens that stay because of the attention they have received, an int or a
        share. The default is 0.12 at half the prompt and 0.02 at 35 %.
      against: compares a token with its right `"neighbour"` (Algorithm 1), or with the set's last
        token, the `"anchor"` (Section 3.2), which needs `epsilon`.
      pivot: `"attention"`, or for comparison `"random"`.
      weights: `"gaussian"`, or the plain `"mean"` as the paper's first baseline.
      sigma: σ of each set. `"mean_distance"`: the mean of `|k_p - k_i|` over the members other than
        the pivot, divided by √2. A number: a constant σ; 5.0 is the best in Table 3. The right
        constant depends on the scale of a model's keys: if it is a little too small, only the pivot
        of a set counts. `"literal"`: equation 6 applied once, `Σ_S g / (√2 |S|)` with the g of
        σ = 5.
      value_scale: `"log_mass"`: values are weighted means, and the slot's mass is |S|. `"paper"`:
        values are multiplied by |S| instead, and the mass is 1. `"none"`: neither. Only the first
        conserves mass. `"paper"` is refused in float16, whose largest number is 65,504.
      seed: seed of random pivots, below 2**32. They depend only on seed, layer, KV head and
        position.

    Raises:
      TypeError, ValueError: neither budget nor epsilon; no numbers; a share outside (0, 1]; an
        epsilon outside (-1, 1]; a sigma that is not above 0; `recent + 2 · heavy` not below the
        budget (a heavy token separates two sets); `"anchor"` without epsilon; an unknown choice.

    Example:
      >>> import kvjax
      >>> kvjax.KVMerger(budget=0.5).extent(kvjax.kit.Extent(prompt=4096, new=100)).total
      2148

    References:
      Wang et al., Model Tells You Where to Merge: Adaptive KV Cache Merging for LLMs on
      Long-Context Tasks, arXiv 2407.08454.

    Deviations from the paper:
      A budget is met exactly; the paper's budgets follow from ε = 0.75. Its shares of recent and
      heavy tokens, printed as per cent, are read as fractions; where a row's budget could not be
      met, they are reduced. Scaled to small budgets they would merge the question and the text just
      before it; therefore recent tokens have a least number. Equation 6 defines σ by g and g by σ,
      and gives a σ of at most 0.71 against a measured "about 5"; therefore `sigma` has modes, and
      its default is ours. On SmolLM2 a σ of 5.0 has a smaller error and loss than the default, and
      half of it a far larger error (RESULTS.md, "What the defaults are worth"). Keys that differ by
      rounding alone count as equal. The paper multiplies values by |S|. The default of
      `value_scale` leaves attention unchanged where keys are equal; `"paper"` loses the text on
      SmolLM2 (docs/results/studies.md). ε = 0.75 was measured with a budget. With grouped queries
      attention is the mean over the group, and one decision is made per KV head. On a further turn
      a slot that stands for m tokens weighs `m · g`, and |S| counts tokens. Pinned slots are
      skipped: the tokens on both sides of one are neighbours. Keys are compared as attention saw
      them. Under a transform that stores them unrotated, the unrotated keys are merged.
    """

    budget: Budget | None = None
    epsilon: float | None = None
    recent: int | float | None = None
    heavy: int | float | None = None
    against: Literal["neighbour", "anchor"] = "neighbour"
    pivot: Literal["attention", "random"] = "attention"
    weights: Literal["gaussian", "mean"] = "gaussian"
    sigma: float | Literal["mean_distance", "literal"] = "mean_distance"
    value_scale: Literal["log_mass", "paper", "none"] = "log_mass"
    seed: int = 0

    card = Card(acts="prompt", paper="KVMerger, arXiv 2407.08454", when="sentences")

    @property
    def needs(self) -> Needs:
        """Accumulated attention, and remainders of the values that it writes."""
        return Needs(accumulated_attention=True, writes_values=True)

    def __post_init__(self):
        super().__post_init__()
        check_choice("against", self.against, ("neighbour", "anchor"))
        check_choice("pivot", self.pivot, ("attention", "random"))
        check_choice("weights", self.weights, ("gaussian", "mean"))
        check_choice("value_scale", self.value_scale, ("log_mass", "paper", "none"))
        if isinstance(self.sigma, str):
            check_choice("sigma", self.sigma, ("mean_distance", "literal"))
        else:
            check_number("sigma", self.sigma, 0.0)
        check_seed(self.seed)
        if self.budget is None and self.epsilon is None:
            raise ValueError("KVMerger needs budget=, epsilon= or both, got neither")
        if self.epsilon is not None:
            check_number("epsilon", self.epsilon, -1.0, 1.0)
        elif self.against == "anchor":
            raise ValueError("against='anchor' needs epsilon=, got None")

    def extent(self, extent: Extent) -> Extent:
        """Bounds the prompt to the budget, if there is one."""
        return extent if self.budget is None else super().extent(extent)

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, Array | None]:  # pyright: ignore[reportIncompatibleMethodOverride]  # its own state
        """Makes the random key of random pivots.

        Raises:
          ValueError: values are float16 and `value_scale` is "paper".
        """
        if self.value_scale == "paper" and cache.v.dtype == jnp.float16:
            raise ValueError(
                "value_scale='paper' multiplies values by the number of tokens that they stand "
                "for, and float16 ends at 65,504: take value_scale='log_mass', or "
                "dtype='bfloat16' or 'float32', got float16"
            )
        return cache, layer_key(self.seed, layer) if self.pivot == "random" else None

    def on_prompt(
        self, cache: KVCache, state: Array | None, step: Step
    ) -> tuple[Merge, Array | None]:
        """Merges every set into the slot of its pivot."""
        pivot, weights = self.plan(cache, step.keys, state, step.implementation)
        return Merge(pivot, weights, self.value_scale), state

    def plan(
        self,
        cache: KVCache,
        keys: Float[Array, "B H S D"],
        key: Array | NoneElsewhere = None,
        implementation: str | None = None,
    ) -> tuple[Int[Array, "B H S"], Float[Array, "B H S"]]:
        """Returns the slot of every slot's pivot, and every slot's weight in the merge.

        A slot that is merged with no other is its own pivot.

        Args:
          keys: keys as attention saw them.
          key: random key of random pivots.
          implementation: of the operations in `pallas_kernels`.
        """
        pivot = self._pivots(cache, self._merging_sets(cache, keys, implementation), key)
        mass = jnp.exp(cache.log_mass)
        if self.weights == "mean":
            return pivot, mass
        slot = slot_numbers(pivot.shape)
        distance = pair_distance(keys, slot, pivot, implementation=implementation)
        return pivot, mass * _gaussian(distance, self._sigma(distance, pivot, implementation))

    def _merging_sets(
        self, cache: KVCache, keys: Array, implementation: str | None
    ) -> Int[Array, "B H S"]:
        """Returns the number of every slot's merging set (Algorithm 1)."""
        order = sorted_slots(evictable(cache), cache.position)
        joined = self._joined(cache, keys, order, implementation)
        # A set starts where the token before joins nothing; the last one never does.
        starts = ~jnp.roll(joined, 1, axis=-1)
        return write_slots(order, order, jnp.cumsum(starts, axis=-1) - 1)

    def _joined(
        self,
        cache: KVCache,
        keys: Array,
        order: Int[Array, "B H S"],
        implementation: str | None,
    ) -> Bool[Array, "B H S"]:
        """Marks the entries of `order` that join the set of the entry after them."""
        mergeable = take_slots(self._mergeable(cache), order)
        pairs = mergeable & jnp.roll(mergeable, -1, axis=-1).at[..., -1].set(False)
        options = {"implementation": implementation}
        similarity = pair_cosine(keys, order, jnp.roll(order, -1, axis=-1), **options)
        joined = jnp.zeros_like(pairs)
        if self.against == "anchor":
            joined = join_anchors(keys, order, pairs, self.epsilon, **options)  # pyright: ignore[reportArgumentType]  # `__post_init__` demands one
        elif self.epsilon is not None:
            joined = pairs & above(similarity, self.epsilon, keys.shape[3])
        if self.budget is None:
            return joined
        # Each joined pair frees one slot: those above epsilon, then the most similar others.
        merges = evictable(cache).sum(-1, dtype=jnp.int32) - self.rows_budget(cache)[:, None]
        merges = jnp.maximum(merges, joined.sum(-1, dtype=jnp.int32))
        similarity = jnp.where(joined, jnp.inf, similarity)
        return keep_best(similarity, pairs, take_slots(cache.position, order), merges)

    def _mergeable(self, cache: KVCache) -> Bool[Array, "B H S"]:
        """Marks the slots that are neither recent nor heavy."""
        tables = self.counts(np.arange(cache.max_prompt + 1))
        length = jnp.minimum(cache.length, cache.max_prompt)
        recent, heavy = (jnp.asarray(table, jnp.int32)[length] for table in tables)
        older = evictable(cache) & ~newest(cache, recent)
        attention = cache.column("attention").mean(-1)
        return older & ~keep_best(attention, older, cache.position, heavy)

    def _pivots(
        self, cache: KVCache, sets: Int[Array, "B H S"], key: Array | NoneElsewhere
    ) -> Int[Array, "B H S"]:
        """Returns the slot of every slot's pivot; ties go to the lowest position."""
        if self.pivot == "attention":
            rank = cache.column("attention").mean(-1)
        else:
            rank = uniform(key, cache.position, cache.heads)
        best = rank == max_into(rank, sets)
        age = jnp.where(best, -cache.position, jnp.iinfo(jnp.int32).min)
        oldest = best & (age == max_into(age, sets))
        return max_into(jnp.where(oldest, slot_numbers(sets.shape), -1), sets)

    def _sigma(
        self,
        distance: Float[Array, "B H S"],
        pivot: Int[Array, "B H S"],
        implementation: str | None,
    ) -> float | Float[Array, "B H S"]:
        """Returns σ of every slot's set (equation 6); 0 where all keys equal the pivot's."""
        if not isinstance(self.sigma, str):
            return self.sigma

        def set_sum(x: Array) -> Array:
            return take_slots(sum_into(pivot, x, implementation=implementation), pivot)

        members = set_sum(jnp.ones_like(distance))
        if self.sigma == "literal":
            return set_sum(_gaussian(distance, 5.0)) / (math.sqrt(2) * members)
        return set_sum(distance) / (math.sqrt(2) * jnp.maximum(members - 1, 1))


def _gaussian(distance: Float[Array, "B H S"], sigma: float | Array) -> Float[Array, "B H S"]:
    """Returns `exp(-d² / 2σ²)`, and 1 where σ is 0."""
    sigma = jnp.where(sigma > 0, sigma, jnp.inf)
    return jnp.exp(-0.5 * jnp.square(distance / sigma))
