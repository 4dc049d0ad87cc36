"""Base of the methods that keep every token and attend to a selection of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.budgets.budgets import rows_budget
from kvjax.cache.payload import take_slots, write_slots
from kvjax.cache.slots import KVCache
from kvjax.checks import check_count, check_flag, check_layers
from kvjax.protocol import Extent, Full, KVTransform, Needs, Stage, View
from kvjax.serialization import pytree_node
from kvjax.transforms.held_budget import WithBudget


@pytree_node
@dataclass(frozen=True)
class Held:
    """A selection of N slots that several decode steps share, and room for the tokens since.

    Args:
      index: its slots, then those of up to M newer tokens; -1 = none.
      keys, values: their rows, as they were read when the selection was made.
      first: slot of the first newer token.
      log_mass: of what is estimated beside the selection; None: nothing is.
    """

    index: Int[Array, "B K N+M"]
    keys: Float[Array, "B K N+M D"]
    values: Float[Array, "B K N+M D"]
    first: Int[Array, "B H"]
    log_mass: Float[Array, "B K _"] | None

    def with_new_token(
        self, cache: KVCache, slots: Int[Array, "B H 1"], room: int
    ) -> tuple[Held, Bool[Array, "B H 1"]]:
        """Adds the token of a step, and tells where there is no place for it.

        Args:
          cache: with the token in `slots`.
          room: M.
        """
        size, stored = self.index.shape[2], slots < cache.slots
        place = size - room + slots - self.first[..., None]
        fits = stored & (place < size)
        place = of_lists(jnp.where(fits, place, size), cache)
        new = (
            of_lists(x.read(jnp.minimum(slots, cache.slots - 1)), cache) for x in (cache.k, cache.v)
        )
        held = (self.index, self.keys, self.values)
        rows = (of_lists(slots, cache), *new)
        index, keys, values = (write_slots(x, place, y) for x, y in zip(held, rows, strict=True))
        return dataclasses.replace(self, index=index, keys=keys, values=values), stored & ~fits


class Recall(WithBudget):
    """Base class of methods that attend to a selection of the slots in each decode step.

    A subclass has the fields `budget`, `per_query_head` and `dense_layers`.

    Class attributes:
      minimum: the smallest workable budget.
    """

    stage: ClassVar[Stage] = Stage.RECALL

    if TYPE_CHECKING:
        per_query_head: bool
        dense_layers: tuple[int, ...]

    def __post_init__(self):
        check_flag("per_query_head", self.per_query_head)
        check_layers("dense_layers", self.dense_layers)

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """Returns the method itself, or `Full` for a dense layer."""
        return Full() if layer in self.dense_layers else dataclasses.replace(self, dense_layers=())

    def with_lists(self, cache: KVCache, length: int) -> KVCache:
        """Prepares the cache for a selection of `length` slots per KV head, or per query head."""
        lists = cache.shape[1] * (cache.group if self.per_query_head else 1)
        return cache.replace(lists=(lists, length))

    def rows_budget(self, cache: KVCache) -> Int[Array, " B"]:
        """Returns the number of slots that each row attends to."""
        return rows_budget(self.budget, cache.length, cache.max_prompt, self.minimum)


class SharedRecall(Recall):
    """Base class of methods whose selection several decode steps may share.

    A subclass has the field `select_every`, the number of these steps. Selections are made at a
    prompt's end and at each flush, by the last query before it.
    """

    _holds = property(lambda self: self.select_every > 1)
    needs = property(
        lambda self: Needs(query_window=1, decode_queries=True) if self._holds else Needs()
    )

    if TYPE_CHECKING:
        select_every: int

    def __post_init__(self):
        super().__post_init__()
        check_count("select_every", self.select_every, 1)

    def extent(self, extent: Extent) -> Extent:
        """Asks for a flush whenever a new selection is made."""
        return extent.every(self.select_every) if self._holds else extent

    def nothing_held(self, cache: KVCache, room: int, log_mass: Array | None) -> Held | None:
        """Makes an empty selection with places for `room` newer tokens, if steps share one."""
        if not self._holds:
            return None
        lists, length = cache.lists
        size = cache.shape[0], lists, length + room
        rows = jnp.zeros((*size, cache.k.shape[3]), cache.k.dtype)
        return Held(
            jnp.full(size, -1, jnp.int32), rows, rows + 0,  # one buffer must not be donated twice
            jnp.zeros(cache.shape[:2], jnp.int32), log_mass,
        )  # fmt: skip

    def hold(
        self,
        cache: KVCache,
        index: Int[Array, "B K N"],
        first: Int[Array, "B H"],
        room: int,
        log_mass: Float[Array, "B K _"] | None,
        source: Int[Array, "B H S"] | None = None,
    ) -> Held:
        """Reads the rows of a selection, and of the tokens behind it.

        Args:
          index: the selected slots; -1 = none.
          first: slot of the first token behind the selection.
          room: number of places for such tokens.
          log_mass: of what is estimated.
          source: the slot that holds each slot's row now, where slots are about to move.
        """
        newer = first[..., None] + jnp.arange(room, dtype=jnp.int32)[None, None]
        newer = jnp.where(newer < cache.used[..., None], newer, -1)
        index = jnp.concatenate((index, of_lists(newer, cache)), axis=-1)
        slots = jnp.maximum(index, 0)
        if source is not None:
            slots = take_slots(source, slots)
        return Held(index, cache.k.read(slots), cache.v.read(slots), first, log_mass)

    def held_view(self, view: View, held: Held, room: int) -> tuple[View, Held]:
        """Selects what is held, and the new token."""
        held, invisible = held.with_new_token(view.cache, view.slots, room)
        dropped = view.cache.dropped + invisible.sum(-1, dtype=jnp.int32)
        view = dataclasses.replace(view, cache=view.cache.replace(dropped=dropped))
        return dataclasses.replace(view.take(held.index), rows=(held.keys, held.values)), held


def of_lists(x: Array, cache: KVCache) -> Array:
    """Repeats an array of KV heads, `[B, H, ...]`, for each of their lists: `[B, K, ...]`."""
    return jnp.repeat(x, cache.lists[0] // cache.heads, axis=1)
