"""A call of `attend` as two values: the new tokens, and how they are attended to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.payload import take_slots
from kvjax.cache.rope import Rope
from kvjax.cache.slots import KVCache, ranks
from kvjax.compose.wrappers import Heads
from kvjax.protocol import AttentionOptions, Inputs, Needs, Phase
from pallas_kernels.base.annotations import NoneElsewhere


class Tokens(NamedTuple):
    """The new tokens of a call.

    Args:
      q, k, v: query head h belongs to KV head `h // (Q / H)`. Without k and v, queries attend to
        what the cache holds.
      positions: token positions; -1 marks padding.
      predicted: the query as it was predicted a layer earlier; None: it was not.
      inputs: what entered the layer; None: the model does not give it, or no probe asks for it.
    """

    q: Float[Array, "B Q T D"]
    k: Float[Array, "B H T D"] | NoneElsewhere
    v: Float[Array, "B H T D"] | NoneElsewhere
    positions: Int[Array, "B T"]
    predicted: Float[Array, "B Q T D"] | None = None
    inputs: Inputs | None = None

    def of_heads(self, kv_heads: Heads, group: int) -> Tokens:
        """The tokens of some KV heads, each with its `group` query heads."""
        kv, query = jnp.asarray(kv_heads), query_heads(kv_heads, group)
        predicted = None if self.predicted is None else self.predicted[:, query]
        k, v = (None if x is None else x[:, kv] for x in (self.k, self.v))
        return self._replace(q=self.q[:, query], k=k, v=v, predicted=predicted)

    def rotated(self, rope: Rope | None) -> Tokens:
        """The tokens with queries and keys rotated at their positions; None: as they are."""
        if rope is None:
            return self
        q, k, predicted = (
            None if x is None else rope.rotate(x, self.positions)
            for x in (self.q, self.k, self.predicted)
        )  # fmt: skip
        return self._replace(q=q, k=k, predicted=predicted)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Call:
    """Options of a call of `attend`.

    Args:
      rope: rotates queries and keys; None: they come rotated.
      options: scale, window, soft cap and sinks.
      phase: whether the tokens are those of a prompt, of a probe, or of a step (static).
      last: whether they complete the prompt (static).
      repeats: whether a step's tokens may be some that the cache holds already (static).
      implementation: of the operations in `pallas_kernels` (static).
    """

    rope: Rope | NoneElsewhere
    options: AttentionOptions
    phase: Phase = field(metadata={"static": True})
    last: bool = field(metadata={"static": True})
    implementation: str | None = field(default=None, metadata={"static": True})
    repeats: bool = field(default=False, metadata={"static": True})

    @property
    def kernel_options(self) -> dict:
        """Static options by name, as the operations of `pallas_kernels` take them."""
        return {"mask": self.options.mask, "implementation": self.implementation}

    def of_heads(self, kv_heads: Heads, group: int) -> Call:
        """The call for some KV heads: with the sinks of their query heads."""
        options = self.options.of_heads(query_heads(kv_heads, group))
        return dataclasses.replace(self, options=options)


def query_heads(kv_heads: Heads, group: int) -> Int[Array, " N"]:
    """The query heads of some KV heads, in their order."""
    return (jnp.asarray(kv_heads)[:, None] * group + jnp.arange(group)[None]).reshape(-1)


def key_positions(needs: Needs, kv: KVCache) -> Int[Array, "B H S"]:
    """Returns where each stored key is rotated: its position, or its rank among live slots."""
    return ranks(kv.live, kv.position) if needs.reposition else kv.position


def query_positions(
    needs: Needs, kv: KVCache, slots: Int[Array, "B H T"], positions: Int[Array, "B T"]
) -> Int[Array, "B T"] | Int[Array, "B Q T"]:
    """Returns where the queries of the new tokens in these slots are rotated."""
    if not needs.reposition:
        return positions
    rank = take_slots(key_positions(needs, kv), jnp.minimum(slots, kv.slots - 1))
    return jnp.repeat(rank, kv.group, axis=1)


def held_query_positions(
    needs: Needs, kv: KVCache, positions: Int[Array, "B T"]
) -> Int[Array, "B T"] | Int[Array, "B Q T"]:
    """Returns where queries of tokens that the cache holds already are rotated."""
    if not needs.reposition:
        return positions
    earlier = kv.position[:, :, None] < positions[:, None, :, None]
    rank = (earlier & kv.live[:, :, None]).sum(-1, dtype=jnp.int32)
    return jnp.repeat(rank, kv.group, axis=1)


def add_attention(kv: KVCache, mass: Float[Array, "B Q S"]) -> KVCache:
    """The slots with the attention that each received added to the column "attention"."""
    received = jnp.moveaxis(mass.reshape(*kv.shape[:2], kv.group, -1), 2, -1)
    return kv.with_column("attention", kv.column("attention") + received)
