"""Records of decode steps: what each layer was given, and which tokens it attended to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.attention.layer import Cache, LayerCache, layer_caches, map_parts
from kvjax.cache.slots import KVCache
from kvjax.compose.wrappers import in_head_order, map_head_groups
from kvjax.decisions import Decision
from kvjax.protocol import AttentionOptions, KVTransform, State, Step, View, Wrapper
from kvjax.rope import Rope
from pallas_kernels import decode_attention
from pallas_kernels.attention.call import beside_sinks


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Record:
    """A decode step of one layer, or of one group of its KV heads.

    Args:
      query, key, value: of the new tokens; rotated where `rope` is None.
      predicted: the query as it was predicted a layer earlier, rotated if `query` is; None where
        the model predicts none.
      seen: token positions of the slots that attention looked at, the new tokens' included; -1 =
        none. K lists, one per KV head or one per query head.
      rope: what rotates query and key.
      options: of the attention.
      implementation: of its operations (static).
    """

    query: Float[Array, "B Q T D"]
    key: Float[Array, "B H T D"]
    value: Float[Array, "B H T D"]
    predicted: Float[Array, "B Q T D"] | None
    seen: Int[Array, "B K N"]
    rope: Rope | None
    options: AttentionOptions
    implementation: str | None = field(metadata={"static": True})

    @property
    def kernel_options(self) -> dict:
        """Static options by name, as the operations of `pallas_kernels` take them."""
        return {**self.options.static, "implementation": self.implementation}


class Recording(NamedTuple):
    """State of a `Recorded`: its base's, and a step's `Record` or what `select` knows of it."""

    base: State
    record: Record | tuple | None = None


@dataclass(frozen=True)
class Recorded(Wrapper):
    """A layer's transform that leaves a `Record` of a decode step beside its state."""

    needs = property(lambda self: self.base.needs._replace(predicted_query=True))

    def select(self, view: View, state: Recording, query: Array) -> tuple[View, Recording]:
        """Selects as the base does, and keeps what `on_step` does not see."""
        view, state = super().select(view, state, query)
        seen = view.per_slot(view.cache.position, -1)
        return view, state._replace(record=(query, view.predicted, seen, view.slots))

    def on_step(self, cache: KVCache, state: State, step: Step) -> tuple[Decision | None, State]:
        """Decides as the base does, after the new tokens have been looked up."""
        query, predicted, seen, slots = state.record
        slots = jnp.minimum(slots, cache.slots - 1)
        rope = step.rope if self.needs.unrotated_keys else None
        record = Record(
            query, cache.k.read(slots), cache.v.read(slots), predicted, seen, rope,
            step.options, step.implementation,
        )  # fmt: skip
        decision, state = super().on_step(cache, state, step)
        return decision, state._replace(record=record)


def recorded(layer: KVTransform) -> KVTransform:
    """Returns a bound transform that records, group by group."""
    return map_head_groups(Recorded, layer)


def record(cache: Cache) -> Cache:
    """Prepares the cache of a transform for the transform that is `recorded`."""

    def prepared(part: LayerCache) -> LayerCache:
        return dataclasses.replace(
            part, transform=Recorded(part.transform), state=Recording(part.state)
        )

    return map_parts(prepared, cache)


def unrecord(cache: Cache) -> tuple[Cache, list[Record]]:
    """Splits a cache after a decode step into the transform's own and each head group's record."""
    records = [part.state.record for part in layer_caches(cache)]

    def plain(part: LayerCache) -> LayerCache:
        base = part.transform.base  # pyright: ignore[reportAttributeAccessIssue]
        return dataclasses.replace(part, transform=base, state=part.state.base)

    return map_parts(plain, cache), records


def looked_at(layer: KVTransform, records: list[Record], length: int) -> Bool[Array, "B H L"]:
    """Marks which of `length` positions each KV head looked at, from the records of all groups.

    Where query heads have lists of their own, a KV head's list joins those of its query heads.
    """
    marks = [holds(x.seen.reshape(*x.key.shape[:2], -1), length) for x in records]
    return in_head_order(layer, marks)


def attend_to_all(
    kv: KVCache, record: Record, position: Int[Array, " B"]
) -> tuple[Float[Array, "B Q 1 D"], Float[Array, "B Q S"]]:
    """Output and probabilities of a new token's attention to all slots.

    Args:
      kv: that hold the new token already.
      record: of its decode step.
      position: of each row's new token.
    """
    query, keys = record.query, kv.k.read()
    if record.rope is not None:
        query = record.rope.rotate(query, position[:, None])
        keys = record.rope.rotate(keys, kv.position)
    batch, kv_heads, slots = kv.shape
    out, lse, attention = decode_attention(
        query.reshape(batch, kv_heads, kv.group, *query.shape[2:]), keys, kv.v.read(),
        kv.log_mass, position[:, None], kv.position, **record.kernel_options,
    )  # fmt: skip
    _, out, attention = beside_sinks(record.options.sinks, lse, out, attention)
    return out.reshape(query.shape).astype(query.dtype), attention.reshape(batch, -1, slots)


def holds(kept: Int[Array, "B H S"], length: int) -> Bool[Array, "B H L"]:
    """Whether each token position is among those kept; -1 is none."""
    mark = jax.vmap(jax.vmap(lambda at: jnp.zeros(length, bool).at[at].set(True, mode="drop")))
    return mark(jnp.where(kept >= 0, kept, length))
