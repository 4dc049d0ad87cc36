"""CaM: evicted values live on in the tokens that come next (ICML 2024)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.budgets.budgets import check_count
from kvjax.cache.payload import Payload, sum_into, take_slots, write_slots
from kvjax.cache.slots import KVCache
from kvjax.compose.wrappers import check_evicts
from kvjax.protocol import Extent, Full, KVTransform, Needs, State, Step
from kvjax.transforms.random import Seed, check_seed, layer_key, seed_of_layer, uniform
from kvjax.transforms.selection import oldest

_LAST = jnp.iinfo(jnp.int32).max


@dataclass(frozen=True)
class CaM(KVTransform):
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
        `HeadGroups`) and token position alone. `for_layer` makes it (seed, layer).

    Raises:
      TypeError: `base` is not a transform, a number is none.
      ValueError: `base` does not evict, `merge_tokens` below 1, a seed outside [0, 2**32); when a
        cache is made: `base` has no window of newest tokens and `merge_tokens` is not given.

    Example:
      >>> import kvjax
      >>> tx = kvjax.CaM(kvjax.StreamingLLM(budget=256), merge_tokens=16)
      >>> tx.extent(kvjax.Extent(prompt=4096, new=1000)).total
      257

    References:
      Zhang et al., CaM: Cache Merging for Memory-efficient LLMs Inference, ICML 2024.

    Deviations from the paper:
      Any evicting method may be the base; the authors' code has StreamingLLM. With grouped queries
      one decision is made per KV head. Received attention counts the prompt's queries. The targets
      of a token are the next ones that its own eviction leaves over. Where all targets have
      received nothing, a token that has received something is merged.
    """

    base: KVTransform
    merge_tokens: int | None = None
    expected: bool = False
    prompt: bool = False
    seed: Seed = 0

    paper: ClassVar[str] = "CaM, ICML 2024"
    bound = property(lambda self: self.base.bound)
    frees_while_decoding = property(lambda self: self.base.frees_while_decoding)
    merges = property(lambda self: True)

    def __post_init__(self):
        check_evicts(self.base, "CaM")
        if self.merge_tokens is not None:
            check_count("merge_tokens", self.merge_tokens, 1)
        check_seed(self.seed)

    @property
    def needs(self) -> Needs:
        """The base's, and accumulated attention."""
        return self.base.needs.union(Needs(accumulated_attention=True))

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """The wrapper around the base of this layer, with draws of its own."""
        base = self.base.for_layer(layer, num_layers)
        if isinstance(base, Full):
            return base
        seed = self.seed if self.expected else seed_of_layer(self.seed, layer)
        return dataclasses.replace(self, base=base, seed=seed)

    def extent(self, extent: Extent) -> Extent:
        """The base's."""
        return self.base.extent(extent)

    def init(self, cache: KVCache) -> tuple[KVCache, State]:
        """The key of the draws, and the base's state."""
        cache, inner = self.base.init(cache)
        if self.merge_tokens is None and self.base.recent(cache, inner) is None:
            raise ValueError(
                "merge_tokens must be given, since this base has no window of newest tokens that "
                f"it always keeps: got None over {self.base!r}"
            )
        return cache, (None if self.expected else layer_key(self.seed), inner)

    def update(self, cache: KVCache, state: State, step: Step) -> tuple[KVCache, State]:
        """Lets the base evict, and merges what is gone."""
        key, inner = state
        after, inner = self.base.update(cache, inner, step)
        decoding = step.phase == "decode"
        if decoding or (self.prompt and step.last):
            merge = self._merge_each if decoding else self._merge_all
            tokens = self._merge_tokens(after, inner)[:, None, None]
            after = after.replace(v=merge(cache, after, tokens, key))
        return after, (key, inner)

    def score(self, cache: KVCache, state: State, step: Step) -> Float[Array, "B Q S"] | None:
        """The base's score."""
        return self.base.score(cache, state[1], step)

    def passes(self, extent: Extent) -> int | None:
        """The base's."""
        return self.base.passes(extent)

    def recent(self, cache: KVCache, state: State) -> Int[Array, " B"] | None:
        """The base's window."""
        return self.base.recent(cache, state[1])

    def _merge_tokens(self, cache: KVCache, inner: State) -> Int[Array, " B"]:
        if self.merge_tokens is None:
            return self.base.recent(cache, inner)
        return jnp.full(cache.shape[0], self.merge_tokens, jnp.int32)

    def _weigh(
        self,
        key: Array | None,
        attention: Float[Array, "B H N"],
        mean: Float[Array, "B H N"],
        position: Int[Array, "B H N"],
    ) -> Float[Array, "B H N"]:
        """p, or a draw that is 1 with probability p."""
        some = mean > 0
        ratio = attention / jnp.where(some, mean, 1.0)
        p = jnp.where(some, jnp.minimum(ratio, 1.0), (attention > 0).astype(jnp.float32))
        return p if self.expected else (uniform(key, position) < p).astype(jnp.float32)

    def _merge_each(
        self, cache: KVCache, after: KVCache, tokens: Int[Array, "B 1 1"], key: Array | None
    ) -> Payload:
        """The values, one evicted token of every (row, head) merged after the other.

        For a step of a decode loop, which evicts none or one: no sort, and one pass over the values
        for each token. The carry of a loop is changed in place, the result of a cond is a copy.
        """
        received = cache.column("attention").mean(-1)

        def merge_oldest(carry: tuple[Payload, Array]) -> tuple[Payload, Array]:
            values, left = carry
            position = jnp.where(left, cache.position, _LAST).min(-1, keepdims=True)
            own = left & (cache.position == position)
            later = after.live & (cache.position > position)
            targets = oldest(later, cache.position, tokens)
            attention = jnp.where(own, received, 0.0).sum(-1, keepdims=True)
            mean = jnp.mean(received, -1, keepdims=True, where=targets)
            share = self._weigh(key, attention, mean, position) / tokens.astype(jnp.float32)
            value = values.read(jnp.argmax(own, axis=-1, keepdims=True)).astype(jnp.float32)
            rows = values.read()
            added = (rows.astype(jnp.float32) + share[..., None] * value).astype(rows.dtype)
            return values.fill(jnp.where(targets[..., None], added, rows)), left & ~own

        gone = cache.live & ~after.live
        values, _ = jax.lax.while_loop(lambda carry: carry[1].any(), merge_oldest, (after.v, gone))
        return values

    def _merge_all(
        self, cache: KVCache, after: KVCache, tokens: Int[Array, "B 1 1"], key: Array | None
    ) -> Payload:
        """The values, all evicted tokens merged at once, for the end of a prompt.

        Let n be the number of kept tokens before a token. A token that is gone goes into the kept
        ones with its n to n + m − 1, and a kept one gets those with its n − m + 1 to n.
        """
        gone, kept = cache.live & ~after.live, after.live
        order = jnp.argsort(jnp.where(cache.live, cache.position, _LAST), axis=-1)
        in_order = take_slots(kept, order).astype(jnp.int32)
        number = write_slots(order, order, jnp.cumsum(in_order, axis=-1) - in_order)
        nowhere = cache.slots
        received = cache.column("attention").mean(-1)
        of_kept = sum_into(jnp.where(kept, number, nowhere), received)
        total = take_slots(_sum_of_next(of_kept, tokens), number)
        count = jnp.clip(kept.sum(-1, keepdims=True, dtype=jnp.int32) - number, 1, tokens)
        mean = total / count.astype(jnp.float32)
        position = jnp.maximum(cache.position, 0)
        share = self._weigh(key, received, mean, position) / tokens.astype(jnp.float32)
        rows = after.v.read()
        moved = share[..., None] * rows.astype(jnp.float32)
        moved = sum_into(jnp.where(gone, number, nowhere), moved)
        sums = jnp.flip(_sum_of_next(jnp.flip(moved, 2), tokens[..., None]), 2)
        added = rows.astype(jnp.float32) + take_slots(sums, number)
        return after.v.fill(jnp.where(kept[..., None], added.astype(rows.dtype), rows))


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
