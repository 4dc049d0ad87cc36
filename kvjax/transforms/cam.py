"""CaM: merges the values of evicted tokens into the next kept tokens (ICML 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.payload import sum_into, take_slots, write_slots
from kvjax.cache.remainders import exact_values
from kvjax.cache.selection import oldest
from kvjax.cache.slots import KVCache, sorted_slots
from kvjax.checks import check_count, check_flag
from kvjax.compose.foreseen import foreseen, frees_while_decoding
from kvjax.compose.wrappers import check_evicts
from kvjax.decisions import Decision, Keep, Mark, Retain, carry_out
from kvjax.protocol import Card, Moment, Needs, State, Step, Wrapper
from kvjax.serialization import named, pytree_node
from kvjax.transforms.random import check_seed, layer_key, uniform
from pallas_kernels.base.annotations import NoneElsewhere
from pallas_kernels.base.dispatch import GPU_KERNELS, choose_implementation


@pytree_node
class CaMState(NamedTuple):
    """State of CaM.

    Args:
      key: random key of the draws; None: nothing is drawn.
      base: state of the base.
    """

    key: Array | NoneElsewhere
    base: State


@named("cam")
@dataclass(frozen=True)
class CaM(Wrapper):
    """Adds the values of tokens that its base evicts to those of the next tokens that are kept.

    Let `a` be the attention that a slot has received from all queries so far, as in H2O, averaged
    over the group's query heads. When token i is evicted while decoding, its targets T_i are the
    next m kept tokens by position (fewer where fewer remain). It is merged with probability

        p_i = clip(a_i / mean_{t in T_i} a_t, 0, 1)        (0 / 0 is 0),

    which means `v_t += v_i / m` for every t in T_i; the divisor is m even where T_i is smaller. The
    key of i is dropped, and no mass moves: the targets' logits stay as they are.

    Over a method that evicts only at the prompt's end (SnapKV), CaM does nothing unless `prompt` is
    set or the method is repeated: `CaM(Every(SnapKV(512), steps=64))`.

    Args:
      base: any evicting method.
      merge_tokens: m. By default the number of newest tokens that the base always keeps in a row:
        `budget - sinks` of StreamingLLM, half the budget of H2O, the window of SnapKV. The authors
        use 16 and 32.
      expected: add the expectation `p_i · v_i / m` instead of drawing.
      prompt: merge what is evicted at a prompt's end too.
      seed: seed of the draws, below 2**32. A draw depends only on seed, layer, KV head (within its
        group of `HeadGroups`) and token position.

    Raises:
      TypeError: `base` is not a transform; another argument has the wrong type.
      ValueError: `base` does not evict, `merge_tokens` below 1, a seed outside [0, 2**32); when a
        cache is made: `base` has no window of newest tokens and `merge_tokens` is not given.

    Example:
      >>> import kvjax
      >>> tx = kvjax.CaM(kvjax.StreamingLLM(budget=256), merge_tokens=16)
      >>> tx.extent(kvjax.kit.Extent(prompt=4096, new=1000)).total
      257

    References:
      Zhang et al., CaM: Cache Merging for Memory-efficient LLMs Inference, ICML 2024.

    Deviations from the paper:
      Any evicting method may be the base; the authors' code has StreamingLLM. With grouped queries
      one decision is made per KV head. Received attention includes the prompt's queries, and a
      token is compared with the mean of its own targets, as in the authors' code for streaming.
      Their code for benchmarks takes the last query's attention alone, and the mean of all recent
      tokens. The targets of a token are the next ones that its own eviction leaves. Where no target
      has received any attention, a token that has received some is merged. All tokens that a flush
      evicts are merged at once. Rows without an evicted token stay as they are.
    """

    merge_tokens: int | None = None
    expected: bool = False
    prompt: bool = False
    seed: int = 0

    card = Card(acts="every step", paper="CaM, ICML 2024", when="endless")

    @property
    def needs(self) -> Needs:
        """Needs of the base, received attention, and remainders where values change in steps."""
        merging = Needs(accumulated_attention=True, writes_values=frees_while_decoding(self.base))
        return self.base.needs.union(merging)

    def __post_init__(self):
        check_evicts(self.base, "CaM")
        if self.merge_tokens is not None:
            check_count("merge_tokens", self.merge_tokens, 1)
        check_flag("expected", self.expected)
        check_flag("prompt", self.prompt)
        check_seed(self.seed)

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, CaMState]:
        """Makes the key of the draws and the base's state."""
        if self.merge_tokens is None:
            self._check_window()
        cache, state = super().init(cache, layer)
        return cache, CaMState(None if self.expected else layer_key(self.seed, layer), state.base)

    def _check_window(self) -> None:
        """Raises if the base's decisions name no newest tokens from which m could be taken."""
        moments: tuple[Moment, ...] = ("flush", "step", *(("prompt",) if self.prompt else ()))
        decisions = [foreseen(self.base, moment) for moment in moments]
        evicting = [decision for decision in decisions if isinstance(decision, Keep | Retain)]
        if any(decision.newest is None for decision in evicting):
            raise ValueError(
                "merge_tokens must be given, since this base has no window of newest tokens that "
                f"it always keeps: got None over {self.base!r}"
            )

    def on_prompt(
        self, cache: KVCache, state: CaMState, step: Step
    ) -> tuple[Decision | None, CaMState]:
        """Merges the values of the tokens that the base evicts into those that it keeps.

        `on_flush` and `on_step` do the same at their moments.
        """
        decision, state = super().on_prompt(cache, state, step)
        if step.moment == "prompt" and not self.prompt:
            return decision, state
        if decision is None or isinstance(decision, Mark):
            return decision, state
        kept = carry_out(decision, cache, step).live
        count = self.merge_tokens
        if count is None:
            count = decision.newest  # pyright: ignore[reportAttributeAccessIssue]  # it keeps
        merge_tokens = jnp.broadcast_to(jnp.reshape(count, (-1, 1, 1)), (cache.shape[0], 1, 1))
        # A decode step evicts at most one token per KV head, which needs no sort.
        merge = self._merge_one if step.moment == "step" else self._merge_all
        values = merge(cache, kept, merge_tokens, state.key, step.implementation)
        return Retain(
            kept,
            pinned=decision.pinned if isinstance(decision, Retain) else None,
            values=values,
            columns=decision.columns,
            rows=decision.rows,
        ), state

    on_flush = on_step = on_prompt

    def _merge_weight(
        self,
        key: Array | NoneElsewhere,
        attention: Float[Array, "B H N"],
        mean: Float[Array, "B H N"],
        position: Int[Array, "B H N"],
        heads: int,
    ) -> Float[Array, "B H N"]:
        """Returns p, or a draw that is 1 with probability p."""
        has_mean = mean > 0
        ratio = attention / jnp.where(has_mean, mean, 1.0)
        p = jnp.where(has_mean, jnp.minimum(ratio, 1.0), (attention > 0).astype(jnp.float32))
        return p if self.expected else (uniform(key, position, heads) < p).astype(jnp.float32)

    def _merge_one(
        self,
        cache: KVCache,
        kept: Bool[Array, "B H S"],
        merge_tokens: Int[Array, "B 1 1"],
        key: Array | NoneElsewhere,
        implementation: str | None,
    ) -> Float[Array, "B H S D"]:
        """Returns the values after a decode step, which evicts at most one token per KV head.

        It sorts nothing and reads the values once.
        """
        received = cache.column("attention").mean(-1)
        evicted = cache.live & ~kept
        # -1 where nothing is evicted; no kept token is then a target.
        position = jnp.where(evicted, cache.position, -1).max(-1, keepdims=True)
        later = kept & (cache.position > position) & (position >= 0)
        unroll = choose_implementation(implementation, for_tpu=True) in GPU_KERNELS
        targets = oldest(later, cache.position, merge_tokens, unroll=unroll)
        attention = jnp.where(evicted, received, 0.0).sum(-1, keepdims=True)
        mean = jnp.mean(received, -1, keepdims=True, where=targets)
        weight = self._merge_weight(key, attention, mean, jnp.maximum(position, 0), cache.heads)
        weight = weight / merge_tokens.astype(jnp.float32)
        slot = jnp.argmax(evicted, axis=-1, keepdims=True)
        evicted_value, values = (exact_values(cache, x).astype(jnp.float32) for x in (slot, None))
        return jnp.where(targets[..., None], values + weight[..., None] * evicted_value, values)

    def _merge_all(
        self,
        cache: KVCache,
        kept: Bool[Array, "B H S"],
        merge_tokens: Int[Array, "B 1 1"],
        key: Array | NoneElsewhere,
        implementation: str | None,
    ) -> Float[Array, "B H S D"]:
        """Returns the values after a prompt or a flush, which evict any number of tokens at once.

        The rank n of a token is the number of kept tokens before it. An evicted token of rank n is
        merged into the kept tokens of ranks n to n + m − 1. So a kept token of rank n receives the
        evicted tokens of ranks n − m + 1 to n.
        """
        evicted = cache.live & ~kept
        order = sorted_slots(cache.live, cache.position)
        kept_in_order = take_slots(kept, order).astype(jnp.int32)
        rank = write_slots(order, order, jnp.cumsum(kept_in_order, axis=-1) - kept_in_order)
        nowhere = cache.slots
        received = cache.column("attention").mean(-1)
        # Mean attention of a token's targets: the kept tokens of the next m ranks.
        received_by_rank = sum_into(jnp.where(kept, rank, nowhere), received)
        total = take_slots(_sum_of_next(received_by_rank, merge_tokens), rank)
        count = jnp.clip(kept.sum(-1, keepdims=True, dtype=jnp.int32) - rank, 1, merge_tokens)
        mean = total / count.astype(jnp.float32)
        position = jnp.maximum(cache.position, 0)
        weight = self._merge_weight(key, received, mean, position, cache.heads)
        weight = weight / merge_tokens.astype(jnp.float32)
        values = exact_values(cache).astype(jnp.float32)
        # Sums of the evicted tokens of each rank, then over the m ranks up to a kept token's own.
        merged = weight[..., None] * values
        evicted_rank = jnp.where(evicted, rank, nowhere)
        merged = sum_into(evicted_rank, merged, implementation=implementation)
        sums = jnp.flip(_sum_of_next(jnp.flip(merged, 2), merge_tokens[..., None]), 2)
        return jnp.where(kept[..., None], values + take_slots(sums, rank), values)


def _sum_of_next(x: Float[Array, "B H N *D"], count: Int[Array, "B 1 1 *1"]) -> Array:
    """Returns `Σ_{i < count} x[n + i]` for every n.

    The sum is put together from sums of 1, 2, 4 … entries: differences of prefix sums would cancel.
    """

    def shifted(x: Array, by: int) -> Array:
        padding = [(0, by if axis == 2 else 0) for axis in range(x.ndim)]
        return jnp.pad(x, padding)[:, :, by:]

    total, count = jnp.zeros_like(x), jnp.minimum(count, x.shape[2])
    # Before round `bit`, x[n] is the sum of 2^bit entries from n on.
    for bit in range(x.shape[2].bit_length()):
        total = jnp.where(count & (1 << bit) > 0, x + shifted(total, 1 << bit), total)
        x = x + shifted(x, 1 << bit)
    return total
