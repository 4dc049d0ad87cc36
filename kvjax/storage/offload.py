"""Keys and values in host memory, with a device cache of what the last steps selected."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kvjax.budgets.budgets import check_count
from kvjax.cache.payload import Dense, OpenRows, take_slots, write_slots
from kvjax.cache.slots import KVCache, Tail
from kvjax.protocol import KVTransform, Stage, State, Step, View
from pallas_kernels import host_rows

HOST_MEMORY = "pinned_host"
INTERVAL = 320  # ClusterKV's; of readers that have none of their own


def memory_kinds() -> tuple[str, ...]:
    """Memories that the default device can address."""
    return tuple(memory.kind for memory in jax.devices()[0].addressable_memories())


def check_host_memory() -> None:
    """Raises ValueError where the device has no host memory of the kind that is needed."""
    if HOST_MEMORY not in memory_kinds():
        raise ValueError(
            f"Offload keeps keys and values in {HOST_MEMORY} memory, which the platform "
            f"{jax.default_backend()!r} does not have: it has {', '.join(memory_kinds())}"
        )


def to_host(x: Array) -> Array:
    """The array in host memory."""
    return jax.device_put(x, jax.memory.Space.Host)


def to_device(x: Array) -> Array:
    """The array in device memory."""
    return jax.device_put(x, jax.memory.Space.Device)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Offloaded:
    """Rows in host memory, and on the device those of the tail, which is where new ones go.

    Args:
      store: all slots but the tail's, in host memory.
      tail: slots `start` to `start + M`.
      start: first slot of the tail.
    """

    store: Float[Array, "B H S D"]
    tail: Float[Array, "B H M D"]
    start: Int[Array, ""]

    @classmethod
    def zeros(cls, shape: tuple[int, int, int, int], tail: int, dtype: DTypeLike) -> Offloaded:
        """A payload of zeros with a tail of `tail` slots."""
        batch, kv_heads, _, head_dim = shape
        rows = jnp.zeros((batch, kv_heads, tail, head_dim), dtype)
        return cls(to_host(jnp.zeros(shape, dtype)), rows, jnp.zeros((), jnp.int32))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, H, S, D."""
        return self.store.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the rows."""
        return self.store.dtype

    def in_tail(self, index: Int[Array, "B K N"]) -> Bool[Array, "B K N"]:
        """Which slots are the tail's."""
        return (index >= self.start) & (index < self.start + self.tail.shape[2])

    def read_tail(self, index: Int[Array, "B K N"]) -> Float[Array, "B K N D"]:
        """Rows of slots of the tail."""
        return take_slots(self.tail, jnp.clip(index - self.start, 0, self.tail.shape[2] - 1))

    def read(self, index: Int[Array, "B K N"] | None = None) -> Float[Array, "B K N D"]:
        """Dense rows on the device: of all slots, which copies the store, or those of `index`."""
        if index is None:
            return self.open().read()
        fresh = self.in_tail(index)
        rows = jnp.where(fresh[..., None], self.read_tail(index), jnp.zeros((), self.dtype))
        return host_rows((self.store,), (rows,), index, ~fresh)[0]

    def take(self, index: Int[Array, "B H N"]) -> Offloaded:
        """The payload whose slot n is this one's slot `index[..., n]`; copies the store."""
        return self.open().take(index).close(self.start)

    def write(self, slots: Int[Array, "B H T"], rows: Float[Array, "B H T D"]) -> Offloaded:
        """Replaces a few slots of the tail; slots outside it are not written."""
        place = jnp.where(self.in_tail(slots), slots - self.start, self.tail.shape[2])
        return dataclasses.replace(self, tail=write_slots(self.tail, place, rows))

    def fill(self, rows: Float[Array, "B H S D"]) -> Offloaded:
        """Replaces all slots; copies the store."""
        return self.open().fill(rows).close(self.start)

    def open(self) -> Opened:
        """All rows on the device, for the time that a prompt is read."""
        size = self.tail.shape[2]
        slots = self.start + jnp.arange(size, dtype=jnp.int32)
        slots = jnp.broadcast_to(slots, (*self.shape[:2], size))
        return Opened(Dense(write_slots(to_device(self.store), slots, self.tail)), size)

    def close(self, tail: Int[Array, ""]) -> Offloaded:
        """Itself: it is not open."""
        return self

    def span(self, start: Int[Array, ""], size: int) -> Float[Array, "B H N D"]:
        """Rows of `size` slots of the tail from slot `start` on."""
        return jax.lax.dynamic_slice_in_dim(self.tail, start - self.start, size, 2)

    def settle(self, start: Int[Array, ""], index: Int[Array, "B H N"]) -> Offloaded:
        """Moves the tail, sorted by `index`, to its place in host memory."""
        rows = take_slots(self.tail, index)
        zero = jnp.zeros((), start.dtype)
        store = jax.lax.dynamic_update_slice(self.store, to_host(rows), (zero, zero, start, zero))
        return dataclasses.replace(self, store=store, start=start + index.shape[2])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Opened(OpenRows):
    """An offloaded payload while a prompt is read: all rows on the device.

    Args:
      rows: of all slots.
      tail: slots that its tail has when it is closed (static).
    """

    tail: int = field(metadata={"static": True})

    def close(self, tail: Int[Array, ""]) -> Offloaded:
        """All rows in host memory; the tail's, from slot `tail` on, on the device too."""
        slots = tail + jnp.arange(self.tail, dtype=jnp.int32)
        slots = jnp.broadcast_to(
            jnp.minimum(slots, self.shape[2] - 1), (*self.shape[:2], self.tail)
        )
        data = self.rows.read()
        return Offloaded(to_host(data), take_slots(data, slots), tail + 0)


def opened(caches: Any) -> Any:
    """Empty caches that are about to read a prompt: an empty store need not come to the device."""

    def open_empty(x: Any) -> Any:
        if not isinstance(x, Offloaded):
            return x
        return Opened(Dense.zeros(x.shape, x.dtype), x.tail.shape[2])

    return jax.tree.map(open_empty, caches, is_leaf=lambda x: isinstance(x, Offloaded))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Resident:
    """What the last R steps selected, on the device; entry by entry, as the lists had it.

    Args:
      slots: of each entry, -1 = none.
      k, v: their rows.
      selected: entries of all steps so far that lay in host memory, but for those that every list
        has and those of rows without a new token; per row.
      found: how many of them were resident.
      fetched: entries whose rows have crossed.
      steps: decode steps so far.
    """

    slots: Int[Array, "B K R N"]
    k: Float[Array, "B K R N D"]
    v: Float[Array, "B K R N D"]
    selected: Int[Array, " B"]
    found: Int[Array, " B"]
    fetched: Int[Array, " B"]
    steps: Int[Array, ""]

    def places(self, index: Int[Array, "B K N"], slots: int) -> Int[Array, "B K N"]:
        """Where the rows of these slots are among the R × N entries; -1 = nowhere."""
        held = self.slots.reshape(*self.slots.shape[:2], -1)
        number = jnp.arange(held.shape[2], dtype=jnp.int32)
        put = jax.vmap(
            jax.vmap(lambda held: jnp.full(slots, -1, jnp.int32).at[held].set(number, mode="drop"))
        )
        table = put(jnp.where(held >= 0, held, slots))
        return jnp.where(index >= 0, take_slots(table, jnp.maximum(index, 0)), -1)

    def rows(self, place: Int[Array, "B K N"]) -> tuple[Array, Array]:
        """Keys and values of the entries at `place`."""
        flat = (x.reshape(*x.shape[:2], -1, x.shape[-1]) for x in (self.k, self.v))
        return tuple(take_slots(x, jnp.maximum(place, 0)) for x in flat)

    def put(self, slots: Int[Array, "B K N"], k: Array, v: Array) -> Resident:
        """With a step's entries in place of the oldest step's."""
        at = self.steps % self.slots.shape[2]

        def write(old: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(old, new[:, :, None], at, 2)

        return dataclasses.replace(
            self,
            slots=write(self.slots, slots),
            k=write(self.k, k),
            v=write(self.v, v),
            steps=self.steps + 1,
        )


@dataclass(frozen=True)
class Offload(KVTransform):
    """Keeps keys and values in host memory; a step fetches what it selects and does not have.

    Stands behind a method that selects slots: `chain(ClusterKV(...), Offload())`. After the prompt
    all keys and values go to `pinned_host` memory, in the order of the slots (cluster by cluster,
    or page by page). The device holds the rows that the last `recent_steps` steps selected, and
    those of new tokens until, every `interval` steps, they move to the host together. Of what a
    step selects, only the rows cross that are in neither. The result is exactly that of the same
    method without `Offload`.

    Args:
      recent_steps: R; 1 as in ClusterKV.
      interval: decode steps between moves of new tokens to the host; None: that of the method
        before, 320 where it has none.

    Raises:
      TypeError, ValueError: a number out of range; in a chain, no method before that selects slots;
        from `init_cache`, no chain, a platform without such memory, or an interval that is not the
        method's.

    Example:
      >>> import kvjax
      >>> tx = kvjax.chain(kvjax.ClusterKV(budget=64, dense_layers=()), kvjax.Offload())
      >>> cache = kvjax.init_cache(tx, batch=1, kv_heads=2, head_dim=16, max_prompt=2048, max_new=8)
      >>> sorted(kvjax.memory_bytes(cache))
      ['device', 'pinned_host']

    References:
      Liu et al., ClusterKV: Manipulating LLM KV Cache in Semantic Space for Recallable Compression,
      arXiv 2412.03213, section IV-D.

    Deviations from the paper:
      Residency is by token and not by cluster, so a trimmed cluster may be held in part. Sinks
      cross with the first step and stay, since every list has them. Without a kernel that reads
      host memory, missing rows are copied one run of slots after the other.
    """

    recent_steps: int = 1
    interval: int | None = None

    stage: ClassVar[Stage] = Stage.PLACE
    paper: ClassVar[str] = "ClusterKV, arXiv 2412.03213"

    def __post_init__(self):
        check_count("recent_steps", self.recent_steps, 1)
        if self.interval is not None:
            check_count("interval", self.interval, 1)

    def init(self, cache: KVCache) -> tuple[KVCache, State]:
        """Host-resident payloads, and nothing resident yet."""
        check_host_memory()
        if cache.tail is None:
            raise ValueError(
                f"{self!r} stands behind a method that indexes all slots (ClusterKV, Quest, "
                "InfiniGen) in a chain, got it alone"
            )
        cache = cache.replace(tail=dataclasses.replace(cache.tail, size=self._size(cache.tail)))
        shape, dtype = cache.k.shape, cache.k.dtype
        lists, length = cache.tail.lists
        entries = (shape[0], lists, self.recent_steps, length)
        resident = Resident(
            slots=jnp.full(entries, -1, jnp.int32),
            k=jnp.zeros((*entries, shape[3]), dtype),
            v=jnp.zeros((*entries, shape[3]), dtype),
            selected=jnp.zeros(shape[0], jnp.int32),
            found=jnp.zeros(shape[0], jnp.int32),
            fetched=jnp.zeros(shape[0], jnp.int32),
            steps=jnp.zeros((), jnp.int32),
        )
        k, v = (Offloaded.zeros(shape, cache.tail_slots, dtype) for _ in range(2))
        return cache.replace(k=k, v=v), resident

    def _size(self, tail: Tail) -> int:
        """Slots of the tail, as the method before has it or wants none."""
        if tail.size is None:
            return INTERVAL if self.interval is None else self.interval
        if self.interval not in (None, tail.size):
            raise ValueError(
                f"Offload must move new tokens when they are indexed, every {tail.size} steps, got "
                f"interval={self.interval}"
            )
        return tail.size

    def read(self, view: View, state: Resident, query: Array) -> tuple[View, State]:
        """The rows of the selection: from the last steps, from the tail, or from the host."""
        k, v = view.cache.k, view.cache.v
        length = view.index.shape[-1] - view.fresh
        index, fresh = view.index[..., :length], view.index[..., length:]
        in_tail = k.in_tail(index)
        stored = (index >= 0) & ~in_tail
        place = jnp.where(stored, state.places(index, k.shape[2]), -1)
        held, missing = place >= 0, stored & (place < 0)
        near = tuple(
            jnp.where(in_tail[..., None], payload.read_tail(index), rows)
            for payload, rows in zip((k, v), state.rows(place), strict=True)
        )
        rows = host_rows(
            (k.store, v.store), near, index, missing, implementation=view.implementation
        )
        state = state.put(jnp.where(stored, index, -1), *rows)

        def count(entries: Bool[Array, "B K N"]) -> Int[Array, " B"]:
            return entries.sum((1, 2), dtype=jnp.int32)

        chosen = stored & self._stepping(view.cache)[:, None, None]
        state = dataclasses.replace(
            state,
            selected=state.selected + count(chosen[..., view.fixed :]),
            found=state.found + count((chosen & held)[..., view.fixed :]),
            fetched=state.fetched + count(missing),
        )
        if view.fresh:
            new = (payload.read_tail(fresh) for payload in (k, v))
            rows = tuple(jnp.concatenate(both, axis=2) for both in zip(rows, new, strict=True))
        return dataclasses.replace(view, rows=rows), state

    def _stepping(self, cache: KVCache) -> Bool[Array, " B"]:
        """Rows that have a new token in this step: others have come to their end."""
        return jax.lax.dynamic_slice_in_dim(cache.live, cache.tail.newest, 1, 2).any((1, 2))

    def update(self, cache: KVCache, state: Resident, step: Step) -> tuple[KVCache, State]:
        """Forgets what is resident when a prompt has moved the slots."""
        if step.prompt_done:
            state = dataclasses.replace(state, slots=jnp.full_like(state.slots, -1))
        return cache, state


class RecallStatistics(NamedTuple):
    """What offloaded caches did while decoding.

    Args:
      hit_rate: share of the selected entries in host memory that a step before had brought already,
        those apart that every list has; None if there were none.
      fetched_bytes_per_step: bytes that crossed to the device per decode step, all layers and rows.
      steps: decode steps.
    """

    hit_rate: float | None
    fetched_bytes_per_step: float
    steps: int


def recall_statistics(caches: object) -> RecallStatistics | None:
    """Statistics over all offloaded caches in a pytree, of all their decode steps so far.

    Returns:
      None where nothing is offloaded or no step was made.
    """

    def is_resident(x: object) -> bool:
        return isinstance(x, Resident)

    found = [x for x in jax.tree.leaves(caches, is_leaf=is_resident) if is_resident(x)]
    steps = max((int(x.steps) for x in found), default=0)
    if not steps:
        return None
    selected, hits = (sum(int(np.sum(getattr(x, n))) for x in found) for n in ("selected", "found"))
    moved = sum(int(np.sum(x.fetched)) * 2 * x.k.shape[-1] * x.k.dtype.itemsize for x in found)
    return RecallStatistics(hits / selected if selected else None, moved / steps, steps)
