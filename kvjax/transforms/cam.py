"""CaM: evicted values live on in the tokens that come next (ICML 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

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
from kvjax.protocol import Moment, Needs, State, Step, Wrapper
from kvjax.transforms.random import check_seed, layer_key, uniform
from pallas_kernels.base.dispatch import GPU_KERNELS, choose_implementation


class CaMState(NamedTuple):
    """The key of the draws (None where nothing is drawn), and the base's state."""

    key: Array | None
    base: State


@dataclass(frozen=True)
class CaM(Wrapper):
    """Adds the values of tokens that its base evicts to those of the next tokens that are kept.

    Let `a` be the attention that a slot has received from all queries so far, as in H2O, averaged
    over the group's query heads. A token i that is evicted while decoding is merged into T_i, the
    next m kept tokens by position (fewer where fewer are left), with probability

        p_i = clip(a_i / mean_{t in T_i} a_t, 0, 1)        (0 / 0 is 0),

    and then `v_t += v_i / m` for every t in T_i, always divided by m. Its key is dropped, and no
    mass moves: the targets' logits stay as they are.

    Over a method that evicts only at the prompt's end (SnapKV), CaM does nothing unless `prompt` is
    set or the method is repeated: `CaM(Every(SnapKV(512), steps=64))`.

    Args:
      base: any evicting method.
      merge_tokens: m. By default the newest tokens that the base always keeps, for each row:
        `budget - sinks` of StreamingLLM, half the budget of H2O, the window of SnapKV. The authors
        take 16 and 32.
      expected: add `p_i · v_i / m` instead of drawing.
      prompt: merge what is evicted at a prompt's end too.
      seed: of the draws, below 2**32. A draw depends on seed, layer, KV head (within its group of
        `HeadGroups`) and token position alone.

    Raises:
      TypeError: `base` is not a transform, a number is none.
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
      one decision is made per KV head. Received attention counts the prompt's queries, and a token
      is compared with the mean of its own targets, as in the authors' code for streaming; their
      code for benchmarks has the last query's attention alone, and the mean of all recent tokens.
      The targets of a token are the next ones that its own eviction leaves over. Where all targets
      have received nothing, a token that has received something is merged. What goes at a flush
      goes all at once, and nothing is merged in rows of which nothing goes.
    """

    merge_tokens: int | None = None
    expected: bool = False
    prompt: bool = False
    seed: int = 0

    paper: ClassVar[str] = "CaM, ICML 2024"

    @property
    def needs(self) -> Needs:
        """What the base needs, received attention, and remainders where it merges in steps."""
        own = Needs(accumulated_attention=True, writes_values=frees_while_decoding(self.base))
        return self.base.needs.union(own)

    def __post_init__(self):
        check_evicts(self.base, "CaM")
        if self.merge_tokens is not None:
            check_count("merge_tokens", self.merge_tokens, 1)
        check_flag("expected", self.expected)
        check_flag("prompt", self.prompt)
        check_seed(self.seed)

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, CaMState]:
        """The key of the draws, and the base's state."""
        if self.merge_tokens is None:
            self._check_window()
        cache, state = super().init(cache, layer)
        return cache, CaMState(None if self.expected else layer_key(self.seed, layer), state.base)

    def _check_window(self) -> None:
        moments: tuple[Moment, ...] = ("flush", "step", *(("prompt",) if self.prompt else ()))
        made = [foreseen(self.base, moment) for moment in moments]
        if any(one.newest is None for one in made if isinstance(one, Keep | Retain)):
            raise ValueError(
                "merge_tokens must be given, since this base has no window of newest tokens that "
                f"it always keeps: got None over {self.base!r}"
            )

    def on_prompt(
        self, cache: KVCache, state: CaMState, step: Step
    ) -> tuple[Decision | None, CaMState]:
        """What the base decides, and values that hold what it evicts.

        So do `on_flush` and `on_step`, the one token of a KV head that a decode step evicts.
        """
        decision, state = super().on_prompt(cache, state, step)
        if step.moment == "prompt" and not self.prompt:
            return decision, state
        if decision is None or isinstance(decision, Mark):
            return decision, state
        kept = carry_out(decision, cache, step).live
        if self.merge_tokens is None:
            newest = decision.newest  # pyright: ignore[reportAttributeAccessIssue]  # it keeps
            tokens = newest[:, None, None]
        else:
            tokens = jnp.full((cache.shape[0], 1, 1), self.merge_tokens, jnp.int32)
        if step.moment == "step":
            values = self._merge_one(cache, kept, tokens, state.key, step.implementation)
        else:
            values = self._merge_all(cache, kept, tokens, state.key, step.implementation)
        return Retain(
            kept,
            pinned=decision.pinned if isinstance(decision, Retain) else None,
            values=values,
            columns=decision.columns,
            rows=decision.rows,
        ), state

    on_flush = on_step = on_prompt

    def _weigh(
        self,
        key: Array | None,
        attention: Float[Array, "B H N"],
        mean: Float[Array, "B H N"],
        position: Int[Array, "B H N"],
        heads: int,
    ) -> Float[Array, "B H N"]:
        """p, or a draw that is 1 with probability p."""
        some = mean > 0
        ratio = attention / jnp.where(some, mean, 1.0)
        p = jnp.where(some, jnp.minimum(ratio, 1.0), (attention > 0).astype(jnp.float32))
        return p if self.expected else (uniform(key, position, heads) < p).astype(jnp.float32)

    def _merge_one(
        self,
        cache: KVCache,
        kept: Bool[Array, "B H S"],
        tokens: Int[Array, "B 1 1"],
        key: Array | None,
        implementation: str | None,
    ) -> Float[Array, "B H S D"]:
        """The values after a decode step, which evicts none or one token of a (row, KV head).

        No sort, and one pass over the values.
        """
        received = cache.column("attention").mean(-1)
        gone = cache.live & ~kept
        position = jnp.where(gone, cache.position, -1).max(-1, keepdims=True)
        later = kept & (cache.position > position) & (position >= 0)
        unroll = choose_implementation(implementation, for_tpu=True) in GPU_KERNELS
        targets = oldest(later, cache.position, tokens, unroll=unroll)
        attention = jnp.where(gone, received, 0.0).sum(-1, keepdims=True)
        mean = jnp.mean(received, -1, keepdims=True, where=targets)
        share = self._weigh(key, attention, mean, jnp.maximum(position, 0), cache.heads)
        share = share / tokens.astype(jnp.float32)
        evicted = jnp.argmax(gone, axis=-1, keepdims=True)
        value, rows = (exact_values(cache, x).astype(jnp.float32) for x in (evicted, None))
        return jnp.where(targets[..., None], rows + share[..., None] * value, rows)

    def _merge_all(
        self,
        cache: KVCache,
        kept: Bool[Array, "B H S"],
        tokens: Int[Array, "B 1 1"],
        key: Array | None,
        implementation: str | None,
    ) -> Float[Array, "B H S D"]:
        """The values, any number of evicted tokens merged at once, for a prompt's end or a flush.

        Let n be the number of kept tokens before a token. A token that is gone goes into the kept
        ones with its n to n + m − 1, and a kept one gets those with its n − m + 1 to n.
        """
        gone = cache.live & ~kept
        order = sorted_slots(cache.live, cache.position)
        in_order = take_slots(kept, order).astype(jnp.int32)
        number = write_slots(order, order, jnp.cumsum(in_order, axis=-1) - in_order)
        nowhere = cache.slots
        received = cache.column("attention").mean(-1)
        of_kept = sum_into(jnp.where(kept, number, nowhere), received)
        total = take_slots(_sum_of_next(of_kept, tokens), number)
        count = jnp.clip(kept.sum(-1, keepdims=True, dtype=jnp.int32) - number, 1, tokens)
        mean = total / count.astype(jnp.float32)
        position = jnp.maximum(cache.position, 0)
        share = self._weigh(key, received, mean, position, cache.heads)
        share = share / tokens.astype(jnp.float32)
        rows = exact_values(cache).astype(jnp.float32)
        moved = share[..., None] * rows
        into = jnp.where(gone, number, nowhere)
        moved = sum_into(into, moved, implementation=implementation)
        sums = jnp.flip(_sum_of_next(jnp.flip(moved, 2), tokens[..., None]), 2)
        return jnp.where(kept[..., None], rows + take_slots(sums, number), rows)


def _sum_of_next(x: Float[Array, "B H N *D"], count: Int[Array, "B 1 1 *1"]) -> Array:
    """`Σ_{i < count} x[n + i]`, from sums of 1, 2, 4 … entries: prefix sums would cancel."""

    def later(x: Array, by: int) -> Array:
        padding = [(0, by if axis == 2 else 0) for axis in range(x.ndim)]
        return jnp.pad(x, padding)[:, :, by:]

    total, count = jnp.zeros_like(x), jnp.minimum(count, x.shape[2])
    for bit in range(x.shape[2].bit_length()):
        total = jnp.where(count & (1 << bit) > 0, x + later(total, 1 << bit), total)
        x = x + later(x, 1 << bit)
    return total
