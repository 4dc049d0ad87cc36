"""How much of caches holds tokens, and how much is room for more."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax

from kvjax.attention.layer import Cache, LayerCache, Packed
from kvjax.attention.resting import is_rectangle, positions_at_rest
from kvjax.cache.nbytes import nbytes
from kvjax.cache.payload import free_bytes
from kvjax.cache.slots import FREE
from kvjax.protocol import Extent


class Occupancy(NamedTuple):
    """Slots and bytes of caches that hold something, and those that are room for later tokens.

    Room are free slots, with all that is stored for each slot, and free places of rows that wait
    to be encoded. Everything else is kept: a method's state, too.

    Args:
      lists: number of (row, head) pairs with slots of their own, of all layers together.
      live: slots that hold a token, of all lists.
      free: the other slots.
      kept_bytes: bytes of all arrays but the room.
      room_bytes: bytes of the room.
    """

    lists: int
    live: int
    free: int
    kept_bytes: int
    room_bytes: int

    @property
    def kept_slots(self) -> float:
        """Slots of a row and head that hold a token, in the mean."""
        return self.live / self.lists

    @property
    def room_slots(self) -> float:
        """Free slots of a row and head, in the mean."""
        return self.free / self.lists

    @property
    def record(self) -> dict[str, float | int]:
        """The figures by name, as commands print them with `--json`."""
        names = ("kept_slots", "room_slots", "kept_bytes", "room_bytes")
        return {name: getattr(self, name) for name in names}

    def plus(self, other: Occupancy) -> Occupancy:
        """Returns the occupancy of both."""
        return Occupancy(*(a + b for a, b in zip(self, other, strict=True)))


def occupancy(caches: Cache | tuple[Cache, ...]) -> Occupancy:
    """Returns what caches hold and what room they have; the bytes add up to `kvjax.nbytes`.

    Args:
      caches: of one layer or several, between calls, awake or at rest. Where they are shapes
        (`jax.eval_shape`), each holds what it can keep of a prompt of `max_prompt` tokens, and
        nothing waits to be encoded.

    Example:
      >>> import kvjax
      >>> from kvjax.attention.occupancy import occupancy
      >>> cache = kvjax.init_cache(kvjax.Full(), batch=1, kv_heads=2, head_dim=4, max_prompt=6,
      ...                          max_new=2, dtype="float32")
      >>> occupancy(cache).room_slots, occupancy(cache).room_bytes, kvjax.nbytes(cache)
      (8.0, 656, 676)
    """
    total = Occupancy(0, 0, 0, 0, 0)
    for part in jax.tree.leaves(caches, is_leaf=is_rectangle):
        total = total.plus(_of_part(part))
    return total


def _of_part(part: LayerCache | Packed) -> Occupancy:
    """Returns the occupancy of one rectangle of slots, awake or at rest."""
    kv = part.cache.kv if isinstance(part, Packed) else part.kv
    lists, slots = kv.used.size, math.prod(kv.shape)
    if isinstance(part, Packed):
        live = int((positions_at_rest(kv) != FREE).sum())
    elif isinstance(kv.log_mass, jax.ShapeDtypeStruct):
        kept = part.transform.extent(Extent(kv.max_prompt, kv.max_new)).kept
        live = lists * kept
    else:
        live = int(kv.live.sum())
    by_slot = kv.position, kv.log_mass, kv.pinned, kv.columns
    room = kv.k.free_bytes(live) + kv.v.free_bytes(live) + free_bytes(by_slot, live, slots)
    return Occupancy(lists, live, slots - live, nbytes(part) - room, room)
