"""Transforms that decide where and when another one works: layers, heads, time and occupancy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool

from kvjax.budgets.budgets import check_count
from kvjax.cache.slots import KVCache
from kvjax.decisions import Changed, Decision, Mark, Merge, Order, Rewrite
from kvjax.protocol import (
    Extent,
    Full,
    KVTransform,
    Moment,
    Needs,
    Stage,
    State,
    Step,
    View,
    Wrapper,
    check_transform,
    frees_while_decoding,
    parts_of,
    returns,
)


@dataclass(frozen=True)
class PerLayer(KVTransform):
    """A transform chosen per layer: `choose(layer, num_layers)` gives it.

    Args:
      choose: a function that is hashable and pure (a module-level function or one lambda kept).

    Example:
      >>> import kvjax
      >>> tx = kvjax.PerLayer(lambda i, n: kvjax.Full() if i < 2 else kvjax.SnapKV(budget=512))
      >>> [type(t).__name__ for t in kvjax.bind(tx, 4)]
      ['Full', 'Full', 'SnapKV', 'SnapKV']
    """

    choose: Callable[[int, int], KVTransform]

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """The chosen transform, itself for this layer."""
        chosen = self.choose(layer, num_layers)
        check_transform(chosen, "PerLayer's function")
        return chosen.for_layer(layer, num_layers)


@dataclass(frozen=True)
class HeadGroups(KVTransform):
    """Different transforms for different KV heads, each group stored in its own rectangle.

    A layer's cache becomes a tuple, one cache per group, so that heads with a small budget really
    store fewer slots.

    Args:
      groups: pairs of (KV heads, transform); together the heads are 0 … H − 1, each once.

    Raises:
      TypeError: no tuples of (tuple of heads, transform).
      ValueError: a head is missing or stands twice, or a group has none.

    Example:
      >>> import kvjax
      >>> tx = kvjax.HeadGroups((((0, 3), kvjax.Full()), ((1, 2), kvjax.StreamingLLM(budget=16))))
      >>> cache = kvjax.init_cache(tx, batch=1, kv_heads=4, head_dim=8, max_prompt=64, max_new=8)
      >>> [group.kv.shape for group in cache]
      [(1, 2, 72), (1, 2, 17)]
    """

    groups: tuple[tuple[tuple[int, ...], KVTransform], ...]

    def __post_init__(self):
        if not isinstance(self.groups, tuple) or not all(map(_is_group, self.groups)):
            raise TypeError(
                "HeadGroups takes a tuple of ((KV head, ...), transform) tuples, "
                f"got {self.groups!r}"
            )
        heads = [head for group, _ in self.groups for head in group]
        if sorted(heads) != list(range(len(heads))) or not all(g for g, _ in self.groups):
            raise ValueError(
                "HeadGroups must name every KV head from 0 on exactly once, in groups that are "
                f"not empty; got {[group for group, _ in self.groups]}"
            )
        for _, transform in self.groups:
            check_transform(transform, "HeadGroups")
            if isinstance(transform, HeadGroups):
                raise ValueError("HeadGroups cannot be nested")

    @property
    def kv_heads(self) -> int:
        """Number of KV heads that the groups name."""
        return sum(len(group) for group, _ in self.groups)

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """The same groups, each with its transform for this layer."""
        return HeadGroups(
            tuple((group, tx.for_layer(layer, num_layers)) for group, tx in self.groups)
        )


@dataclass(frozen=True)
class _Again(Wrapper):
    """Compresses again while decoding what its base compresses at a prompt's end.

    The base's budget and `spare` slots more are what a KV head of a row may hold.
    """

    adds: ClassVar[tuple[Moment, ...]] = ("flush",)

    spare: ClassVar[int]  # the subclasses name it

    @property
    def needs(self) -> Needs:
        """The base's; its window of queries goes on while decoding."""
        needs = self.base.needs
        observes = needs.query_window > 0 or needs.query_share > 0
        return needs._replace(decode_queries=observes)

    def _hold(self, extent: Extent, interval: int) -> Extent:
        most = self._most(extent.longest_prompt, extent.new)
        held = self.base.extent(extent).hold(most.prompt - most.pinned + self.spare)
        return dataclasses.replace(held.every(interval), passed=None)

    def _most(self, longest: int, new: int) -> Extent:
        """What the base keeps and pins at most when everything live is compressed."""
        return self.base.extent(Extent(prompt=longest + new, new=0, longest=longest))

    def _compress(
        self, due: Bool[Array, "B H"], cache: KVCache, state: State, step: Step
    ) -> tuple[Decision | None, State]:
        """What the base decides about everything live, in the rows and heads that are due."""
        due &= step.rows[:, None]
        as_prompt = dataclasses.replace(step, moment="prompt", rows=due.any(-1))
        decision, state = self.base.on_prompt(cache, state, as_prompt)
        if decision is None or isinstance(decision, Changed | Mark | Order):
            return decision, state
        earlier = decision.rows
        return dataclasses.replace(decision, rows=due if earlier is None else due & earlier), state


@dataclass(frozen=True)
class Every(_Again):
    """Lets a method that compresses prompts compress again every `steps` generated tokens.

    Each time, everything live is compressed as one prompt, so the cache never holds more than the
    base's budget + `steps`. Rows to which no token has come since stay as they are.

    Args:
      base: an evicting or merging method that does nothing while decoding.
      steps: generated tokens between compressions.

    Raises:
      TypeError: `base` is not a transform, `steps` not an int.
      ValueError: `base` does not compress prompts, or compresses while decoding itself.

    Example:
      >>> import kvjax
      >>> tx = kvjax.Every(kvjax.SnapKV(budget=512), steps=128)
      >>> tx.extent(kvjax.Extent(prompt=4096, new=10_000)).total
      640
    """

    steps: int

    def __post_init__(self):
        _check_prompt_method(self.base, "Every")
        check_count("steps", self.steps, 1)

    spare = property(lambda self: self.steps)

    def extent(self, extent: Extent) -> Extent:
        """What the base keeps of everything, and at most `steps` tokens more."""
        return self._hold(extent, self.steps)

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, State]:
        """The base's state, and how long each row was when it was last compressed."""
        cache, state = self.base.init(cache, layer)
        return cache, (cache.length + 0, state)  # not the cache's own array

    def select(self, view: View, state: State, query: Array) -> tuple[View, State]:
        """The base's."""
        length, inner = state
        view, inner = self.base.select(view, inner, query)
        return view, (length, inner)

    def on_prompt(self, cache: KVCache, state: State, step: Step) -> tuple[Decision | None, State]:
        """The base's."""
        length, inner = state
        decision, inner = self.base.on_prompt(cache, inner, step)
        return decision, (step.of_rows(cache.length, length), inner)

    def on_flush(self, cache: KVCache, state: State, step: Step) -> tuple[Decision | None, State]:
        """What the base decides about rows to which more tokens than may wait would come."""
        length, inner = state
        due = step.rows & (cache.length - length + step.room > self.steps)
        heads = jnp.broadcast_to(due[:, None], cache.shape[:2])
        decision, inner = self._compress(heads, cache, inner, step)
        return decision, (jnp.where(due, cache.length, length), inner)

    def on_step(self, cache: KVCache, state: State, step: Step) -> tuple[Decision | None, State]:
        """The base's."""
        length, inner = state
        decision, inner = self.base.on_step(cache, inner, step)
        return decision, (length, inner)


@dataclass(frozen=True)
class WhenFull(_Again):
    """Lets a method that compresses prompts compress again whenever a row runs out of slots.

    A (row, KV head) that has less than a quarter of `room` left, of the slots that it has beyond
    what the base keeps, is compressed as one prompt; the others are left as they are. It is looked
    at every quarter of `room` steps. Where budgets differ by layer (PyramidKV), a cache has slots
    for the largest layer of its quarter of the model, and is full when these are.

    Args:
      base: an evicting or merging method that does nothing while decoding.
      room: slots for new tokens beyond what the base keeps.

    Raises:
      TypeError: `base` is not a transform, `room` not an int.
      ValueError: `base` does not compress prompts, or compresses while decoding itself.

    Example:
      >>> import kvjax
      >>> tx = kvjax.WhenFull(kvjax.SnapKV(budget=512), room=64)
      >>> tx.extent(kvjax.Extent(prompt=4096, new=10_000)).total
      576
    """

    room: int

    def __post_init__(self):
        _check_prompt_method(self.base, "WhenFull")
        check_count("room", self.room, 1)

    spare = property(lambda self: self.room)

    def extent(self, extent: Extent) -> Extent:
        """What the base keeps of everything, and at most `room` tokens more."""
        return self._hold(extent, max(self.room // 4, 1))

    def on_flush(self, cache: KVCache, state: State, step: Step) -> tuple[Decision | None, State]:
        """What the base decides about rows and heads that have not room for the next tokens."""
        most = self._most(cache.max_prompt, cache.max_new)
        others_pins = jnp.maximum(cache.pinned.sum(-1) - most.pinned, 0)
        held = cache.live.sum(-1) - others_pins
        return self._compress(held + step.room > most.prompt + self.room, cache, state, step)


def _is_group(part: object) -> bool:
    if not isinstance(part, tuple) or len(part) != 2 or not isinstance(part[0], tuple):
        return False
    return all(isinstance(head, int) for head in part[0])


def rewrites(transform: KVTransform, *moments: Moment) -> bool:
    """Whether a transform merges slots or changes values at one of these moments.

    It is read off the types that its methods are annotated to return; `Every` and its like do at a
    flush what their base does with a prompt. What is not annotated is found when it is carried out.
    """
    if isinstance(transform, _Again):
        also = ("prompt",) if "flush" in moments else ()
        return rewrites(transform.base, *moments, *also)
    if len(parts_of(transform)) > 1:
        return any(rewrites(part, *moments) for part in parts_of(transform))
    own = any(
        kind.__name__ in returns(transform, moment)
        for moment in moments
        for kind in (Merge, Rewrite)
    )
    return own or (isinstance(transform, Wrapper) and rewrites(transform.base, *moments))


def check_evicts(base: object, name: str) -> None:
    """Raises unless `base` evicts tokens, of which a wrapper can see which ones go.

    Raises:
      TypeError: no transform.
      ValueError: it evicts nothing, merges what it frees into other slots, or splits heads.
    """
    if not _compresses(base, name) or rewrites(base, "prompt", "flush", "step"):
        raise ValueError(f"{name} goes around a method that evicts tokens, got {base!r}")


def check_kept(decision: Decision | None, name: str) -> None:
    """Raises ValueError unless a base's decision says which tokens are kept, or is none."""
    if isinstance(decision, Merge | Order | Changed):
        raise ValueError(
            f"{name} goes around a method that evicts tokens, got a {type(decision).__name__}"
        )


def _check_prompt_method(base: object, name: str) -> None:
    if not _compresses(base, name) or frees_while_decoding(base):
        raise ValueError(
            f"{name} repeats a method that evicts or merges at the prompt's end and does nothing "
            f"while decoding, got {base!r}"
        )


def _compresses(base: object, name: str) -> bool:
    check_transform(base, name)
    if isinstance(base, HeadGroups):
        raise ValueError(f"{name} goes around the transforms of HeadGroups, one by one: {base!r}")
    return base.stage == Stage.EVICT and not isinstance(base, Full)
