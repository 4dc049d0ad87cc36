"""Arrays that are noted while a prompt is read, with their axes declared by where they stand."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from kvjax.serialization import pytree_node


class NotNoted(TypeError):
    """The error that a probe has not noted what is read."""


@jax.tree_util.register_pytree_node_class
class _Noted(dict[str, Array]):
    """Arrays by name, of which one that is missing is told from other keys that are missing."""

    where: ClassVar[str] = "slots"

    def __missing__(self, name: str) -> Array:
        noted = ", ".join(self) or "nothing"
        raise NotNoted(
            f"the {self.where} of a document's record have {noted}, and not {name!r}: name a probe "
            "in `needs` that notes it"
        )

    def tree_flatten(self) -> tuple[tuple[Array, ...], tuple[str, ...]]:
        return tuple(self.values()), tuple(self)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], arrays: tuple[Array, ...]) -> _Noted:
        return cls(zip(names, arrays, strict=True))


@jax.tree_util.register_pytree_node_class
class _NotedRows(_Noted):
    where = "rows"


@pytree_node
@dataclass(frozen=True)
class Record:
    """Arrays that a `Probe` notes of a document, until the prompt has been compressed.

    A probe makes and returns records, and its method reads `Step.record`. Head groups, meshes and
    padding treat the arrays by their axes, and know nothing else of them.

    Args:
      slots: arrays by slot, `[B, H, S, ...]`, by name; slots that are added get zeros.
      rows: arrays by row, `[B, ...]`, by name.

    Example:
      >>> import jax.numpy as jnp
      >>> from kvjax.kit import Record
      >>> record = Record(slots={"looks": jnp.zeros((1, 2, 8))}, rows={"pieces": jnp.array([3])})
      >>> record.slots["looks"].shape, record.rows["pieces"].tolist()
      ((1, 2, 8), [3])
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

    def naming_what_is_missing(self) -> Record:
        """Returns a record that raises `NotNoted` where an array is read that it does not have."""
        return Record(_Noted(self.slots), _NotedRows(self.rows))

    def specs(self, rows: Any, heads: Any) -> Record:
        """Returns the partition specs of the arrays, whose rows and heads these axes divide."""
        return dataclasses.replace(
            self,
            slots=dict.fromkeys(self.slots, PartitionSpec(rows, heads)),
            rows=dict.fromkeys(self.rows, PartitionSpec(rows)),
        )
