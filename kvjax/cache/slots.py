"""The cache of one attention layer: an immutable pytree of weighted tokens, and what changes it.

A slot is a weighted token: key, value, position and `log_mass`, the log of how many tokens it
stands for, which attention adds to the logit. A free slot has `log_mass = -inf`. Evicting, merging
and padding are therefore the same act: writing `log_mass`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.payload import Dense, Payload, sum_into, take_slots, write_slots
from pallas_kernels import segment_merge

FREE = -1  # the position of a free slot, and of a padding token
NEG_INF = float("-inf")


def _static(default=dataclasses.MISSING):
    return field(default=default, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Column:
    """Per-slot data of a transform, which moves with the slots: `values [B, H, S, ...]`.

    Args:
      values: the data.
      fill: what a new token starts with.
      merge: what a merged slot gets: the `"sum"` of its members, or (`"keep"`) its own.
    """

    values: Array
    fill: float = _static(0.0)
    merge: Literal["sum", "keep"] = _static("sum")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tail:
    """Where new tokens go while decoding, in caches that a transform keeps an index of.

    They go to the same slot in all rows and heads: a step writes one column of slots, and what is
    done with the tail from time to time is done at one place, which matters in host memory. The
    prompts of all rows therefore end at one slot (`compact`), and a step that adds no token to a
    row leaves a free slot there.

    Args:
      start: its first slot.
      count: its slots so far.
      settled: how many tails were settled since the last prompt.
      size: when it has so many, it is settled: its slots are sorted, go where the payloads keep
        what is not new, and an empty tail begins behind them. None: never (static).
      lists: how many lists of slots a reader of this cache makes, and how long they are (static).
    """

    start: Int[Array, ""]
    count: Int[Array, ""]
    settled: Int[Array, ""]
    size: int | None = _static(None)
    lists: tuple[int, int] = _static((0, 0))

    @property
    def newest(self) -> Int[Array, ""]:
        """The slot of the step that is being made."""
        return self.start + self.count - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of one attention layer (or of one group of its KV heads).

    Axis letters: B rows, H KV heads, S slots, D head_dim.

    Args:
      k, v: payloads of shape `[B, H, S, D]`.
      position: token position each slot came from, -1 = free.
      log_mass: log of how many tokens a slot stands for, -inf = free.
      columns: per-slot data of transforms, by name.
      pinned: slots that no evictor takes.
      used: 1 + highest live slot, per row and head: no slot from there on is live.
      length: 1 + newest position of each row.
      dropped: tokens that found no slot, per row and head; 0 unless a row was given more tokens
        than `max_prompt + max_new`.
      capacity: slots that the cache has between calls (static).
      max_prompt, max_new: prompt and new tokens that the cache was made for, all turns together.
      group: query heads per list of slots.
      unfolded: lists of slots per KV head, which are then what H counts: 1, or where every query
        head keeps tokens of its own all query heads of a KV head.
      tail: where new tokens go while decoding; None: to the lowest free slot of each row and head.
      order: what slots are to be sorted by, before their positions, when they are next moved: all
        of them by `compact`, or the tail's by `settle`. None between calls.
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
    group: int = _static(1)
    unfolded: int = _static(1)
    tail: Tail | None = None
    order: Int[Array, "B H N"] | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """B, H, S of the arrays as they are now."""
        return self.position.shape

    @property
    def slots(self) -> int:
        """S as it is now: more than `capacity` only while a prompt is being read."""
        return self.position.shape[2]

    @property
    def live(self) -> Bool[Array, "B H S"]:
        """Slots that hold a token."""
        return self.log_mass > NEG_INF

    @property
    def max_tokens(self) -> int:
        """Most tokens that a row may ever get."""
        return self.max_prompt + self.max_new

    @property
    def settles(self) -> bool:
        """Whether new tokens can ever fill the tail."""
        return (
            self.tail is not None and self.tail.size is not None and self.tail.size <= self.max_new
        )

    @property
    def tail_slots(self) -> int:
        """Most slots of the tail."""
        return self.tail.size if self.settles else max(self.max_new, 1)

    def column(self, name: str) -> Array:
        """Values of one column, `[B, H, S, ...]`."""
        return self.columns[name].values

    def replace(self, **changes) -> KVCache:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def with_column(self, name: str, values: Array, **kind) -> KVCache:
        """A copy with a column set; `kind` is `fill` and `merge` where the column is new."""
        old = self.columns.get(name)
        new = dataclasses.replace(old, values=values) if old else Column(values, **kind)
        return self.replace(columns={**self.columns, name: new})


def empty_cache(
    batch: int,
    kv_heads: int,
    head_dim: int,
    capacity: int,
    *,
    max_prompt: int,
    max_new: int,
    dtype: DTypeLike,
    group: int = 1,
    unfolded: int = 1,
) -> KVCache:
    """A cache of `capacity` free slots per row and KV head."""
    shape = (batch, kv_heads, capacity)
    return KVCache(
        k=Dense.zeros((*shape, head_dim), dtype),
        v=Dense.zeros((*shape, head_dim), dtype),
        position=jnp.full(shape, FREE, jnp.int32),
        log_mass=jnp.full(shape, NEG_INF, jnp.float32),
        columns={},
        pinned=jnp.zeros(shape, bool),
        used=jnp.zeros(shape[:2], jnp.int32),
        length=jnp.zeros(batch, jnp.int32),
        dropped=jnp.zeros(shape[:2], jnp.int32),
        capacity=capacity,
        max_prompt=max_prompt,
        max_new=max_new,
        group=group,
        unfolded=unfolded,
    )


def append(
    cache: KVCache,
    k: Float[Array, "B H T D"],
    v: Float[Array, "B H T D"],
    positions: Int[Array, "B T"],
) -> tuple[KVCache, Int[Array, "B H T"]]:
    """Puts new tokens into the lowest free slots, in their order, each with mass 1.

    Args:
      k, v: keys and values of the new tokens.
      positions: their token positions; -1 marks padding, which is not stored.

    Returns:
      The cache, and the slot of every new token, `cache.slots` where it was not stored. A token
      that finds no free slot is counted in `dropped`.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> cache = kvjax.init_cache(kvjax.Full(), batch=1, kv_heads=1, head_dim=4, max_prompt=4,
      ...                          max_new=0).kv
      >>> rows = jnp.ones((1, 1, 3, 4))
      >>> cache, slots = kvjax.append(cache, rows, rows, jnp.array([[0, -1, 1]]))
      >>> slots.tolist(), cache.position.tolist()
      ([[[0, 4, 1]]], [[[0, 1, -1, -1]]])
    """
    positions = positions.astype(jnp.int32)
    return _put(cache, _free_slots(cache, positions), k, v, positions)


def append_to_tail(
    cache: KVCache,
    k: Float[Array, "B H 1 D"],
    v: Float[Array, "B H 1 D"],
    positions: Int[Array, "B 1"],
) -> tuple[KVCache, Int[Array, "B H 1"]]:
    """As `append`, one token to the end of the tail.

    After `max_new` steps since the last prompt no token finds a slot, whatever rows they were for.
    """
    positions, tail = positions.astype(jnp.int32), cache.tail
    made = tail.count + tail.settled * (tail.size or 0)
    fits = (made < cache.max_new) & (tail.count < cache.tail_slots)
    slot = jnp.where(fits, jnp.minimum(tail.start + tail.count, cache.slots), cache.slots)
    slots = jnp.where(positions >= 0, slot, cache.slots)[:, None, :]
    slots = jnp.broadcast_to(slots, (*cache.shape[:2], 1))
    cache = cache.replace(tail=dataclasses.replace(tail, count=tail.count + fits.astype(jnp.int32)))
    return _put(cache, slots, k, v, positions)


def _put(cache: KVCache, slots: Int[Array, "B H T"], k, v, positions: Int[Array, "B T"]):
    """Writes new tokens into their slots, and counts those that found none."""
    valid = jnp.broadcast_to((positions >= 0)[:, None, :], slots.shape)
    stored = slots < cache.slots
    rows = slots.shape
    token = jnp.broadcast_to(positions[:, None, :], rows)

    def start(column: Column) -> Column:
        new = jnp.full((*rows, *column.values.shape[3:]), column.fill, column.values.dtype)
        return dataclasses.replace(column, values=write_slots(column.values, slots, new))

    cache = cache.replace(
        k=cache.k.write(slots, k),
        v=cache.v.write(slots, v),
        position=write_slots(cache.position, slots, token),
        log_mass=write_slots(cache.log_mass, slots, jnp.zeros(rows, jnp.float32)),
        columns={name: start(column) for name, column in cache.columns.items()},
        pinned=write_slots(cache.pinned, slots, jnp.zeros(rows, bool)),
        used=jnp.maximum(cache.used, jnp.where(stored, slots + 1, 0).max(-1)),
        length=jnp.maximum(cache.length, positions.max(-1) + 1),
        dropped=cache.dropped + (valid & ~stored).sum(-1, dtype=jnp.int32),
    )
    return cache, slots


def _free_slots(cache: KVCache, positions: Int[Array, "B T"]) -> Int[Array, "B H T"]:
    """The slot of each new token: its j-th valid token takes the j-th free slot, S if none."""
    free, valid, size = ~cache.live, positions >= 0, cache.slots
    if positions.shape[1] == 1:
        # The step of a decode loop: one pass over scalars instead of a prefix sum.
        lowest = jnp.where(free, _slot_numbers(free.shape), size).min(-1, keepdims=True)
        return jnp.where(valid[:, None, :], lowest, size)
    count = jnp.cumsum(free, axis=-1, dtype=jnp.int32)
    wanted = jnp.cumsum(valid, axis=-1, dtype=jnp.int32)
    find = jax.vmap(jax.vmap(jnp.searchsorted, in_axes=(0, None)), in_axes=(0, 0))
    slots = find(count, wanted).astype(jnp.int32)  # S where count never reaches `wanted`
    return jnp.where(valid[:, None, :], slots, size)


def evict(cache: KVCache, keep: Bool[Array, "B H S"]) -> KVCache:
    """Frees every slot that is neither kept nor pinned.

    It only marks: keys, values and columns stay where they are, so that a wrapper that holds the
    cache from before can compare and undo.

    Args:
      keep: which slots stay, `[B, H, S]`.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> cache = kvjax.init_cache(kvjax.Full(), batch=1, kv_heads=1, head_dim=4, max_prompt=3,
      ...                          max_new=0).kv
      >>> rows = jnp.ones((1, 1, 3, 4))
      >>> cache, slots = kvjax.append(cache, rows, rows, jnp.arange(3)[None])
      >>> kvjax.evict(cache, keep=cache.position != 1).position.tolist()
      [[[0, -1, 2]]]
    """
    live = cache.live & (keep | cache.pinned)
    return cache.replace(
        log_mass=jnp.where(live, cache.log_mass, NEG_INF),
        position=jnp.where(live, cache.position, FREE),
        pinned=cache.pinned & live,
        used=_used(live),
    )


def _used(live: Bool[Array, "B H S"]) -> Int[Array, "B H"]:
    return jnp.where(live, _slot_numbers(live.shape) + 1, 0).max(-1)


def _slot_numbers(shape: tuple[int, int, int]) -> Int[Array, "B H S"]:
    return jax.lax.broadcasted_iota(jnp.int32, shape, 2)


def merge(
    cache: KVCache,
    into: Int[Array, "B H S"],
    weights: Float[Array, "B H S"] | None = None,
) -> KVCache:
    """Merges slots: every live slot s goes into slot `into[s]`, itself if it stays.

    Keys and values become weighted means over the members, `k = Σ w_i k_i / Σ w_i`, masses add,
    the merged slot keeps its target's position; columns follow their own rule. A slot that is its
    own only member is left exactly as it is. Free slots are ignored.

    Args:
      into: target slot per slot. A target must be live and its own target.
      weights: non-negative, one per slot; the masses by default, so that merging is associative. A
        target whose members all weigh nothing keeps its own key and value.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> cache = kvjax.init_cache(kvjax.Full(), batch=1, kv_heads=1, head_dim=1, max_prompt=3,
      ...                          max_new=0).kv
      >>> rows = jnp.array([[[[1.0], [3.0], [8.0]]]])
      >>> cache, _ = kvjax.append(cache, rows, rows, jnp.arange(3)[None])
      >>> merged = kvjax.merge(cache, into=jnp.array([[[1, 1, 2]]]))
      >>> merged.position.tolist(), merged.k.read()[0, 0, 1:, 0].tolist()
      ([[[-1, 1, 2]]], [2.0, 8.0])
    """
    size, live = cache.slots, cache.live
    slot = _slot_numbers(cache.shape)
    into = jnp.where(live, into, size).astype(jnp.int32)  # size = ignored
    mass = jnp.where(live, jnp.exp(cache.log_mass), 0.0)
    weights = mass if weights is None else jnp.where(live, weights, 0.0).astype(jnp.float32)
    members = sum_into(into, live.astype(jnp.int32))
    merged, stays = members > 1, live & (into == slot)

    def mean(payload: Payload) -> Payload:
        return payload.fill(segment_merge(payload.read(), into, weights))

    def combine(column: Column) -> Column:
        if column.merge == "keep":
            return column
        values = column.values
        keep = live.reshape(live.shape + (1,) * (values.ndim - 3))
        summed = sum_into(into, jnp.where(keep, values, 0))
        changed = merged.reshape(keep.shape)
        return dataclasses.replace(column, values=jnp.where(changed, summed, values))

    log_mass = jnp.where(merged, jnp.log(sum_into(into, mass)), cache.log_mass)
    pinned_members = sum_into(into, (cache.pinned & live).astype(jnp.int32))
    return cache.replace(
        k=mean(cache.k),
        v=mean(cache.v),
        log_mass=jnp.where(stays, log_mass, NEG_INF),
        position=jnp.where(stays, cache.position, FREE),
        columns={name: combine(column) for name, column in cache.columns.items()},
        pinned=stays & (pinned_members > 0),
        used=_used(stays),
    )


def compact(cache: KVCache, slots: int) -> KVCache:
    """Moves the live slots together, in position order, and cuts or widens to `slots`.

    They go to the front; in a cache with a tail, the rows end together, where the tail then begins.
    `cache.order`, where it is set, is sorted by before positions. Besides `settle` the only
    function that moves slots; every payload and column moves with them. If more slots are live than
    fit, the last are lost and counted in `dropped`: a transform whose `extent` is right never lets
    that happen.

    Args:
      slots: how many the cache has afterwards.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> cache = kvjax.init_cache(kvjax.Full(), batch=1, kv_heads=1, head_dim=4, max_prompt=3,
      ...                          max_new=0).kv
      >>> rows = jnp.ones((1, 1, 3, 4))
      >>> cache, _ = kvjax.append(cache, rows, rows, jnp.arange(3)[None])
      >>> kvjax.compact(kvjax.evict(cache, keep=cache.position != 1), 2).position.tolist()
      [[[0, 2]]]
    """
    index = sorted_slots(cache.live, cache.position, cache.order)
    count = jnp.minimum(cache.live.sum(-1, keepdims=True, dtype=jnp.int32), slots)
    place = jax.lax.broadcasted_iota(jnp.int32, (*cache.shape[:2], slots), 2)
    if cache.tail is not None:
        end = count.max()
        place = place - (end - count)
        zero = jnp.zeros_like(end)
        begun = dataclasses.replace(cache.tail, start=end, count=zero, settled=zero)
        cache = cache.replace(tail=begun)
    # A free slot in front repeats the first token: see `ResidualQuantized`.
    source = take_slots(index, jnp.clip(place, 0, cache.slots - 1))
    return _move(cache.replace(order=None), source, (place >= 0) & (place < count))


def sorted_slots(
    live: Bool[Array, "B H N"],
    position: Int[Array, "B H N"],
    order: Int[Array, "B H N"] | None = None,
) -> Int[Array, "B H N"]:
    """Slot numbers by `order`, then by position, free slots last."""
    last = jnp.iinfo(jnp.int32).max
    keys = (position,) if order is None else (order, position)
    keys = tuple(jnp.where(live, key, last) for key in keys)
    number = _slot_numbers(live.shape)
    return jax.lax.sort((*keys, number), dimension=2, num_keys=len(keys))[-1]


def widen(cache: KVCache, slots: int) -> KVCache:
    """Adds free slots at the end, up to `slots`; slots that are there stay where they are."""
    if slots <= cache.slots:
        return cache
    place = jax.lax.broadcasted_iota(jnp.int32, (*cache.shape[:2], slots), 2)
    # A new slot copies some finite row: what a free slot holds is never read.
    return _move(cache, jnp.where(place < cache.slots, place, 0), place < cache.slots)


def _move(cache: KVCache, index: Int[Array, "B H N"], there: Bool[Array, "B H N"]) -> KVCache:
    """A cache whose slot n is this one's slot `index[..., n]`, free where not `there`."""
    live = take_slots(cache.live, index) & there
    lost = cache.live.sum(-1, dtype=jnp.int32) - live.sum(-1, dtype=jnp.int32)
    return cache.replace(
        k=cache.k.take(index),
        v=cache.v.take(index),
        position=jnp.where(live, take_slots(cache.position, index), FREE),
        log_mass=jnp.where(live, take_slots(cache.log_mass, index), NEG_INF),
        columns={
            name: dataclasses.replace(column, values=take_slots(column.values, index))
            for name, column in cache.columns.items()
        },
        pinned=take_slots(cache.pinned, index) & live,
        used=_used(live),
        dropped=cache.dropped + lost,
    )


def settle(cache: KVCache, after: Bool[Array, ""]) -> KVCache:
    """Where the tail is full, sorts its slots (by `cache.order`, then by position) and ends it.

    Payloads then move the tail's rows to where they keep what is not new, and an empty tail begins
    behind them.

    Args:
      after: any scalar that is computed from the keys and values that were read before: XLA then
        knows that they may be overwritten in place (see `kvjax.attend`). Where it is False nothing
        is done.
    """
    if not cache.settles:
        return cache.replace(order=None)
    tail, order = cache.tail, cache.order
    size = tail.size

    def move(carry):
        _, cache = carry
        start = cache.tail.start

        def span(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, start, size, 2)

        live = span(cache.live)
        index = sorted_slots(live, span(cache.position), order)

        def sort(x: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(x, take_slots(span(x), index), start, 2)

        log_mass = sort(cache.log_mass)
        # Free slots get the rows of the first: in a payload that encodes slots together, whatever
        # stands in them changes nothing.
        rows = jnp.where(take_slots(live, index), index, index[..., :1])
        moved = cache.replace(
            k=cache.k.settle(start, rows),
            v=cache.v.settle(start, rows),
            position=sort(cache.position),
            log_mass=log_mass,
            columns={
                name: dataclasses.replace(column, values=sort(column.values))
                for name, column in cache.columns.items()
            },
            pinned=sort(cache.pinned),
            used=_used(log_mass > NEG_INF),
            tail=dataclasses.replace(
                tail, start=start + size, count=jnp.zeros_like(start), settled=tail.settled + 1
            ),
        )
        return jnp.zeros((), bool), moved

    # A loop of no round, where nothing is due, leaves keys and values where they are; the result
    # of a conditional would be a copy of them.
    fits = tail.start + size <= cache.slots
    due = (tail.count == size) & fits & after
    _, cache = jax.lax.while_loop(lambda c: c[0], move, (due, cache.replace(order=None)))
    return cache


def nbytes(tree) -> int:
    """Bytes of all arrays in a pytree: a cache's keys, values, positions, masses, columns, state.

    Works on arrays and on shapes (`jax.eval_shape`), so that a cache can be priced before it is
    made.

    Example:
      >>> import jax, kvjax
      >>> size = {"batch": 1, "kv_heads": 8, "head_dim": 128, "max_prompt": 32_768, "max_new": 256}
      >>> full, snapkv = (
      ...     kvjax.nbytes(jax.eval_shape(lambda: kvjax.init_cache(tx, **size, dtype="bfloat16")))
      ...     for tx in (kvjax.Full(), kvjax.SnapKV(budget=1024))
      ... )
      >>> round(full / snapkv, 1)
      25.8
    """
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def memory_bytes(tree) -> dict[str, int]:
    """Bytes of all arrays in a pytree by the kind of memory that they are in.

    Args:
      tree: of arrays, as they come out of a call.

    Example:
      >>> import kvjax
      >>> size = {"batch": 1, "kv_heads": 2, "head_dim": 16, "max_prompt": 64, "max_new": 8}
      >>> kvjax.memory_bytes(kvjax.init_cache(kvjax.Full(), **size))
      {'device': 19748}
    """
    held: dict[str, int] = {}
    for leaf in jax.tree.leaves(tree):
        kind = leaf.sharding.memory_kind
        held[kind] = held.get(kind, 0) + leaf.size * leaf.dtype.itemsize
    return held
