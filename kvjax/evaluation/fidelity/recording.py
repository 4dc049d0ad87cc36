"""Records of decode steps: the inputs of each layer, and the tokens that it attended to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.attention.layer import Cache, LayerCache, layer_caches, map_parts
from kvjax.cache.rope import Rope
from kvjax.cache.slots import KVCache
from kvjax.compose.wrappers import in_head_order, map_head_groups
from kvjax.decisions import Decision
from kvjax.protocol import AttentionOptions, KVTransform, Needs, State, Step, View, Wrapper
from pallas_kernels import Queries, Seen, decode_attention
from pallas_kernels.attention.call import join_sinks


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Record:
    """A decode step of one layer, or of one group of its KV heads.

    Args:
      query, key, value: those of the new tokens; rotated if `rope` is None.
      predicted: the query as it was predicted a layer earlier, rotated if `query` is; None if the
        model predicts none.
      seen: token positions of the slots that attention looked at, the new tokens' included; -1 =
        none. K lists, one per KV head or one per query head.
      rope: rotary embedding of query and key.
      options: options of the attention.
      implementation: implementation of the attention's operations (static).
    """

    query: Float[Array, "B Q T D"]
    key: Float[Array, "B H T D"]
    value: Float[Array, "B H T D"]
    predicted: Float[Array, "B Q T D"] | None
    seen: Int[Array, "B K N"]
    rope: Rope | None
    options: AttentionOptions
    implementation: str | None = field(metadata={"static": True})


class Recording(NamedTuple):
    """State of a `Recorded`: the state of its base, and the record of a decode step.

    Between `select` and `on_step`, the record is a tuple of what `select` knows of it.
    """

    base: State
    record: Record | tuple | None = None


@dataclass(frozen=True)
class Recorded(Wrapper):
    """A layer's transform that keeps a `Record` of a decode step beside its state."""

    @property
    def needs(self) -> Needs:
        """Needs of the base, and the predicted query."""
        return self.base.needs._replace(predicted_query=True)

    def select(self, view: View, state: Recording, query: Array) -> tuple[View, Recording]:
        """Selects as the base does, and keeps what `on_step` does not receive."""
        view, state = super().select(view, state, query)
        positions = view.per_slot(view.cache.position, -1)
        return view, state._replace(record=(query, view.predicted, positions, view.slots))

    def on_step(self, cache: KVCache, state: State, step: Step) -> tuple[Decision | None, State]:
        """Decides as the base does, and completes the record with keys and values of the step."""
        query, predicted, positions, slots = state.record
        # A token that was not stored has the index past the last slot.
        slots = jnp.minimum(slots, cache.slots - 1)
        rope = step.rope if self.needs.unrotated_keys else None
        record = Record(
            query, cache.k.read(slots), cache.v.read(slots), predicted, positions, rope,
            step.options, step.implementation,
        )  # fmt: skip
        decision, state = super().on_step(cache, state, step)
        return decision, state._replace(record=record)


def recorded(layer: KVTransform) -> KVTransform:
    """Wraps each head group of a bound transform in `Recorded`."""
    return map_head_groups(Recorded, layer)


def record(cache: Cache) -> Cache:
    """Converts the cache of a transform to one of its `recorded` transform."""

    def prepared(part: LayerCache) -> LayerCache:
        return dataclasses.replace(
            part, transform=Recorded(part.transform), state=Recording(part.state)
        )

    return map_parts(prepared, cache)


def unrecord(cache: Cache) -> tuple[Cache, list[Record]]:
    """Splits a cache after a decode step into the plain cache and the records of head groups."""
    records = [part.state.record for part in layer_caches(cache)]

    def plain(part: LayerCache) -> LayerCache:
        base = part.transform.base  # pyright: ignore[reportAttributeAccessIssue]
        return dataclasses.replace(part, transform=base, state=part.state.base)

    return map_parts(plain, cache), records


def looked_at(
    layer: KVTransform, cache: Cache, records: list[Record], length: int
) -> Bool[Array, "B H L"]:
    """Marks which of `length` positions each KV head looked at, from the records of all groups.

    If each query head has its own list, the list of a KV head joins those of its query heads.
    """
    marks = [holds(x.seen.reshape(*x.key.shape[:2], -1), length) for x in records]
    return in_head_order(layer, cache, marks)


def attend_to_all(
    kv: KVCache, record: Record, position: Int[Array, " B"]
) -> tuple[Float[Array, "B Q 1 D"], Float[Array, "B Q S"]]:
    """Computes output and probabilities of a new token's attention to all slots.

    Args:
      kv: slots, the new token's included.
      record: record of the new token's decode step.
      position: position of each row's new token.
    """
    query, keys = record.query, kv.k.read()
    if record.rope is not None:
        query = record.rope.rotate(query, position[:, None])
        keys = record.rope.rotate(keys, kv.position)
    batch, kv_heads, slots = kv.shape
    grouped = query.reshape(batch, kv_heads, kv.group, *query.shape[2:])
    out, lse, attention = decode_attention(
        Queries(grouped, position[:, None]), keys, kv.v.read(), Seen(kv.log_mass, kv.position),
        record.options.mask, implementation=record.implementation,
    )  # fmt: skip
    _, out, attention = join_sinks(record.options.sinks, lse, out, attention)
    return out.reshape(query.shape).astype(query.dtype), attention.reshape(batch, -1, slots)


def holds(kept: Int[Array, "B H S"], length: int) -> Bool[Array, "B H L"]:
    """Marks which of `length` token positions are kept; -1 stands for no token."""
    mark = jax.vmap(jax.vmap(lambda at: jnp.zeros(length, bool).at[at].set(True, mode="drop")))
    # Index -1 would mark the last position; one past the end is dropped.
    return mark(jnp.where(kept >= 0, kept, length))
