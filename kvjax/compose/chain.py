"""Transforms one after the other."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from jaxtyping import Array

from kvjax.cache.slots import KVCache
from kvjax.compose.foreseen import frees_while_decoding
from kvjax.compose.wrappers import HeadGroups, by_head_groups
from kvjax.decisions import Changed, Decision, Mark, Retain, decide
from kvjax.protocol import (
    Extent,
    Full,
    KVTransform,
    Needs,
    Stage,
    State,
    Step,
    View,
    check_transform,
    selected_by,
    takes_part,
)
from kvjax.serialization import static_value


@static_value
@dataclass(frozen=True)
class Chain(KVTransform):
    """Transforms one after the other; made by `chain`, which flattens and says what can't work."""

    parts: tuple[KVTransform, ...]

    def __post_init__(self):
        _check_parts(self.parts)
        parts = (
            part.in_chain(self.parts[:number], self.parts[number + 1 :])
            for number, part in enumerate(self.parts)
        )
        object.__setattr__(self, "parts", tuple(parts))

    def for_layer(self, layer: int, num_layers: int) -> KVTransform:
        """Joins the parts for this layer; where one turns dense, only stored forms remain."""
        return joined_parts(part.for_layer(layer, num_layers) for part in self.parts)

    def extent(self, extent: Extent) -> Extent:
        """Composes the bounds of the parts."""
        for part in self.parts:
            extent = part.extent(extent)
        return extent

    @property
    def needs(self) -> Needs:
        """Union of what the parts need."""
        return functools.reduce(Needs.union, (part.needs for part in self.parts))

    @property
    def stage(self) -> Stage:  # pyright: ignore[reportIncompatibleVariableOverride]  # the base allows a property
        """Stage of the last part."""
        return self.parts[-1].stage

    def init(self, cache: KVCache, layer: int) -> tuple[KVCache, State]:
        """Makes every part's columns and state.

        Parts that select come first, since `Offload` asks how many rows a selection has.
        """
        states: list[State] = [()] * len(self.parts)
        order = sorted(range(len(self.parts)), key=lambda i: self.parts[i].stage != Stage.RECALL)
        for number in order:
            cache, states[number] = self.parts[number].init(cache, layer)
        return cache, tuple(states)

    def select(self, view: View, state: State, query: Array) -> tuple[View, State]:
        """Selects part by part, each within the selection of the one before."""
        states = []
        for part, part_state in zip(self.parts, state, strict=True):
            view, part_state = selected_by(part, view, part_state, query)
            states.append(part_state)
        return view, tuple(states)

    def on_prompt(self, cache: KVCache, state: State, step: Step) -> tuple[Decision | None, State]:
        """Joins the decisions of the parts into one, for wrappers around a chain.

        `attend` does not call it: it carries out the decisions of the parts one by one, since a
        part decides about what the parts before it have left. Where only one part decides, the
        decision is its own. `on_flush` and `on_step` do the same.
        """
        after, states, made = decide(self.parts, cache, state, step)
        if len(made) <= 1:
            return (made[0] if made else None), states
        if any(decision.rewrites or isinstance(decision, Mark) for decision in made):
            return Changed(after), states
        columns = {name: column.values for name, column in after.columns.items()}
        pinned = None if after.pinned is cache.pinned else after.pinned
        newest = made[-1].newest  # pyright: ignore[reportAttributeAccessIssue]  # it keeps
        return Retain(after.live, newest, pinned, columns=columns), states

    on_flush = on_step = on_prompt


def parts_of(transform: KVTransform) -> tuple[KVTransform, ...]:
    """Returns the parts of a chain, or the transform alone."""
    return transform.parts if isinstance(transform, Chain) else (transform,)


def states_of_parts(transform: KVTransform, state: State) -> tuple[State, ...]:
    """Returns the states of a chain's parts, or of the transform alone."""
    return state if isinstance(transform, Chain) else (state,)


def state_of_parts(transform: KVTransform, states: tuple[State, ...]) -> State:
    """Joins the states of parts into a chain's; one part has no chain, and keeps its own."""
    return states if isinstance(transform, Chain) else states[0]


def decide_parts(
    transform: KVTransform, kv: KVCache, state: State, step: Step
) -> tuple[KVCache, State]:
    """Carries out what a transform decides while decoding, part by part of a chain."""
    kv, states, _ = decide(parts_of(transform), kv, states_of_parts(transform, state), step)
    return kv, state_of_parts(transform, states)


def joined_parts(parts: Iterable[KVTransform]) -> KVTransform:
    """Joins the parts of a chain for one layer into one transform, head groups outside.

    Where a part is `Full`, only the form of storage remains.
    """
    parts = tuple(parts)
    if any(isinstance(part, Full) for part in parts):
        flat = [inner for part in parts for inner in parts_of(part)]
        return chain(*(part for part in flat if part.stage == Stage.REPRESENT))
    split = [part for part in parts if isinstance(part, HeadGroups)]
    if not split:
        return chain(*parts)
    if len(split) > 1:
        raise ValueError(f"a chain can split heads once, got {split[0]!r} and {split[1]!r}")
    wholes = (
        [inner if part is split[0] else part for part in parts]
        for inner in by_head_groups(split[0])
    )
    # A part that evicts for all heads stays as it is if no other part evicts.
    others = (part for part in parts if part is not split[0])
    alone = all(part.stage != Stage.EVICT for part in others)
    return split[0].with_transforms(map(joined_parts, wholes), split[0].whole if alone else None)


def chain(*transforms: KVTransform) -> KVTransform:
    """Applies transforms one after the other: evict or merge → represent → recall → place.

    Nested chains are flattened and `Full` parts drop out, so that equal chains are equal values.
    Each part says how it works beside the others (`KVTransform.in_chain`): `Quantize` groups keys
    of 4 bits within a token where groups of slots would come apart in every further turn.

    Args:
      transforms: the parts, in the order in which they act.

    Returns:
      The composition; a single part by itself, and `Full` where no part is left.

    Raises:
      TypeError: a part is not a transform.
      ValueError: the order cannot work, or a recall method would index slots that an earlier part
        frees while decoding.

    Example:
      >>> import kvjax
      >>> tx = kvjax.chain(kvjax.SnapKV(budget=768), kvjax.H2O(budget=512))
      >>> tx.extent(kvjax.kit.Extent(prompt=4096, new=64)).total
      513
    """
    parts: list[KVTransform] = []
    for transform in transforms:
        check_transform(transform, "chain")
        parts.extend(parts_of(transform))
    parts = [part for part in parts if not isinstance(part, Full)]
    if len(parts) == 1:
        return parts[0]
    return Chain(tuple(parts)) if parts else Full()


def _check_parts(parts: tuple[KVTransform, ...]) -> None:
    """Raises ValueError where the stages of these parts cannot follow each other."""
    for before, after in itertools.pairwise(parts):
        if after.stage < before.stage:
            raise ValueError(
                "a chain goes evict or merge → represent → recall → place: "
                f"{after!r} ({after.stage.name.lower()}) cannot follow "
                f"{before!r} ({before.stage.name.lower()})"
            )
    evicting, storing, reading, placing = (
        [part for part in parts if part.stage == stage] for stage in Stage
    )
    indexes = [part for part in reading if takes_part(part, "prompt")]
    alone = (("indexes all slots", indexes), ("changes how keys and values are stored", storing))
    for what, several in alone:
        if len(several) > 1:
            raise ValueError(
                f"at most one part of a chain {what}, got {several[0]!r} and {several[1]!r}"
            )
    if placing and (len(placing) > 1 or not indexes):
        raise ValueError(
            f"{placing[0]!r} stands once in a chain, behind a method that indexes all slots "
            f"(ClusterKV, Quest, InfiniGen), got {parts!r}"
        )
    late = [part for part in parts if part.needs.unrotated_keys]
    if indexes and late:
        raise ValueError(
            f"{indexes[0]!r} selects by keys as they are stored, and {late[0]!r} stores them "
            "unrotated"
        )
    for before, after in itertools.product(evicting, reading):
        if frees_while_decoding(before):
            raise ValueError(
                f"{after!r} indexes the slots of the prompt, and {before!r} frees slots while "
                "decoding: the index would go stale. Put a method that compresses only the prompt "
                "first"
            )
