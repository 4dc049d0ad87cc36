"""Arrays that are noted while a prompt is read, with their axes declared by where they stand."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from kvjax.serialization import pytree_node


@pytree_node
@dataclass(frozen=True)
class Record:
    """Arrays that a `Probe` notes of a document, until the prompt has been compressed.

    Head groups, meshes and padding treat them by their axes, and know nothing else of them.

    Args:
      slots: arrays by slot, `[B, H, S, ...]`; slots that are added get zeros.
      rows: arrays by row, `[B, ...]`.
    """

    slots: dict[str, Array] = field(default_factory=dict)
    rows: dict[str, Array] = field(default_factory=dict)

    def of_heads(self, kv_heads: Int[Array, " N"]) -> Record:
        """Returns the record of some KV heads."""
        return dataclasses.replace(self, slots=jax.tree.map(lambda x: x[:, kv_heads], self.slots))

    def with_slots(self, slots: int) -> Record:
        """Returns the record of the first slots, with more behind those that there are."""

        def resized(x: Array) -> Array:
            more = (0, max(slots - x.shape[2], 0))
            return jnp.pad(x, ((0, 0), (0, 0), more, *((0, 0),) * (x.ndim - 3)))[:, :, :slots]

        return dataclasses.replace(self, slots=jax.tree.map(resized, self.slots))

    def specs(self, rows: Any, heads: Any) -> Record:
        """Returns the partition specs of the arrays, whose rows and heads these axes divide."""
        return Record(
            dict.fromkeys(self.slots, PartitionSpec(rows, heads)),
            dict.fromkeys(self.rows, PartitionSpec(rows)),
        )
