"""Transforms that decide where and when another one works: layers, heads, time and occupancy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from kvjax.budgets.budgets import check_count
from kvjax.cache.slots import KVCache
from kvjax.protocol import (
    Extent,
    Full,
    KVTransform,
    Needs,
    Stage,
    State,
    Step,
    check_transform,
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

    bound = property(lambda self: False)

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

    @property
    def bound(self) -> bool:
        """Whether all groups' transforms are."""
        return all(transform.bound for _, transform in self.groups)

    @property
    def frees_while_decoding(self) -> bool:
        """Whether any group's transform does."""
        return any(transform.frees_while_decoding for _, transform in self.groups)

    @property
    def merges(self) -> bool:
        """Whether any group's transform does."""
        return any(transform.merges for _, transform in self.groups)

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """The same groups, each with its transform for this layer."""
        return HeadGroups(
            tuple((group, tx.for_layer(layer, num_layers)) for group, tx in self.groups)
        )


@dataclass(frozen=True)
class Every(KVTransform):
    """Lets a method that compresses prompts compress again every `steps` generated tokens.

    Each time, everything live is compressed as one prompt, so the cache never holds more than the
    base's budget + `steps`.

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

    base: KVTransform
    steps: int

    def __post_init__(self):
        _check_prompt_method(self.base, "Every")
        check_count("steps", self.steps, 1)

    bound = property(lambda self: self.base.bound)
    frees_while_decoding = property(lambda self: True)
    merges = property(lambda self: self.base.merges)
    needs = property(lambda self: _while_decoding(self.base.needs))

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """The wrapper around the base of this layer."""
        return _rewrap(self, layer, num_layers)

    def extent(self, extent: Extent) -> Extent:
        """What the base keeps of everything, and at most `steps` tokens more."""
        most = _most_of(self.base, extent.longest_prompt, extent.new)
        return self.base.extent(extent).hold(most.prompt - most.pinned + self.steps)

    def init(self, cache: KVCache) -> tuple[KVCache, State]:
        """The base's state and a counter of generated tokens."""
        cache, state = self.base.init(cache)
        return cache, (jnp.zeros((), jnp.int32), state)

    def update(self, cache: KVCache, state: State, step: Step) -> tuple[KVCache, State]:
        """Runs the base at the prompt's end and whenever the counter is full."""
        count, inner = state
        if step.phase == "prompt":
            cache, inner = self.base.update(cache, inner, step)
            return cache, (jnp.zeros_like(count), inner)
        count = count + 1
        due = count >= self.steps
        as_prompt = dataclasses.replace(step, phase="prompt", last=True)
        cache, inner = update_if(due, lambda c, s: self.base.update(c, s, as_prompt), cache, inner)
        return cache, (jnp.where(due, 0, count), inner)

    def score(self, cache: KVCache, state: State, step: Step) -> Array | None:
        """The base's score."""
        return self.base.score(cache, state[1], step)

    def recent(self, cache: KVCache, state: State) -> Array | None:
        """The base's window."""
        return self.base.recent(cache, state[1])


@dataclass(frozen=True)
class WhenFull(KVTransform):
    """Lets a method that compresses prompts compress again whenever a row runs out of slots.

    A (row, KV head) that holds `room` live slots more than the base keeps is compressed as one
    prompt before the next token; the others are left as they are.

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

    base: KVTransform
    room: int

    def __post_init__(self):
        _check_prompt_method(self.base, "WhenFull")
        check_count("room", self.room, 1)

    bound = property(lambda self: self.base.bound)
    frees_while_decoding = property(lambda self: True)
    merges = property(lambda self: self.base.merges)
    needs = property(lambda self: _while_decoding(self.base.needs))

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """The wrapper around the base of this layer."""
        return _rewrap(self, layer, num_layers)

    def extent(self, extent: Extent) -> Extent:
        """What the base keeps of everything, and at most `room` tokens more."""
        most = _most_of(self.base, extent.longest_prompt, extent.new)
        return self.base.extent(extent).hold(most.prompt - most.pinned + self.room)

    def init(self, cache: KVCache) -> tuple[KVCache, State]:
        """The base's columns and state."""
        return self.base.init(cache)

    def update(self, cache: KVCache, state: State, step: Step) -> tuple[KVCache, State]:
        """Runs the base at the prompt's end, and on the rows and heads that are full."""
        if step.phase == "prompt":
            return self.base.update(cache, state, step)
        most = _most_of(self.base, cache.max_prompt, cache.max_new)
        others_pins = jnp.maximum(cache.pinned.sum(-1) - most.pinned, 0)
        full = cache.live.sum(-1) - others_pins >= most.prompt + self.room
        as_prompt = dataclasses.replace(step, phase="prompt", last=True)

        def compress(cache: KVCache, state: State) -> tuple[KVCache, State]:
            new, new_state = self.base.update(cache, state, as_prompt)
            return _select_rows(full, new, cache), new_state

        return update_if(full.any(), compress, cache, state)

    def score(self, cache: KVCache, state: State, step: Step) -> Array | None:
        """The base's score."""
        return self.base.score(cache, state, step)

    def recent(self, cache: KVCache, state: State) -> Array | None:
        """The base's window."""
        return self.base.recent(cache, state)


def _is_group(part: object) -> bool:
    if not isinstance(part, tuple) or len(part) != 2 or not isinstance(part[0], tuple):
        return False
    return all(isinstance(head, int) for head in part[0])


def check_evicts(base: object, name: str) -> None:
    """Raises unless `base` evicts tokens, of which a wrapper can compare before and after.

    Raises:
      TypeError: no transform.
      ValueError: it evicts nothing, merges what it frees into other slots, or splits heads.
    """
    if not _compresses(base, name) or base.merges:
        raise ValueError(f"{name} goes around a method that evicts tokens, got {base!r}")


def _check_prompt_method(base: object, name: str) -> None:
    if not _compresses(base, name) or base.frees_while_decoding:
        raise ValueError(
            f"{name} repeats a method that evicts or merges at the prompt's end and does nothing "
            f"while decoding, got {base!r}"
        )


def _compresses(base: object, name: str) -> bool:
    check_transform(base, name)
    if isinstance(base, HeadGroups):
        raise ValueError(f"{name} goes around the transforms of HeadGroups, one by one: {base!r}")
    return base.stage == Stage.EVICT and not isinstance(base, Full)


def _most_of(base: KVTransform, longest: int, new: int) -> Extent:
    """What `base` keeps and pins at most when everything live, prompt and new, is compressed."""
    return base.extent(Extent(prompt=longest + new, new=0, longest=longest))


def _while_decoding(needs: Needs) -> Needs:
    return needs._replace(decode_queries=needs.query_window > 0 or needs.query_share > 0)


def _rewrap(wrapper: KVTransform, layer: int, num_layers: int) -> KVTransform:
    base = wrapper.base.for_layer(layer, num_layers)
    return base if isinstance(base, Full) else dataclasses.replace(wrapper, base=base)


def _select_rows(keep_new: Bool[Array, "B H"], new: KVCache, old: KVCache) -> KVCache:
    """Takes what an update decided for some (row, head) pairs, and undoes it for the others."""

    def pick(a: Array, b: Array) -> Array:
        if a is b:
            return a
        return jnp.where(keep_new.reshape(keep_new.shape + (1,) * (a.ndim - 2)), a, b)

    return jax.tree.map(pick, new, old)


def update_if(
    due: Bool[Array, ""],
    update: Callable[[KVCache, State], tuple[KVCache, State]],
    cache: KVCache,
    state: State,
) -> tuple[KVCache, State]:
    """`update(cache, state)` where `due`, else both as they are.

    Only the arrays that the update changes pass through the conditional: keys and values that an
    evictor leaves alone would otherwise be copied at every step.
    """
    before, tree = jax.tree.flatten((cache, state))
    changed: list[bool] = []

    def probe(leaves: list[Array]) -> None:
        after = jax.tree.leaves(update(*jax.tree.unflatten(tree, leaves)))
        changed[:] = [a is not b for a, b in zip(after, leaves, strict=True)]

    def changed_leaves(leaves: list[Array]) -> list[Array]:
        after = jax.tree.leaves(update(*jax.tree.unflatten(tree, leaves)))
        return [a for a, c in zip(after, changed, strict=True) if c]

    jax.eval_shape(probe, before)
    unchanged = [b for b, c in zip(before, changed, strict=True) if c]
    after = iter(jax.lax.cond(due, changed_leaves, lambda _: unchanged, before))
    leaves = [next(after) if c else b for b, c in zip(before, changed, strict=True)]
    return jax.tree.unflatten(tree, leaves)
