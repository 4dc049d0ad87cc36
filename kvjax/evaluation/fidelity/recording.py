"""Records of decode steps: what each layer was given, and which tokens it attended to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.attention.layer import Cache, LayerCache
from kvjax.cache.slots import KVCache
from kvjax.compose.wrappers import HeadGroups
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
        """The base's selection, kept together with the query and the predicted one."""
        view, state = super().select(view, state, query)
        seen = view.per_slot(view.cache.position, -1)
        return view, state._replace(record=(query, view.predicted, seen))

    def on_step(self, cache: KVCache, state: State, step: Step) -> tuple[Decision | None, State]:
        """The base's decision, after the new tokens have been looked up."""
        query, predicted, seen = state.record
        slots = jnp.minimum(step.slots, cache.slots - 1)
        rope = step.rope if self.needs.unrotated_keys else None
        new = Record(
            query, cache.k.read(slots), cache.v.read(slots), predicted, seen, rope,
            step.options, step.implementation,
        )  # fmt: skip
        decision, state = super().on_step(cache, state, step)
        return decision, state._replace(record=new)


def recorded(layer: KVTransform) -> KVTransform:
    """A bound transform that records, group by group."""
    if isinstance(layer, HeadGroups):
        return HeadGroups(tuple((heads, Recorded(tx)) for heads, tx in layer.groups))
    return Recorded(layer)


def record(cache: Cache) -> Cache:
    """The cache of a transform, for the same transform `recorded` to decode with."""
    if not isinstance(cache, LayerCache):
        return tuple(map(record, cache))
    return dataclasses.replace(
        cache, transform=Recorded(cache.transform), state=Recording(cache.state)
    )


def unrecord(cache: Cache) -> tuple[Cache, list[Record]]:
    """After a decode step: the cache of the transform itself, and each head group's record."""
    if not isinstance(cache, LayerCache):
        caches, records = zip(*map(unrecord, cache), strict=True)
        return caches, [x for group in records for x in group]
    state, last = cache.state
    return dataclasses.replace(cache, transform=cache.transform.base, state=state), [last]  # pyright: ignore[reportAttributeAccessIssue]


def looked_at(layer: KVTransform, records: list[Record], length: int) -> Bool[Array, "B H L"]:
    """Whether each KV head looked at each of `length` positions, from the records of all groups.

    Where query heads have lists of their own, a KV head's list joins those of its query heads.
    """
    marks = [holds(x.seen.reshape(*x.key.shape[:2], -1), length) for x in records]
    if not isinstance(layer, HeadGroups):
        return marks[0]
    order = np.argsort([head for heads, _ in layer.groups for head in heads])
    return jnp.concatenate(marks, axis=1)[:, order]


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
