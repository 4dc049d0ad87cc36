"""Keys and values in host memory, with a device cache of the rows that recent steps selected."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.payload import of_rows, take_slots
from kvjax.cache.slots import KVCache
from kvjax.checks import check_count
from kvjax.protocol import Card, Extent, KVTransform, Stage, Step, View
from kvjax.serialization import named, pytree_node
from kvjax.storage.offload.payload import HOST_MEMORY, Offloaded, memory_kinds, not_mapped
from kvjax.storage.quantize.transform import Quantize
from kvjax.storage.recent import places
from pallas_kernels import host_rows
from pallas_kernels.base.annotations import NoneElsewhere

INTERVAL = 320  # ClusterKV's interval, used behind methods that have none of their own


@pytree_node
@dataclass(frozen=True)
class Resident:
    """Rows on the device that the last R steps selected, with N entries per step.

    Args:
      slots: slot of each entry; S means none. None where R is 0.
      k, v: rows of the entries; None where R is 0.
      selected: number of selected entries in host memory, over all steps so far, per list. Entries
        that every list has, and those of rows without a new token, do not count.
      found: number of these entries that were resident.
      fetched: number of entries whose rows were copied from the host.
      steps: number of decode steps so far.
      row_bytes: bytes of an entry's key and value (static).
    """

    slots: Int[Array, "B K R*N"] | None
    k: Float[Array, "B K R*N D"] | NoneElsewhere
    v: Float[Array, "B K R*N D"] | NoneElsewhere
    selected: Int[Array, "B K"]
    found: Int[Array, "B K"]
    fetched: Int[Array, "B K"]
    steps: Int[Array, ""]
    row_bytes: int = field(metadata={"static": True})

    def at(
        self, index: Int[Array, "B K N"], nowhere: int
    ) -> tuple[Bool[Array, "B K N"], Float[Array, "B K N D"] | int, Float[Array, "B K N D"] | int]:
        """Returns which slots of `index` are resident, and rows, which are theirs there."""
        if self.slots is None:
            return jnp.zeros(index.shape, bool), 0, 0
        place = places(self.slots, index, nowhere)
        k, v = (take_slots(rows, jnp.maximum(place, 0)) for rows in (self.k, self.v))
        return place >= 0, k, v

    def put(self, slots: Int[Array, "B K N"], k: Array, v: Array) -> Resident:
        """Replaces the entries of the oldest step by those of a new one."""
        if self.slots is None:
            return dataclasses.replace(self, steps=self.steps + 1)
        entries = slots.shape[2]
        start = self.steps * entries % self.slots.shape[2]
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=2)
        return dataclasses.replace(
            self,
            slots=put(self.slots, slots),
            k=put(self.k, k),
            v=put(self.v, v),
            steps=self.steps + 1,
        )


@named("offload")
@dataclass(frozen=True)
class Offload(KVTransform):
    """Keeps keys and values in host memory; a step fetches the selected rows that it lacks.

    It is placed behind a method that selects slots: `chain(ClusterKV(...), Offload())`. After the
    prompt all keys and values go to `pinned_host` memory, in the order of the slots (cluster by
    cluster, or page by page). The device holds the rows that the last `recent_steps` steps
    selected, and those of new tokens until `kvjax.flush` moves them to the host, every `interval`
    steps. A step copies only the selected rows that are in neither. The result is exactly that of
    the same method without `Offload`.

    In `chain(Quantize(8), ClusterKV(...), Offload())` rows are encoded in both memories, cross as
    they are encoded, and are decoded after that: a key or value of 128 channels in bfloat16 takes
    132 bytes with 8 bits and 80 with 4 instead of 256. `Quantize` encodes each row by itself then,
    keys of 4 bits and fewer in groups of channels. Numbers of 3 and 2 bits take 4 bits here.

    Args:
      recent_steps: R; 1 as in ClusterKV. With 0 every step copies all that it selects in host
        memory, the sinks too: ClusterKV's "direct loading", to compare with.
      interval: decode steps between moves of new tokens to the host; None: the interval of the
        method before, or 320 if it has none.

    Raises:
      TypeError, ValueError: a number out of range; in a chain, no method before that selects slots,
        or a stored form other than `Quantize`; from `init_cache`, no chain, a platform without such
        memory, or an interval that differs from the method's; from `attend` and `flush`, steps that
        `jax.vmap` maps.

    Example:
      >>> import kvjax, kvjax.evaluation
      >>> tx = kvjax.chain(kvjax.ClusterKV(budget=64, dense_layers=()), kvjax.Offload())
      >>> cache = kvjax.init_cache(tx, batch=1, kv_heads=2, head_dim=16, max_prompt=2048, max_new=8)
      >>> sorted(kvjax.evaluation.memory_bytes(cache))
      ['device', 'pinned_host']

    References:
      Liu et al., ClusterKV: Manipulating LLM KV Cache in Semantic Space for Recallable Compression,
      arXiv 2412.03213, section IV-D.

    Deviations from the paper:
      Residency is by token and not by cluster, so that a trimmed cluster may be held in part. Sinks
      are copied in the first step and stay, since every list has them. Without a kernel that reads
      host memory, missing rows are copied one run of slots after the other.
    """

    recent_steps: int = 1
    interval: int | None = None

    stage: ClassVar[Stage] = Stage.PLACE
    card = Card(
        acts="every step", paper="ClusterKV, arXiv 2412.03213", when="lossless",
        examples=('--method "chain(clusterkv, offload)" --budget 0.1',),
    )  # fmt: skip

    def __post_init__(self):
        check_count("recent_steps", self.recent_steps, 0)
        if self.interval is not None:
            check_count("interval", self.interval, 1)

    def in_chain(self, before: tuple[KVTransform, ...], after: tuple[KVTransform, ...]) -> Offload:
        """Refuses stored forms other than `Quantize`."""
        for part in before:
            if part.stage == Stage.REPRESENT and not isinstance(part, Quantize):
                raise ValueError(
                    f"{self!r} keeps rows in host memory as they are, or as Quantize encodes them, "
                    f"and {part!r} stores them in another form: take one of them"
                )
        return self

    def extent(self, extent: Extent) -> Extent:
        """Asks for flushes, unless a method before has an interval."""
        if extent.interval is not None:
            return extent
        return extent.every(INTERVAL if self.interval is None else self.interval)

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, Resident]:
        """Makes payloads in host memory, and an empty device cache of rows."""
        if HOST_MEMORY not in memory_kinds():
            raise ValueError(
                f"Offload keeps keys and values in {HOST_MEMORY} memory, which the platform "
                f"{jax.default_backend()!r} does not have: it has {', '.join(memory_kinds())}"
            )
        if cache.lists is None:
            raise ValueError(
                f"{self!r} stands behind a method that indexes all slots (ClusterKV, Quest, "
                "InfiniGen) in a chain, got it alone"
            )
        if self.interval not in (None, cache.interval):
            raise ValueError(
                "Offload must move new tokens when they are indexed, every "
                f"{cache.interval} steps, got interval={self.interval}"
            )
        size = min(cache.interval, max(cache.max_new, 1))
        k, v = (Offloaded.zeros(payload, size) for payload in (cache.k, cache.v))  # pyright: ignore[reportArgumentType]  # `in_chain` lets no others in
        (batch, _, slots, _), (lists, length) = k.shape, cache.lists
        entries = (batch, lists, self.recent_steps * length)

        def none_yet(payload: Offloaded) -> Array | None:
            store = payload.store
            return jnp.zeros((*entries, store.shape[3]), store.dtype) if self.recent_steps else None

        resident = Resident(
            slots=jnp.full(entries, slots, jnp.int32) if self.recent_steps else None,
            k=none_yet(k),
            v=none_yet(v),
            selected=jnp.zeros((batch, lists), jnp.int32),
            found=jnp.zeros((batch, lists), jnp.int32),
            fetched=jnp.zeros((batch, lists), jnp.int32),
            steps=jnp.zeros((), jnp.int32),
            row_bytes=sum(x.store.shape[3] * x.store.dtype.itemsize for x in (k, v)),
        )
        return cache.replace(k=k, v=v), resident

    def select(self, view: View, state: Resident, query: Array) -> tuple[View, Resident]:
        """Collects the selected rows: recent ones, resident ones, and others from the host."""
        k, v = (cast(Offloaded, x) for x in (view.cache.k, view.cache.v))  # which `init` has made
        index = cast(Array, view.index)  # which a part before this one has selected
        length = view.cache.lists[1]
        recent_place = k.recent.places(index)
        stored = (index >= 0) & (recent_place < 0)
        there, *resident_rows = state.at(index, k.shape[2])
        resident, missing = stored & there, stored & ~there
        on_device = tuple(
            payload.recent.at(recent_place, rows)
            for payload, rows in zip((k, v), resident_rows, strict=True)
        )
        stores = not_mapped(k.store), not_mapped(v.store)
        fetch = functools.partial(
            host_rows, index=index, missing=missing, implementation=view.implementation
        )
        if stores[0].shape == stores[1].shape:
            rows = fetch(stores, on_device)
        else:  # keys of other bits than values
            rows = tuple(
                fetch((store,), (into,))[0] for store, into in zip(stores, on_device, strict=True)
            )
        # Entries beyond the length of a list are recent tokens, which need no place.
        entries = (x[:, :, :length] for x in (jnp.where(stored, index, k.shape[2]), *rows))
        state = state.put(*entries)

        def count(entries: Bool[Array, "B K N"]) -> Int[Array, "B K"]:
            return entries.sum(2, dtype=jnp.int32)

        # Rows without a token in this step have come to their end: they do not count.
        stepping = (view.slots < view.cache.slots).any((1, 2))
        selected = stored & stepping[:, None, None]
        state = dataclasses.replace(
            state,
            selected=state.selected + count(selected[..., view.fixed :]),
            found=state.found + count((selected & resident)[..., view.fixed :]),
            fetched=state.fetched + count(missing),
        )
        return dataclasses.replace(view, rows=(k.dense(rows[0]), v.dense(rows[1]))), state

    def on_prompt(self, cache: KVCache, state: Resident, step: Step) -> tuple[None, Resident]:
        """Empties the device cache in rows whose slots a prompt has moved."""
        if state.slots is None:
            return None, state
        none = jnp.full_like(state.slots, cache.slots)
        return None, dataclasses.replace(state, slots=of_rows(step.rows, none, state.slots))


class RecallStatistics(NamedTuple):
    """Statistics of offloaded caches while decoding.

    Args:
      hit_rate: share of the selected entries in host memory that were on the device already.
        Entries that every list has do not count. None if nothing was selected.
      fetched_bytes_per_step: bytes copied to the device per decode step, over all layers and rows.
      steps: number of decode steps.
    """

    hit_rate: float | None
    fetched_bytes_per_step: float
    steps: int


def recall_statistics(caches: object) -> RecallStatistics | None:
    """Returns statistics of all offloaded caches in a pytree, over all their decode steps so far.

    Returns:
      None where nothing is offloaded or no step was made.
    """

    leaves = jax.tree.leaves(caches, is_leaf=lambda x: isinstance(x, Resident))
    states = [x for x in leaves if isinstance(x, Resident)]
    steps = max((int(x.steps) for x in states), default=0)
    if not steps:
        return None
    selected, hits = (
        sum(int(np.sum(getattr(x, name))) for x in states) for name in ("selected", "found")
    )
    moved = sum(int(np.sum(x.fetched)) * x.row_bytes for x in states)
    return RecallStatistics(hits / selected if selected else None, moved / steps, steps)
