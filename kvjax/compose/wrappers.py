"""Transforms that decide where and when another one works: layers, heads, time and occupancy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.cache.slots import KVCache
from kvjax.checks import check_count
from kvjax.compose.foreseen import frees_while_decoding, rewrites
from kvjax.decisions import Decision
from kvjax.devices import all_heads
from kvjax.messages import brief
from kvjax.protocol import (
    Card,
    Extent,
    Full,
    KVTransform,
    MethodHeads,
    Needs,
    Stage,
    State,
    Step,
    Wrapper,
    check_transform,
)
from kvjax.serialization import named, pytree_node, static_value


class LayerChoice(KVTransform):
    """Base class of transforms that are another one in each layer."""

    def chosen(self, layer: int, num_layers: int) -> KVTransform:
        """Returns the transform of a layer, not yet bound to it; itself if it cannot tell yet."""
        raise NotImplementedError

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """Returns the chosen transform for this layer."""
        choice = self.chosen(layer, num_layers)
        return choice if choice is self else choice.for_layer(layer, num_layers)


@dataclass(frozen=True)
class PerLayer(LayerChoice):
    """A transform chosen per layer: `choose(layer, num_layers)` gives it.

    Args:
      choose: a function that is hashable and pure (a module-level function or one lambda kept).

    Raises:
      TypeError: not a function.

    Example:
      >>> import kvjax
      >>> tx = kvjax.PerLayer(lambda i, n: kvjax.Full() if i < 2 else kvjax.SnapKV(budget=512))
      >>> [type(t).__name__ for t in kvjax.bind(tx, 4)]
      ['Full', 'Full', 'SnapKV', 'SnapKV']
    """

    choose: Callable[[int, int], KVTransform]

    def __post_init__(self):
        if isinstance(self.choose, type) or not callable(self.choose):
            raise TypeError(
                "PerLayer takes a function of (layer, num_layers) that gives a transform, such as "
                f"lambda layer, num_layers: transforms[layer], got {brief(self.choose)}"
            )

    def chosen(self, layer: int, num_layers: int) -> KVTransform:
        """Returns the function's result; raises TypeError unless that is a transform."""
        chosen = self.choose(layer, num_layers)
        check_transform(chosen, "PerLayer's function")
        return chosen


Heads = Sequence[int] | Int[Array, " H"]  # numbers of KV heads


@static_value
@dataclass(frozen=True)
class HeadGroups(KVTransform):
    """Different transforms for different KV heads, each group stored in its own rectangle.

    A layer's cache becomes a tuple, one cache per group, so that heads with a small budget really
    store fewer slots.

    Args:
      groups: pairs of (KV heads, transform); together the heads are 0 … H − 1, each once.
      order: for each layer of the model, its KV heads, in an order in which `groups` numbers them:
        number n in `groups` is head `order[layer][n]`. Layers that differ only in the heads of
        their groups are then equal values, and share compiled code. None: each number is a head.
      whole: a method for all heads, numbered as in `groups`, which decides for each head as its
        group's transform does. `read` and `generate` then let it compress prompts for all heads at
        once, which is compiled once for all layers, and cut what it keeps into the groups'
        rectangles. None: each group compresses prompts by itself.

    Raises:
      TypeError: `groups` is not a tuple of (tuple of heads, transform) pairs.
      ValueError: a head is missing or stands twice in `groups` or in a layer of `order`, or a group
        is empty.

    Example:
      >>> import kvjax
      >>> tx = kvjax.HeadGroups((((0, 3), kvjax.Full()), ((1, 2), kvjax.StreamingLLM(budget=16))))
      >>> cache = kvjax.init_cache(tx, batch=1, kv_heads=4, head_dim=8, max_prompt=64, max_new=8)
      >>> [group.kv.shape for group in cache]
      [(1, 2, 72), (1, 2, 17)]
    """

    groups: tuple[tuple[tuple[int, ...], KVTransform], ...]
    order: tuple[tuple[int, ...], ...] | None = None
    whole: KVTransform | None = field(default=None, repr=False)

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
        for numbers in self.order or ():
            if sorted(numbers) != list(range(len(heads))):
                raise ValueError(
                    f"order must have the KV heads 0 to {len(heads) - 1} of each layer, got "
                    f"{brief(numbers)}"
                )

    def check_heads(self, kv_heads: int) -> None:
        """Raises ValueError unless the groups name as many KV heads as there are."""
        if self.kv_heads != kv_heads:
            raise ValueError(f"{brief(self)} names {self.kv_heads} KV heads, got {kv_heads}")

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """Returns the groups, each with its transform for this layer."""
        return self.map(lambda transform, _: transform.for_layer(layer, num_layers))

    def map(self, function: Callable[[KVTransform, MethodHeads], KVTransform]) -> HeadGroups:
        """Replaces each group's transform, and the method for all heads where there is one.

        Args:
          function: is given a transform and its KV heads, the same in all layers, or with an order
            those of each layer. For the method for all heads they are None if it has the heads in
            their own order.
        """
        of_groups = zip(self.heads, by_head_groups(self), strict=True)
        return self.with_transforms(
            [function(transform, heads) for heads, transform in of_groups],
            None if self.whole is None else function(self.whole, self.order),
        )

    def with_transforms(
        self, transforms: Iterable[KVTransform], whole: KVTransform | None
    ) -> HeadGroups:
        """Returns a copy with these transforms of the groups and this method for all heads."""
        pairs = zip(self.groups, transforms, strict=True)
        groups = tuple((heads, tx) for (heads, _), tx in pairs)
        return dataclasses.replace(self, groups=groups, whole=whole)

    @property
    def heads(self) -> tuple[Any, ...]:
        """KV heads of each group: the same in all layers, or with an order those of each layer."""
        numbers = tuple(numbers for numbers, _ in self.groups)
        if self.order is None:
            return numbers
        return tuple(tuple(tuple(x[n] for n in group) for x in self.order) for group in numbers)

    def heads_in(self, cache: Sequence[Any]) -> list[Heads]:
        """Returns the KV heads of each group in a layer's cache."""
        return [
            numbers if part.heads is None else part.heads
            for (numbers, _), part in zip(self.groups, cache, strict=True)
        ]

    kv_heads = property(lambda self: sum(len(group) for group, _ in self.groups))

    def init(self, cache: KVCache, layer: int) -> NoReturn:
        """Raises ValueError: groups have caches of their own, which a wrapper around all lacks."""
        raise ValueError(
            f"a wrapper goes around the transforms of HeadGroups, one by one: {brief(self)}"
        )


def by_head_groups(layer: KVTransform) -> tuple[KVTransform, ...]:
    """Returns the transforms of a bound layer's head groups, or the one of all its heads."""
    return tuple(tx for _, tx in layer.groups) if isinstance(layer, HeadGroups) else (layer,)


def needs_of(layer: KVTransform) -> Needs:
    """Returns what a bound layer's transform needs, or those of its head groups together."""
    return functools.reduce(Needs.union, (part.needs for part in by_head_groups(layer)))


def map_head_groups(
    function: Callable[[KVTransform], KVTransform], layer: KVTransform
) -> KVTransform:
    """Replaces the transform of a bound layer, or that of each of its head groups."""
    if not isinstance(layer, HeadGroups):
        return function(layer)
    return layer.map(lambda transform, _: function(transform))


def in_head_order(layer: KVTransform, cache: Any, arrays: Sequence[Array]) -> Array:
    """Joins arrays `[B, H, ...]` of a layer's head groups, in the order of the layer's heads.

    Args:
      layer, cache: the bound transform and its cache. Without head groups there is one array.
      arrays: of each group.
    """
    if not isinstance(layer, HeadGroups):
        return arrays[0]
    order = jnp.concatenate([jnp.asarray(numbers) for numbers in layer.heads_in(cache)])
    return jnp.concatenate(arrays, axis=1)[:, jnp.argsort(order)]


@named("everywhere")
@dataclass(frozen=True)
class Everywhere(Wrapper):
    """Lets a method work in layers with a sliding window, which otherwise hold just their window.

    A `Ring` holds a window exactly, and no less than it. A smaller budget, in models whose layers
    all have long windows for one, needs the method itself: it then decides as in any other layer,
    over all tokens, of which a query sees those inside its window. Around a whole transform, a part
    of a chain, or what `PerLayer` chooses; `bind` resolves it.

    Args:
      base: the method.

    Example:
      >>> import kvjax
      >>> tx = kvjax.Everywhere(kvjax.StreamingLLM(budget=64))
      >>> kvjax.bind(tx, num_layers=1, windows=(4096,))
      (StreamingLLM(budget=64, sinks=4, reposition=False),)
    """

    card = Card(acts="as its base", when="composed")
    stage = property(lambda self: self.base.stage)

    def __post_init__(self):
        check_transform(self.base, "Everywhere")

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """Returns the base of this layer."""
        return self.base.for_layer(layer, num_layers)


@dataclass(frozen=True)
class _Again(Wrapper):
    """Compresses again while decoding what its base compresses at a prompt's end.

    A subclass has one more field: how many new tokens may wait for that.
    """

    card = Card(when="endless")

    def __post_init__(self):
        name = type(self).__name__
        if not _compresses(self.base, name) or frees_while_decoding(self.base):
            raise ValueError(
                f"{name} repeats a method that evicts or merges at the prompt's end and does "
                f"nothing while decoding, got {self.base!r}"
            )
        _, waiting = dataclasses.fields(self)
        check_count(waiting.name, getattr(self, waiting.name), 1)

    @property
    def needs(self) -> Needs:
        """Needs of the base, whose window of queries goes on while decoding."""
        needs = self.base.needs
        return needs._replace(decode_queries=needs.queries(max_prompt=1) > 0)

    def _hold(self, extent: Extent, spare: int, interval: int) -> Extent:
        """Bounds slots by the most that the base keeps of all tokens, and `spare` more."""
        most = self._most(extent.longest_prompt, extent.new)
        held = self.base.extent(extent).hold(most.prompt - most.pinned + spare)
        return dataclasses.replace(held.every(interval), passed=None)

    def _most(self, longest: int, new: int) -> Extent:
        """Returns the most slots that the base keeps and pins of all live slots."""
        return self.base.extent(Extent(prompt=longest + new, new=0, longest=longest))

    def _compress(
        self, due: Bool[Array, "B H"], cache: KVCache, state: State, step: Step
    ) -> tuple[Decision | None, State]:
        """Lets the base decide about everything live, in the rows and heads that are due."""
        due &= step.rows[:, None]
        rows = all_heads(due, cache.heads).any(-1)
        as_prompt = dataclasses.replace(step, moment="prompt", rows=rows)
        decision, state = super().on_prompt(cache, state, as_prompt)
        return None if decision is None else decision.concerning(due), state


@pytree_node
class Repeated(NamedTuple):
    """State of `Every`: its base's, and how long each row was when it was last compressed."""

    base: State
    length: Int[Array, " B"]


@named("every")
@dataclass(frozen=True)
class Every(_Again):
    """Lets a method that compresses prompts compress again, after every `steps` generated tokens.

    Each time, everything live is compressed as one prompt, so the cache never holds more than the
    base's budget + `steps`. Rows to which no token has come since stay as they are. A budget that
    is a share is one of the tokens that a row has by then, of which `max_prompt` count at most. For
    a text that begins short, take slots (`kvjax.kit.in_slots`).

    Args:
      base: an evicting or merging method that does nothing while decoding.
      steps: generated tokens between compressions.

    Raises:
      TypeError: `base` is not a transform, `steps` not an int.
      ValueError: `base` does not compress prompts, or compresses while decoding itself.

    Example:
      >>> import kvjax
      >>> tx = kvjax.Every(kvjax.SnapKV(budget=512), steps=128)
      >>> tx.extent(kvjax.kit.Extent(prompt=4096, new=10_000)).total
      640
    """

    steps: int

    def extent(self, extent: Extent) -> Extent:
        """Bounds slots by the most that the base keeps of all tokens, and `steps` more."""
        return self._hold(extent, self.steps, self.steps)

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, Repeated]:
        """Makes the base's state, and notes the length of each row."""
        cache, state = super().init(cache, layer)
        return cache, Repeated(state.base, cache.length + 0)  # not the cache's own array

    def on_prompt(
        self, cache: KVCache, state: Repeated, step: Step
    ) -> tuple[Decision | None, Repeated]:
        """Lets the base decide, and notes that the rows of the prompt have been compressed."""
        decision, state = super().on_prompt(cache, state, step)
        return decision, state._replace(length=step.of_rows(cache.length, state.length))

    def on_flush(
        self, cache: KVCache, state: Repeated, step: Step
    ) -> tuple[Decision | None, Repeated]:
        """Lets the base compress rows that lack room for the next tokens."""
        due = step.rows & (cache.length - state.length + step.room > self.steps)
        heads = jnp.broadcast_to(due[:, None], cache.shape[:2])
        decision, state = self._compress(heads, cache, state, step)
        return decision, state._replace(length=jnp.where(due, cache.length, state.length))


@named("when_full")
@dataclass(frozen=True)
class WhenFull(_Again):
    """Lets a method that compresses prompts compress again whenever a row runs out of slots.

    A (row, KV head) that has less than a quarter of `room` left, of the slots that it has beyond
    what the base keeps, is compressed as one prompt; the others are left as they are. It is looked
    at every quarter of `room` steps. Where budgets differ by layer (PyramidKV), a cache has slots
    for the largest layer of its quarter of the model, and is full when these are. A budget that is
    a share is as in `Every`.

    Args:
      base: an evicting or merging method that does nothing while decoding.
      room: slots for new tokens beyond what the base keeps.

    Raises:
      TypeError: `base` is not a transform, `room` not an int.
      ValueError: `base` does not compress prompts, or compresses while decoding itself.

    Example:
      >>> import kvjax
      >>> tx = kvjax.WhenFull(kvjax.SnapKV(budget=512), room=64)
      >>> tx.extent(kvjax.kit.Extent(prompt=4096, new=10_000)).total
      576
    """

    room: int

    def extent(self, extent: Extent) -> Extent:
        """Bounds slots by the most that the base keeps of all tokens, and `room` more."""
        return self._hold(extent, self.room, max(self.room // 4, 1))

    def on_flush(self, cache: KVCache, state: State, step: Step) -> tuple[Decision | None, State]:
        """Lets the base decide about rows and heads that lack room for the next tokens."""
        most = self._most(cache.max_prompt, cache.max_new)
        others_pins = jnp.maximum(cache.pinned.sum(-1) - most.pinned, 0)
        held = cache.live.sum(-1) - others_pins
        return self._compress(held + step.room > most.prompt + self.room, cache, state, step)


def _is_group(part: object) -> bool:
    if not isinstance(part, tuple) or len(part) != 2 or not isinstance(part[0], tuple):
        return False
    return all(isinstance(head, int) for head in part[0])


def check_evicts(base: Any, name: str) -> None:
    """Raises unless `base` evicts tokens, of which a wrapper can see which ones go.

    Raises:
      TypeError: `base` is not a transform.
      ValueError: it evicts nothing, merges what it frees into other slots, or splits heads.
    """
    if not _compresses(base, name) or rewrites(base, "prompt", "flush", "step"):
        raise ValueError(f"{name} goes around a method that evicts tokens, got {base!r}")


def _compresses(base: Any, name: str) -> bool:
    check_transform(base, name)
    if isinstance(base, HeadGroups):
        raise ValueError(f"{name} goes around the transforms of HeadGroups, one by one: {base!r}")
    return base.stage == Stage.EVICT and not isinstance(base, Full)
