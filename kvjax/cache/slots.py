"""Defines the cache of one attention layer, an immutable pytree of slots, and what changes it.

A slot holds a weighted token: key, value, position and `log_mass`. The last is the logarithm of the
number of tokens that the slot stands for; attention adds it to the logit. A free slot has
`log_mass = -inf`. Evicting, merging and padding are therefore the same act: writing `log_mass`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.payload import Dense, Payload, write_slots
from kvjax.serialization import pytree_node
from pallas_kernels.base.annotations import NoneElsewhere

FREE = -1  # the position of a free slot, and of a padding token
NEG_INF = float("-inf")
# Column that a cache has only while a prompt is read, and not while its first one is: the slot of
# each token before the prompt, -1 for new tokens.
STORED_SLOT = "stored_slot"


class NotAskedFor(TypeError):
    """The error that a method reads what its `needs` do not ask for; its argument is the name."""


def _static(default: Any = dataclasses.MISSING) -> Any:
    """Makes a dataclass field that is static in a pytree."""
    return field(default=default, metadata={"static": True})


@pytree_node
@dataclass(frozen=True)
class Column:
    """Per-slot data of a transform, which moves with the slots: `values [B, H, S, ...]`.

    Args:
      values: the data.
      fill: value that a new token starts with, 0 by default (static).
      merge: value of a merged slot: the `"sum"` of its members' values, or its own (`"keep"`);
        `"sum"` by default (static).

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> kvjax.kit.Column(jnp.zeros((1, 2, 16)), merge="keep").fill
      0.0
    """

    values: Array
    fill: float = _static(0.0)
    merge: Literal["sum", "keep"] = _static("sum")


@pytree_node
@dataclass(frozen=True)
class KVCache:
    """Keys and values of one attention layer (or of one group of its KV heads).

    Axis letters: B rows, H KV heads, S slots, D head_dim.

    Args:
      k, v: payloads of shape `[B, H, S, D]`.
      position: position of the token in each slot, -1 where it is free.
      log_mass: log of how many tokens each slot stands for, -inf where it is free.
      columns: per-slot data of transforms, by name.
      pinned: slots that must not be evicted.
      used: per row and head, 1 + the highest live slot: no slot from there on is live.
      length: 1 + the newest position of each row.
      dropped: tokens that found no slot, per row and head; 0 unless a row was given more tokens
        than `max_prompt + max_new`, a method kept more than it promised, or `flush` was left out.
      capacity: slots that the cache has between calls (static).
      max_prompt, max_new: prompt and new tokens that the cache was made for, all turns together
        (static).
      heads: number of heads that have slots, on all devices together. It is H, or more where
        `kvjax.attend` runs on one device's part of the heads (static).
      group: query heads for each head that has slots (static).
      unfolded: heads that have slots for each KV head, all of which H counts: 1, or the number of
        query heads of a KV head if every query head keeps its own tokens (static).
      interval: M, the decode steps after which the cache must be flushed (static; None: never).
      unrotated_keys: whether keys are stored without RoPE, as `Needs.unrotated_keys` asks (static).
      lists: number and length of the lists of slots that a selecting method makes for a row
        (static; None: no method selects).
      withheld: names of columns that a method must not read, since it does not ask for them
        (static).

    Example:
      >>> import jax, jax.numpy as jnp, kvjax
      >>> cache = kvjax.init_cache(kvjax.Full(), batch=1, kv_heads=1, head_dim=4, max_prompt=4,
      ...                          max_new=0).kv
      >>> rows = jnp.ones((1, 1, 3, 4))
      >>> cache, _ = jax.jit(kvjax.kit.append)(cache, rows, rows, jnp.array([[0, 1, 2]]))
      >>> cache = jax.jit(kvjax.kit.evict)(cache, cache.position != 1)
      >>> cache.live.tolist(), cache.position.tolist(), cache.k.read().shape
      ([[[True, False, True, False]]], [[[0, -1, 2, -1]]], (1, 1, 4, 4))
    """

    k: Payload
    v: Payload
    position: Int[Array, "B H S"]
    log_mass: Float[Array, "B H S"]
    columns: dict[str, Column]
    pinned: Bool[Array, "B H S"]
    used: Int[Array, "B H"]
    length: Int[Array, " B"]
    dropped: Int[Array, "B H"]
    capacity: int = _static()
    max_prompt: int = _static()
    max_new: int = _static()
    heads: int = _static()
    group: int = _static(1)
    unfolded: int = _static(1)
    interval: int | NoneElsewhere = _static(None)
    unrotated_keys: bool = _static(False)
    lists: tuple[int, int] | NoneElsewhere = _static(None)
    withheld: tuple[str, ...] = _static(())

    @property
    def shape(self) -> tuple[int, int, int]:
        """The sizes B, H, S of the arrays as they are now."""
        return self.position.shape  # pyright: ignore[reportReturnType]  # longer where stacked

    @property
    def slots(self) -> int:
        """Number of slots S as it is now: above `capacity` only while a prompt is being read."""
        return self.position.shape[2]

    @property
    def sizes(self) -> Sizes:
        """The current number of slots, and of places beside them for keys and for values."""
        return Sizes(self.slots, self.k.beside, self.v.beside)

    @property
    def taken(self) -> Int[Array, " 3"]:
        """The least `sizes` that hold everything."""
        taken = self.used.max(), self.k.beside_taken, self.v.beside_taken
        return jnp.stack([jnp.int32(x) for x in taken])

    @property
    def live(self) -> Bool[Array, "B H S"]:
        """The slots that hold a token."""
        return self.log_mass > NEG_INF

    @property
    def max_tokens(self) -> int:
        """Most tokens that a row may ever get."""
        return self.max_prompt + self.max_new

    def unfold(self, rows: Float[Array, "B H T D"]) -> Float[Array, "B H T D"]:
        """Repeats rows of KV heads for each head that has slots (see `unfolded`)."""
        return rows if self.unfolded == 1 else jnp.repeat(rows, self.unfolded, axis=1)

    def column(self, name: str) -> Array:
        """Returns the values of one column, `[B, H, S, ...]`.

        Raises:
          NotAskedFor: the method that reads the column has not asked for it.
        """
        if name in self.withheld:
            raise NotAskedFor(name)
        return self.columns[name].values

    def replace(self, **changes) -> KVCache:
        """Returns a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def with_column(self, name: str, values: Array, **options) -> KVCache:
        """Returns a copy with a column set.

        Args:
          options: `fill` and `merge` of the column, if it is new.
        """
        old = self.columns.get(name)
        new = dataclasses.replace(old, values=values) if old else Column(values, **options)
        return self.replace(columns={**self.columns, name: new})

    def map_slots(self, change: Callable[[Array], Array]) -> KVCache:
        """Returns a copy with every per-slot array changed: columns too, but no keys and values."""
        names = ("position", "log_mass", "pinned", "columns")
        return self.replace(**{name: jax.tree.map(change, getattr(self, name)) for name in names})

    def map_columns(self, values: Callable[[Column], Array]) -> dict[str, Column]:
        """Returns the columns with new values, computed from each column by `values`."""
        return {
            name: dataclasses.replace(column, values=values(column))
            for name, column in self.columns.items()
        }


class Sizes(NamedTuple):
    """Says how many places the arrays of a cache have.

    Args:
      slots: slots S of each row and KV head.
      keys, values: places beside the slots in the payloads of keys and values.
    """

    slots: int
    keys: int
    values: int


def empty_cache(
    batch: int,
    kv_heads: int,
    head_dim: int,
    capacity: int,
    *,
    dtype: DTypeLike,
    **static: Any,
) -> KVCache:
    """Makes a cache of `capacity` free slots per row and KV head, with these `static` fields."""
    shape = (batch, kv_heads, capacity)
    return KVCache(
        k=Dense(jnp.zeros((*shape, head_dim), dtype)),  # pyright: ignore[reportArgumentType]  # it attends with its like
        v=Dense(jnp.zeros((*shape, head_dim), dtype)),  # pyright: ignore[reportArgumentType]  # it attends with its like
        position=jnp.full(shape, FREE, jnp.int32),
        log_mass=jnp.full(shape, NEG_INF, jnp.float32),
        columns={},
        pinned=jnp.zeros(shape, bool),
        used=jnp.zeros(shape[:2], jnp.int32),
        length=jnp.zeros(batch, jnp.int32),
        dropped=jnp.zeros(shape[:2], jnp.int32),
        capacity=capacity,
        heads=kv_heads,
        **static,
    )


def check_cache(cache: object, where: str) -> None:
    """Raises unless `cache` is the `KVCache` of one layer."""
    if not isinstance(cache, KVCache):
        hint = ": give its kv" if hasattr(cache, "kv") else ""
        raise TypeError(f"{where} takes a kvjax.kit.KVCache, got {type(cache).__name__}{hint}")
    check_not_stacked(cache, where)


def check_not_stacked(cache: KVCache, where: str) -> None:
    """Raises ValueError if the arrays have more axes than those of one layer."""
    if jnp.ndim(cache.position) != 3:
        raise ValueError(
            f"{where} takes the cache of one layer, whose positions are [B, H, S], got an array of "
            f"shape {cache.position.shape}. Of caches that are stacked by layer, take one "
            "(jax.tree.map(lambda x: x[layer], caches)), go through them with jax.lax.scan, or map "
            "the function with jax.vmap"
        )


def as_positions(positions: Array | np.ndarray | Sequence) -> Int[Array, "B T"]:
    """Returns token positions as int32.

    Raises:
      TypeError: the positions are not integers.
    """
    positions = jnp.asarray(positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"positions must be integers, got {positions.dtype}")
    return positions.astype(jnp.int32)


def append(
    cache: KVCache,
    k: Float[Array, "B H T D"],
    v: Float[Array, "B H T D"],
    positions: Int[Array, "B T"],
) -> tuple[KVCache, Int[Array, "B H T"]]:
    """Puts new tokens into the lowest free slots, in their order, each with mass 1.

    A payload that encodes rows together takes a limited number of new rows before the next flush;
    tokens beyond it find no slot.

    Args:
      k, v: keys and values of the new tokens.
      positions: their token positions; -1 marks padding, which is not stored.

    Raises:
      TypeError: `cache` is not a `KVCache`, or the positions are not integers.
      ValueError: the cache is stacked by layer.

    Returns:
      The cache, and the slot of every new token, `cache.slots` if it was not stored. A token that
      finds no free slot is counted in `dropped`.

    Example:
      >>> import jax, jax.numpy as jnp, kvjax
      >>> cache = kvjax.init_cache(kvjax.Full(), batch=1, kv_heads=1, head_dim=4, max_prompt=4,
      ...                          max_new=0).kv
      >>> rows = jnp.ones((1, 1, 3, 4))
      >>> cache, slots = jax.jit(kvjax.kit.append)(cache, rows, rows, jnp.array([[0, -1, 1]]))
      >>> slots.tolist(), cache.position.tolist()
      ([[[0, 4, 1]]], [[[0, 1, -1, -1]]])
    """
    check_cache(cache, "append")
    positions = as_positions(positions)
    slots = _free_slots(cache, positions)
    room = cache.k.room
    if room is not None:
        # Padding is not counted: it takes no room.
        number = jnp.cumsum(positions >= 0, axis=1, dtype=jnp.int32)
        slots = jnp.where((number <= room[:, None])[:, None], slots, cache.slots)
    stored = slots < cache.slots
    lost = (positions >= 0)[:, None] & ~stored

    def start(x: Array, value: Array | float) -> Array:
        """Writes the value that new tokens start with to their slots."""
        return write_slots(x, slots, jnp.full((*slots.shape, *x.shape[3:]), value, x.dtype))

    cache = cache.replace(
        k=cache.k.write(slots, k),
        v=cache.v.write(slots, v),
        position=start(cache.position, positions[:, None]),
        log_mass=start(cache.log_mass, 0.0),
        columns=cache.map_columns(lambda column: start(column.values, column.fill)),
        pinned=start(cache.pinned, False),
        used=jnp.maximum(cache.used, jnp.where(stored, slots + 1, 0).max(-1)),
        length=jnp.maximum(cache.length, positions.max(-1) + 1),
        dropped=cache.dropped + lost.sum(-1, dtype=jnp.int32),
    )
    return cache, slots


def _free_slots(cache: KVCache, positions: Int[Array, "B T"]) -> Int[Array, "B H T"]:
    """Returns the slot of each new token: the j-th free slot for the j-th token.

    Padding does not count. The slot is S for padding, and for tokens without a free slot.
    """
    free, valid, size = ~cache.live, positions >= 0, cache.slots
    if positions.shape[1] == 1:
        # A decode step: one pass over scalars instead of a prefix sum.
        return jnp.where(valid[:, None, :], _first(free)[..., None], size)
    # XLA computes prefix sums of constants when it compiles, for seconds. A new cache is constant.
    count = jnp.cumsum(jax.lax.optimization_barrier(free), axis=-1, dtype=jnp.int32)
    wanted = jnp.cumsum(valid, axis=-1, dtype=jnp.int32)
    find = jax.vmap(jax.vmap(jnp.searchsorted, in_axes=(0, None)), in_axes=(0, 0))
    slots = find(count, wanted).astype(jnp.int32)  # S where count never reaches `wanted`
    return jnp.where(valid[:, None, :], slots, size)


def evict(cache: KVCache, keep: Bool[Array, "B H S"]) -> KVCache:
    """Frees every slot that is neither kept nor pinned.

    Slots are only marked as free: keys, values and columns stay where they are. Nothing reads them
    there, so that they may be NaN or infinite.

    Args:
      keep: which slots stay, `[B, H, S]`.

    Example:
      >>> import jax, jax.numpy as jnp, kvjax
      >>> cache = kvjax.init_cache(kvjax.Full(), batch=1, kv_heads=1, head_dim=4, max_prompt=3,
      ...                          max_new=0).kv
      >>> rows = jnp.ones((1, 1, 3, 4))
      >>> cache, slots = jax.jit(kvjax.kit.append)(cache, rows, rows, jnp.arange(3)[None])
      >>> jax.jit(kvjax.kit.evict)(cache, keep=cache.position != 1).position.tolist()
      [[[0, -1, 2]]]
    """
    check_cache(cache, "evict")
    return free_others(cache, cache.live & (keep | cache.pinned))


def free_others(cache: KVCache, live: Bool[Array, "B H S"]) -> KVCache:
    """Frees all slots except these."""
    return cache.replace(
        log_mass=jnp.where(live, cache.log_mass, NEG_INF),
        position=jnp.where(live, cache.position, FREE),
        pinned=cache.pinned & live,
        used=cache.slots - _first(live[..., ::-1]),
    )


def _first(slots: Bool[Array, "B H S"]) -> Int[Array, "B H"]:
    """Returns the lowest of these slots, S if there is none."""
    # `argmax` of a mask is one kernel; a minimum of slot numbers would take four.
    padded = jnp.pad(slots, ((0, 0), (0, 0), (0, 1)), constant_values=True)
    return jax.lax.argmax(padded, 2, jnp.int32)


def slot_numbers(shape: tuple[int, ...]) -> Int[Array, "B H S"]:
    """Returns the number of every slot, `0 ... S - 1` in each row and head."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, 2)


def sorted_slots(live: Bool[Array, "B H N"], position: Int[Array, "B H N"]) -> Int[Array, "B H N"]:
    """Returns slot numbers in the order of positions, free slots last."""
    key = jnp.where(live, position, jnp.iinfo(jnp.int32).max)
    return jax.lax.sort((key, slot_numbers(live.shape)), dimension=2, num_keys=1)[-1]


def ranks(live: Bool[Array, "B H N"], position: Int[Array, "B H N"]) -> Int[Array, "B H N"]:
    """Returns how many live slots have a lower position; for a free slot, how many are live.

    Only positions are sorted, and then a binary search finds each of them: on a CPU, a sort that
    carries slot numbers along takes several times as long. The steps of the search are unrolled,
    because a decode step holds no loop.
    """
    key = jnp.where(live, position, jnp.iinfo(jnp.int32).max)
    ascending, slots = jnp.sort(key, axis=-1), key.shape[-1]
    rank = jnp.zeros_like(key)
    for bit in reversed(range(slots.bit_length())):
        # The rank is at least `raised` if that many positions are lower.
        raised = rank + 2**bit
        place = jnp.minimum(raised, slots) - 1
        last = jnp.take_along_axis(ascending, place, axis=-1, mode="promise_in_bounds")
        rank = jnp.where((raised <= slots) & (last < key), raised, rank)
    return rank
