"""Keys and values in host memory, with a device cache of what the last steps selected."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.payload import of_rows, take_slots
from kvjax.cache.slots import KVCache
from kvjax.checks import check_count
from kvjax.protocol import Extent, KVTransform, Stage, Step, View
from kvjax.storage.offload.payload import HOST_MEMORY, Offloaded, memory_kinds, not_mapped
from kvjax.storage.recent import places
from pallas_kernels import host_rows

INTERVAL = 320  # ClusterKV's; behind methods that have none of their own


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Resident:
    """What the last R steps selected, on the device; N entries a step, as the lists had them.

    Args:
      slots: of each entry, S = none.
      k, v: their rows.
      selected: entries of all steps so far that lay in host memory, but for those that every list
        has and those of rows without a new token; per list.
      found: how many of them were resident.
      fetched: entries whose rows have crossed.
      steps: decode steps so far.
    """

    slots: Int[Array, "B K R*N"]
    k: Float[Array, "B K R*N D"]
    v: Float[Array, "B K R*N D"]
    selected: Int[Array, "B K"]
    found: Int[Array, "B K"]
    fetched: Int[Array, "B K"]
    steps: Int[Array, ""]

    def put(self, slots: Int[Array, "B K N"], k: Array, v: Array) -> Resident:
        """With a step's entries in place of the oldest step's."""
        entries = slots.shape[2]
        at = self.steps * entries % self.slots.shape[2]
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=at, axis=2)
        return dataclasses.replace(
            self,
            slots=put(self.slots, slots),
            k=put(self.k, k),
            v=put(self.v, v),
            steps=self.steps + 1,
        )


@dataclass(frozen=True)
class Offload(KVTransform):
    """Keeps keys and values in host memory; a step fetches what it selects and does not have.

    Stands behind a method that selects slots: `chain(ClusterKV(...), Offload())`. After the prompt
    all keys and values go to `pinned_host` memory, in the order of the slots (cluster by cluster,
    or page by page). The device holds the rows that the last `recent_steps` steps selected, and
    those of new tokens until `kvjax.flush` moves them to the host, every `interval` steps.
    Of what a step selects, only the rows cross that are in neither. The result is exactly that of
    the same method without `Offload`.

    Args:
      recent_steps: R; 1 as in ClusterKV.
      interval: decode steps between moves of new tokens to the host; None: that of the method
        before, 320 where it has none.

    Raises:
      TypeError, ValueError: a number out of range; in a chain, no method before that selects slots;
        from `init_cache`, no chain, a platform without such memory, or an interval that is not the
        method's; from `attend` and `flush`, steps that `jax.vmap` maps.

    Example:
      >>> import kvjax
      >>> tx = kvjax.chain(kvjax.ClusterKV(budget=64, dense_layers=()), kvjax.Offload())
      >>> cache = kvjax.init_cache(tx, batch=1, kv_heads=2, head_dim=16, max_prompt=2048, max_new=8)
      >>> sorted(kvjax.evaluation.memory_bytes(cache))
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

    def extent(self, extent: Extent) -> Extent:
        """Everything; the interval of the method before, if it has one."""
        if extent.interval is not None:
            return extent
        return extent.every(INTERVAL if self.interval is None else self.interval)

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, Resident]:
        """Host-resident payloads, and nothing resident yet."""
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
        shape, dtype, (lists, length) = cache.k.shape, cache.k.dtype, cache.lists
        batch, _, slots, head_dim = shape
        entries = (batch, lists, self.recent_steps * length)
        resident = Resident(
            slots=jnp.full(entries, slots, jnp.int32),
            k=jnp.zeros((*entries, head_dim), dtype),
            v=jnp.zeros((*entries, head_dim), dtype),
            selected=jnp.zeros((batch, lists), jnp.int32),
            found=jnp.zeros((batch, lists), jnp.int32),
            fetched=jnp.zeros((batch, lists), jnp.int32),
            steps=jnp.zeros((), jnp.int32),
        )
        size = min(cache.interval, max(cache.max_new, 1))
        k, v = (Offloaded.zeros(shape, size, dtype) for _ in range(2))
        return cache.replace(k=k, v=v), resident

    def select(self, view: View, state: Resident, query: Array) -> tuple[View, Resident]:
        """The rows of the selection: of the last steps, recent ones, and others from the host."""
        k: Offloaded = view.cache.k
        v: Offloaded = view.cache.v
        index, length = view.index, view.cache.lists[1]
        recent = k.recent.places(index)
        stored = (index >= 0) & (recent < 0)
        place = places(state.slots, index, k.shape[2])
        held, missing = stored & (place >= 0), stored & (place < 0)
        place = jnp.maximum(place, 0)
        near = tuple(
            payload.recent.at(recent, take_slots(rows, place))
            for payload, rows in ((k, state.k), (v, state.v))
        )
        stores = not_mapped(k.store), not_mapped(v.store)
        rows = host_rows(stores, near, index, missing, implementation=view.implementation)
        # What a list has beyond its length is recent.
        kept = (x[:, :, :length] for x in (jnp.where(stored, index, k.shape[2]), *rows))
        state = state.put(*kept)

        def count(entries: Bool[Array, "B K N"]) -> Int[Array, "B K"]:
            return entries.sum(2, dtype=jnp.int32)

        # Rows without a token in this step have come to their end.
        stepping = (view.slots < view.cache.slots).any((1, 2))
        chosen = stored & stepping[:, None, None]
        state = dataclasses.replace(
            state,
            selected=state.selected + count(chosen[..., view.fixed :]),
            found=state.found + count((chosen & held)[..., view.fixed :]),
            fetched=state.fetched + count(missing),
        )
        return dataclasses.replace(view, rows=rows), state

    def on_prompt(self, cache: KVCache, state: Resident, step: Step) -> tuple[None, Resident]:
        """Forgets what is resident of rows whose slots a prompt has moved."""
        none = jnp.full_like(state.slots, cache.slots)
        return None, dataclasses.replace(state, slots=of_rows(step.rows, none, state.slots))


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

    leaves = jax.tree.leaves(caches, is_leaf=lambda x: isinstance(x, Resident))
    found = [x for x in leaves if isinstance(x, Resident)]
    steps = max((int(x.steps) for x in found), default=0)
    if not steps:
        return None
    selected, hits = (sum(int(np.sum(getattr(x, n))) for x in found) for n in ("selected", "found"))
    moved = sum(int(np.sum(x.fetched)) * 2 * x.k.shape[-1] * x.k.dtype.itemsize for x in found)
    return RecallStatistics(hits / selected if selected else None, moved / steps, steps)
