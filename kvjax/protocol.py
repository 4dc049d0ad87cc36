"""The protocol: a transform is a value whose fields are the hyper-parameters of a method.

Its methods are pure functions over a `KVCache` and the transform's own state. Every one has an
identity default, so that a method of compression defines only what it does. Because a transform is
a frozen dataclass it is hashable (equal transforms share compiled code), prints as the expression
that makes it, and is re-budgeted by `dataclasses.replace`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.payload import take_slots
from kvjax.cache.slots import KVCache
from kvjax.rope import Rope

State = Any  # a pytree of arrays that never index by slot
Phase = Literal["prompt", "decode"]
GroupReduce = Literal["mean", "max", "sum"]


class Stage(IntEnum):
    """Where a transform stands in a chain; a chain is sorted by it."""

    EVICT = 0  # evicts or merges
    REPRESENT = 1  # stores keys and values in another form
    RECALL = 2  # reads a selection
    PLACE = 3  # keeps them in another memory


@dataclass(frozen=True)
class Extent:
    """Static bounds on the live slots of a row and head; composes through a chain.

    Args:
      prompt: most live slots when a prompt is complete.
      new: most new tokens of a row.
      limit: most live slots at any time while decoding, the newest token included; None: whatever
        `prompt + new` allows.
      longest: most prompt tokens of a row; None: `prompt`, where nothing has compressed yet.
      pinned: most pinned slots, which stand outside the budget of every evictor.

    Example:
      >>> import kvjax
      >>> kvjax.H2O(budget=64).extent(kvjax.Extent(prompt=4096, new=100)).total
      65
    """

    prompt: int
    new: int
    limit: int | None = None
    longest: int | None = None
    pinned: int = 0

    @property
    def total(self) -> int:
        """Capacity of a cache of this extent."""
        total = self.prompt + self.new
        return total if self.limit is None else min(total, self.limit)

    @property
    def longest_prompt(self) -> int:
        """Most prompt tokens of a row, whatever has been compressed since."""
        return self.prompt if self.longest is None else self.longest

    def keep(self, slots: int) -> Extent:
        """At most `slots` remain of a prompt, and the pinned ones."""
        kept = min(self.prompt, slots + self.pinned)
        return dataclasses.replace(self, prompt=kept, longest=self.longest_prompt)

    def hold(self, slots: int) -> Extent:
        """At most `slots` and the pinned ones are live at any time while decoding."""
        slots = slots + self.pinned
        limit = slots if self.limit is None else min(self.limit, slots)
        return dataclasses.replace(self, limit=limit)

    def pin(self, slots: int) -> Extent:
        """At most `slots` more are pinned, beside what earlier parts of a chain hold."""
        limit = None if self.limit is None else self.limit + slots
        return dataclasses.replace(self, limit=limit, pinned=self.pinned + slots)


class Needs(NamedTuple):
    """What a transform wants to know of an attention call; `attend` computes nothing else.

    Args:
      attention_mass: `Step.mass`, the probability that each slot received.
      accumulated_attention: the column "attention", `[B, H, S, G]`, that sum over all calls.
      query_window: `Step.query` holds this many of each row's last prompt queries.
      query_share: and at least this share of `max_prompt`, and one more.
      decode_queries: the window goes on with the queries of decoding.
      decode_mass: `attention_mass`, of decode steps alone.
      unrotated_keys: the cache stores keys without RoPE, rotated when they are read.
      reposition: keys are rotated at their rank among the live slots and not at their position.
      predicted_query: `View.predicted`, where a model can give it.
      unfold: every query head has slots of its own: H is then Q, and a token's key and value are
        stored once for each query head of their KV head.
    """

    attention_mass: bool = False
    accumulated_attention: bool = False
    query_window: int = 0
    query_share: float = 0.0
    decode_queries: bool = False
    decode_mass: bool = False
    unrotated_keys: bool = False
    reposition: bool = False
    predicted_query: bool = False
    unfold: bool = False

    def union(self, other: Needs) -> Needs:
        """What serves both."""
        return Needs(*(max(a, b) for a, b in zip(self, other, strict=True)))

    def queries(self, max_prompt: int) -> int:
        """Size of the window of prompt queries."""
        share = 1 + int(self.query_share * max_prompt) if self.query_share else 0
        return max(self.query_window, share)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
    """What one attention call saw.

    Args:
      slots: slot of each new token, `[B, H, T]`; `cache.slots` where none was stored.
      mass: attention probability that each slot received from this call's queries, summed over
        them, per query head, `[B, Q, S]` float32; None unless needed.
      keys: rotated keys of all slots as attention saw them, `[B, H, S, D]`; None where a selection
        was read.
      query: each row's last W queries of this prompt, rotated, oldest first, `[B, Q, W, D]`; None
        unless needed. They are carried across the chunks of a prompt, and under `Every` and
        `WhenFull` go on with the queries of decoding.
      query_position: their positions, -1 where there were fewer, `[B, W]`.
      rope: as given to `attend`; None where q and k came rotated.
      phase, last: as given to `attend` (static).
      scale, window, soft_cap, implementation: of the attention (static).
    """

    slots: Int[Array, "B H T"]
    mass: Float[Array, "B Q S"] | None
    keys: Float[Array, "B H S D"] | None
    query: Float[Array, "B Q W D"] | None
    query_position: Int[Array, "B W"] | None
    rope: Rope | None
    phase: Phase = field(metadata={"static": True})
    last: bool = field(metadata={"static": True})
    scale: float = field(metadata={"static": True})
    window: int | None = field(default=None, metadata={"static": True})
    soft_cap: float | None = field(default=None, metadata={"static": True})
    implementation: str | None = field(default=None, metadata={"static": True})

    @property
    def prompt_done(self) -> bool:
        """A prompt has just been completed: the moment at which prompt methods compress."""
        return self.phase == "prompt" and self.last


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class View:
    """What attention will see of a cache: all slots, or a selection of N.

    A selection has K lists: one per KV head, or one per query head (K = Q).

    Args:
      cache: the cache.
      index: slots to see, `[B, K, N]`, -1 = none; None = all of them in place.
      fixed: how many entries at the front every list of a cache has, such as sinks (static).
      fresh: how many entries at the end of every list are those of the tail (static).
      rows: keys and values of the selection, `[B, K, N, D]` each, where a transform has fetched
        them already; None: attention reads them.
      predicted: what the query was expected to be before this layer began, rotated,
        `[B, Q, T, D]`: the layer's query weights times the input of the attention before it. None
        where no transform needs it or the model does not give it.
      implementation: of the operations in `pallas_kernels`, as given to `attend` (static).
    """

    cache: KVCache
    index: Int[Array, "B K N"] | None = None
    fixed: int = field(default=0, metadata={"static": True})
    fresh: int = field(default=0, metadata={"static": True})
    rows: tuple[Array, Array] | None = None
    predicted: Float[Array, "B Q T D"] | None = None
    implementation: str | None = field(default=None, metadata={"static": True})

    def take(self, index: Int[Array, "B K N"], fixed: int = 0, fresh: int = 0) -> View:
        """A selection of this view's entries (-1 = none). Only indices are composed."""
        if self.index is not None:
            chosen = take_slots(self.index, jnp.maximum(index, 0))
            index = jnp.where(index >= 0, chosen, -1)
        return dataclasses.replace(self, index=index, fixed=fixed, fresh=fresh, rows=None)

    def read(self) -> tuple[Float[Array, "B K N D"], Float[Array, "B K N D"]]:
        """Keys and values as they are stored, and anything where an entry is none."""
        if self.rows is not None:
            return self.rows
        # Slot 0 is read instead; a log_mass of -inf keeps it out of the result.
        index = None if self.index is None else jnp.maximum(self.index, 0)
        return self.cache.k.read(index), self.cache.v.read(index)

    def per_slot(self, x: Array, fill: float) -> Array:
        """A per-slot array `[B, H, S]` as this view sees it, `fill` where an entry is none."""
        if self.index is None:
            return x
        return jnp.where(self.index >= 0, take_slots(x, jnp.maximum(self.index, 0)), fill)

    def to_slots(self, x: Float[Array, "B K G N"]) -> Float[Array, "B K G S"]:
        """What the view's entries received, at their slots; 0 for slots that were not read."""
        if self.index is None:
            return x
        slots = self.cache.slots
        index = jnp.where(self.index >= 0, self.index, slots)
        add = jax.vmap(
            jax.vmap(
                lambda i, x: jnp.zeros((slots, x.shape[-1]), x.dtype).at[i].add(x, mode="drop")
            )
        )
        return jnp.moveaxis(add(index, jnp.moveaxis(x, 2, 3)), 3, 2)


@dataclass(frozen=True)
class KVTransform:
    """A method of compression as a value. All methods default to doing nothing.

    Class attributes:
      stage: where it stands in a chain.
      paper: name and arXiv number, for listings.
    """

    stage: ClassVar[Stage] = Stage.EVICT
    paper: ClassVar[str] = ""

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """The transform of one layer: layer budgets and dense layers live here."""
        return self

    def extent(self, extent: Extent) -> Extent:
        """Static bound on live slots, given the bound before this transform."""
        return extent

    @property
    def needs(self) -> Needs:
        """What `attend` must compute for it."""
        return Needs()

    @property
    def bound(self) -> bool:
        """Whether `for_layer` has nothing left to decide."""
        return True

    @property
    def frees_while_decoding(self) -> bool:
        """Whether slots are evicted or merged between prompts (an index would go stale)."""
        return False

    @property
    def merges(self) -> bool:
        """Whether what it frees goes into other slots, so that no wrapper can bring it back."""
        return False

    @property
    def indexes(self) -> bool:
        """Whether it keeps an index of all slots, in a cache with a tail."""
        return False

    @property
    def spans_slots(self) -> bool:
        """Whether it encodes groups of slots together, so that none may go between prompts."""
        return False

    def init(self, cache: KVCache) -> tuple[KVCache, State]:
        """Adds columns, chooses the payload, and makes the transform's own state."""
        return cache, ()

    def read(self, view: View, state: State, query: Float[Array, "B Q T D"]) -> tuple[View, State]:
        """Before attention while decoding: chooses a static number of slots to look at."""
        return view, state

    def update(self, cache: KVCache, state: State, step: Step) -> tuple[KVCache, State]:
        """After attention: evicts, merges, indexes. Shapes stay as they are."""
        return cache, state

    def score(self, cache: KVCache, state: State, step: Step) -> Float[Array, "B Q S"] | None:
        """Importance of each slot before query heads are reduced, for wrappers; None if none."""
        return None

    def passes(self, extent: Extent) -> int | None:
        """Most prompt tokens that a model must take to the next layer; None: it takes all."""
        return None

    def recent(self, cache: KVCache, state: State) -> Int[Array, " B"] | None:
        """How many newest tokens of each row it always keeps, for wrappers; None if none."""
        return None


def accumulated_attention(cache: KVCache) -> Float[Array, "B Q S"]:
    """Attention that each slot has received so far, per query head (`Needs` has to ask for it)."""
    batch, kv_heads, slots = cache.shape
    attention = jnp.moveaxis(cache.column("attention"), -1, 2)
    return attention.reshape(batch, kv_heads * cache.group, slots)


def group_scores(
    scores: Float[Array, "B Q S"], cache: KVCache, reduce: GroupReduce
) -> Float[Array, "B H S"]:
    """One score per KV head from those of its group's query heads."""
    grouped = scores.reshape(*cache.shape[:2], cache.group, -1)
    return {"mean": jnp.mean, "max": jnp.max, "sum": jnp.sum}[reduce](grouped, axis=2)


def check_group_reduce(reduce: str) -> None:
    """Raises ValueError for a reduction that is not offered."""
    if reduce not in ("mean", "max", "sum"):
        raise ValueError(f"group_reduce must be 'mean', 'max' or 'sum', got {reduce!r}")


def check_transform(transform: object, where: str) -> None:
    """Raises TypeError for anything that is not a transform."""
    if not isinstance(transform, KVTransform):
        hint = " (give an instance, not the class)" if isinstance(transform, type) else ""
        raise TypeError(f"{where} takes transforms, got {transform!r}{hint}")


@dataclass(frozen=True)
class Full(KVTransform):
    """The full cache: keeps every token. The identity, and what everything is compared with.

    Example:
      >>> import kvjax
      >>> kvjax.bind(kvjax.Full(), num_layers=2)
      (Full(), Full())
    """

    paper: ClassVar[str] = "no compression"
