"""Decisions of methods, as values that the library carries out.

A transform's `on_prompt`, `on_flush` and `on_step` return one of these or None. Wrappers such as
`CaM` and `KVCrush` see the decision of the method that they go around and return another one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args, get_type_hints

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.rearrange import merge, permute
from kvjax.cache.remainders import exact_values, write_values
from kvjax.cache.selection import evict_worst, evictable, keep_best, newest
from kvjax.cache.slots import KVCache, evict
from kvjax.devices import all_heads
from kvjax.protocol import GroupReduce, KVTransform, State, Step, check_made, decided_by

Rows = Bool[Array, " B"] | Bool[Array, "B H"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Decision:
    """Base of what a method may decide: `Keep`, `Retain`, `Merge`, `Order` and `Mark`.

    A method returns a decision, and the library carries it out. Decisions are pytrees, so that
    `foreseen` can have them without numbers.

    Args:
      columns: new values of the method's own columns, `[B, H, S, ...]` each, by name.
      rows: the rows, or rows and KV heads, that it concerns; None: all.

    Class attributes:
      rewrites: whether slots come to have other keys or values.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> keep = kvjax.kit.Keep(budget=jnp.array([4, 4]), score=None, newest_first=True)
      >>> isinstance(keep, kvjax.kit.Decision)
      True
      >>> keep.concerning(jnp.array([True, False])).rows.tolist()  # the second row stays as it is
      [True, False]
    """

    columns: dict[str, Array] = field(default_factory=dict)
    rows: Rows | None = None

    rewrites: ClassVar[Any] = False  # a bool, or a property of one

    def concerning(self, rows: Rows) -> Decision:
        """Returns the decision, limited to these rows, or rows and KV heads."""
        if self.rows is not None:
            before, rows = (x.reshape(x.shape[0], -1) for x in (self.rows, rows))
            rows = before & rows
        return dataclasses.replace(self, rows=rows)

    def concerned(self) -> Bool[Array, "B N 1"]:
        """Marks the slots that it concerns."""
        if self.rows is None:
            return jnp.ones((1, 1, 1), bool)
        return self.rows.reshape(self.rows.shape[0], -1, 1)

    def check(self, cache: KVCache, whose: str) -> None:
        """Raises TypeError or ValueError where a field is not the array that its annotation says.

        Args:
          whose: the member of a method that has made the decision.
        """
        batch, heads, slots = cache.shape
        sizes = {"B": batch, "H": heads, "Q": heads * cache.group, "S": slots}
        for name, kinds in _annotations(type(self)).items():
            value = getattr(self, name)
            if any(_is_of(kind, value, sizes) for kind in kinds):
                continue
            shown = f"{value!r:.40}"
            if hasattr(value, "shape"):
                shown = f"{value.dtype} of shape {tuple(value.shape)}"
            expected = " or ".join(_shown(kind) for kind in kinds if kind is not type(None))
            used = ", ".join(f"{x} = {n}" for x, n in sizes.items() if x in expected)
            raise (ValueError if hasattr(value, "shape") else TypeError)(
                f"{whose}: {name} of {type(self).__name__} must be {expected} with {used}, "
                f"got {shown}"
            )

    def apply(self, cache: KVCache, step: Step) -> KVCache:
        """Returns the cache after the decision; its columns are set already."""
        return cache


@functools.cache
def _annotations(decision: type[Decision]) -> dict[str, tuple[Any, ...]]:
    """Returns what each field of a decision that holds an array may be."""
    kinds = {x: get_args(hint) or (hint,) for x, hint in get_type_hints(decision).items()}
    return {x: of for x, of in kinds.items() if any(hasattr(kind, "dim_str") for kind in of)}


def _is_of(kind: Any, value: Any, sizes: dict[str, int]) -> bool:
    """Tells whether a value is of one kind; letters without a size stand for any number."""
    if not hasattr(kind, "dim_str"):
        return isinstance(value, kind)
    shape, axes = getattr(value, "shape", ()), kind.dim_str.split()
    return (
        len(shape) == len(axes)
        and value.dtype.name in kind.dtypes
        and all(sizes.get(axis, size) == size for axis, size in zip(axes, shape, strict=True))
    )


def _shown(kind: Any) -> str:
    """Returns how a message calls a kind, such as `Float [B, H, S]`."""
    if not hasattr(kind, "dim_str"):
        return kind.__name__
    return f"{kind.dtype.__name__} [{', '.join(kind.dim_str.split())}]"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mark(Decision):
    """Nothing but new values of the method's own columns.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> list(kvjax.kit.Mark(columns={"score": jnp.zeros((1, 2, 16))}).columns)
      ['score']
    """

    columns: dict[str, Array]  # pyright: ignore[reportGeneralTypeIssues]  # required here


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Keep(Decision):
    """Keep the best tokens and evict the others.

    Pinned slots stay, in addition to the budget. Tokens that always stay come first, then those
    with the highest score; ties go to the lower position, and NaN counts as the lowest score.

    Args:
      budget: number of tokens to keep, for each row, or for each row and KV head.
      score: importance of each slot, per query head `[B, Q, S]` or per KV head `[B, H, S]`; None
        with `newest_first`.
      always: whether each slot stays whatever its score, such as sinks; None: none does.
      newest: number of each row's newest positions that stay whatever their score, an int for all
        rows; None: 0.
      reduce: how the scores of query heads become one of their KV head (static). `"layer"` takes
        the mean over them, and then over all KV heads of a row that hold the same tokens.
      newest_first: whether newer tokens are more important, in place of a score (static).

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> score = jnp.array([[[0.1, 0.5, 0.3]]])
      >>> kvjax.kit.Keep(budget=jnp.array([2]), score=score).reduce
      'mean'
    """

    budget: Int[Array, " B"] | Int[Array, "B H"]
    score: Float[Array, "B Q S"] | Float[Array, "B H S"] | None
    always: Bool[Array, "B H S"] | None = None
    newest: Int[Array, " B"] | int | None = None
    reduce: GroupReduce | Literal["layer"] = field(default="mean", metadata={"static": True})
    newest_first: bool = field(default=False, metadata={"static": True})

    def check(self, cache: KVCache, whose: str) -> None:
        """Raises TypeError or ValueError where a field does not fit the cache."""
        if (self.score is None) != self.newest_first:
            raise TypeError(
                f"{whose}: Keep takes a score or newest_first=True, got {self.score!r:.40} and "
                f"newest_first={self.newest_first}; what a step does not have at a moment is None"
            )
        super().check(cache, whose)

    def stays(self, cache: KVCache) -> Bool[Array, "B H S"]:
        """Live tokens that stay whatever their score."""
        stays = cache.pinned
        if self.always is not None:
            stays |= self.always
        if self.newest is not None:
            stays |= newest(cache, self.newest)
        return stays & cache.live

    def head_score(self, cache: KVCache) -> Float[Array, "B H S"]:
        """One score per slot and KV head; NaN is the lowest."""
        if self.newest_first:
            return cache.position.astype(jnp.float32)
        score = self.score.astype(jnp.float32)  # pyright: ignore[reportOptionalMemberAccess]  # as `check` demands
        if self.reduce == "layer":
            score = over_heads(group_scores(score, cache, "mean"), cache)
        elif score.shape[1] != cache.shape[1]:
            score = group_scores(score, cache, self.reduce)
        return jnp.where(jnp.isnan(score), -jnp.inf, score)

    def kept(self, cache: KVCache) -> Bool[Array, "B H S"]:
        """The live tokens that are kept."""
        score = jnp.where(self.stays(cache), jnp.inf, self.head_score(cache))
        best = keep_best(score, evictable(cache), cache.position, self.budget)
        return cache.live & (best | cache.pinned | ~self.concerned())

    def apply(self, cache: KVCache, step: Step) -> KVCache:
        """Returns the cache with the other tokens evicted."""
        if step.moment != "step":
            return evict(cache, self.kept(cache))
        # At most one token is over the budget: three reductions in place of a ranking.
        others = evictable(cache) & ~self.stays(cache) & self.concerned()
        return evict_worst(cache, self.head_score(cache), others, self.budget)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Retain(Decision):
    """Keep just these tokens and evict the others.

    Args:
      keep: whether each slot's token stays.
      newest: number of each row's newest positions that `keep` always holds, an int for all rows;
        None: it is not known.
      pinned: whether each slot is pinned afterwards. None: pinned slots stay, whatever `keep` says,
        and stay pinned.
      values: new values of all slots; None: values stay as they are. A method that adds to them
        while decoding says `Needs.writes_values`, and adds to `exact_values`.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> keep = jnp.arange(4) % 2 == 0
      >>> kvjax.kit.Retain(keep=keep[None, None]).keep.tolist()
      [[[True, False, True, False]]]
    """

    keep: Bool[Array, "B H S"]
    newest: Int[Array, " B"] | int | None = None
    pinned: Bool[Array, "B H S"] | None = None
    values: Float[Array, "B H S D"] | None = None

    rewrites = property(lambda self: self.values is not None)

    def kept(self, cache: KVCache) -> Bool[Array, "B H S"]:
        """The live tokens that are kept."""
        keep = self.keep | cache.pinned if self.pinned is None else self.keep
        return cache.live & (keep | ~self.concerned())

    def apply(self, cache: KVCache, step: Step) -> KVCache:
        """Returns the cache with the other tokens evicted, and with new values."""
        kept, concerned = self.kept(cache), self.concerned()
        if self.values is not None:
            old, new = (x.astype(jnp.float32) for x in (exact_values(cache), self.values))
            cache = write_values(cache, jnp.where(concerned[..., None], new, old))
        if self.pinned is not None:
            pinned = jnp.where(concerned, self.pinned, cache.pinned)
            cache = cache.replace(pinned=pinned & kept)
        return evict(cache, kept)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Merge(Decision):
    """Merge slots: see `kvjax.kit.merge`.

    Args:
      into: target slot of every slot, itself if it stays.
      weights: of the members in the means; None: their masses.
      value_scale: `"log_mass"`: a merged slot's mass is the sum of its members'. `"paper"`: its
        values are multiplied by that sum instead, and its mass is 1. `"none"`: neither.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> kvjax.kit.Merge(into=jnp.array([[[1, 1, 2]]])).value_scale  # slot 0 goes into slot 1
      'log_mass'
    """

    into: Int[Array, "B H S"]
    weights: Float[Array, "B H S"] | None = None
    value_scale: Literal["log_mass", "paper", "none"] = field(
        default="log_mass", metadata={"static": True}
    )

    rewrites: ClassVar[bool] = True

    def apply(self, cache: KVCache, step: Step) -> KVCache:
        """Returns the cache with merged slots."""
        slot = jax.lax.broadcasted_iota(jnp.int32, self.into.shape, 2)
        into = jnp.where(self.concerned(), self.into, slot)
        merged = merge(cache, into, self.weights, implementation=step.implementation)
        if self.value_scale == "log_mass":
            return merged
        changed = merged.live & (merged.log_mass != cache.log_mass)
        tokens = jnp.where(changed, jnp.exp(merged.log_mass), 1.0)
        merged = merged.replace(log_mass=jnp.where(changed, 0.0, merged.log_mass))
        if self.value_scale == "none":
            return merged
        values = exact_values(merged).astype(jnp.float32)
        return write_values(merged, values * tokens[..., None])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Order(Decision):
    """Put slots into another order: slot `slots[n]` becomes what slot `source[n]` was.

    Args:
      source: a set of N slots, each once.
      slots: the same set in another order, S for none; None: `0 ... S - 1`, all of them.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> kvjax.kit.Order(source=jnp.array([[[2, 0, 1]]])).source.shape  # slot 0 gets slot 2
      (1, 1, 3)
    """

    source: Int[Array, "B H N"]
    slots: Int[Array, "B H N"] | None = None

    rewrites: ClassVar[bool] = True

    def apply(self, cache: KVCache, step: Step) -> KVCache:
        """Returns the cache with its slots in that order."""
        return permute(cache, self.source, self.slots)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Changed(Decision):
    """A cache in which several decisions have been carried out one after the other.

    Args:
      cache: the cache afterwards.
    """

    cache: KVCache

    rewrites: ClassVar[bool] = True

    def apply(self, cache: KVCache, step: Step) -> KVCache:
        """Returns that cache, of which all columns can be read that could before."""
        return self.cache.replace(withheld=cache.withheld)


def carry_out(decision: Decision, cache: KVCache, step: Step) -> KVCache:
    """The cache after a decision, of which only `step.rows` are concerned."""
    rows = step.rows
    if decision.rewrites and step.output is not None:
        # XLA goes by data alone: what attention reads and a decision overwrites, in no order that
        # the data tells, it copies at every step. No number is above infinity, which XLA does not
        # know, so these are the same rows, known once attention is.
        rows &= ~(step.output.max() > jnp.inf)
    decision = decision.concerning(rows)
    concerned = decision.concerned()
    for name, values in decision.columns.items():
        old = cache.columns[name].values
        which = concerned.reshape(*concerned.shape, *(1,) * (old.ndim - 3))
        cache = cache.with_column(name, jnp.where(which, values, old))
    return decision.apply(cache, step)


def made_by(
    transform: KVTransform, cache: KVCache, state: State, step: Step
) -> tuple[Decision | None, State]:
    """A transform's decision at the moment of a step, and its state.

    Raises:
      TypeError: it has returned something else, or reads what its `needs` do not ask for.
    """
    made = decided_by(transform, cache, state, step)
    whose = f"{type(transform).__name__}.on_{step.moment}"
    check_made(
        made, Decision | None, whose, "a decision (Keep, Retain, Merge, Order, Mark or None)"
    )
    if made[0] is not None:
        made[0].check(cache, whose)
    return made


def decide(
    transforms: Sequence[KVTransform], cache: KVCache, states: Sequence[State], step: Step
) -> tuple[KVCache, tuple[State, ...], list[Decision]]:
    """Carries out what transforms decide at the moment of a step, one after the other.

    Returns:
      The cache, the transforms' states, and what was decided.
    """
    after, made = [], []
    for transform, state in zip(transforms, states, strict=True):
        decision, state = made_by(transform, cache, state, step)
        after.append(state)
        if decision is not None:
            cache = carry_out(decision, cache, step)
            made.append(decision)
    return cache, tuple(after), made


def group_scores(
    scores: Float[Array, "B Q S"], cache: KVCache, reduce: GroupReduce
) -> Float[Array, "B H S"]:
    """Makes one score per KV head from those of its group's query heads.

    Args:
      scores: score of each slot, per query head.
      cache: the cache of one layer, which knows how many query heads a group has.
      reduce: `"mean"`, `"max"` or `"sum"` over the group.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> cache = kvjax.init_cache(kvjax.Full(), batch=1, kv_heads=1, query_heads=2, head_dim=4,
      ...                          max_prompt=2, max_new=0).kv
      >>> scores = jnp.array([[[1.0, 3.0], [2.0, 0.0]]])
      >>> kvjax.kit.group_scores(scores, cache, "max").tolist()
      [[[2.0, 3.0]]]
    """
    grouped = scores.reshape(*cache.shape[:2], cache.group, -1)
    return {"mean": jnp.mean, "max": jnp.max, "sum": jnp.sum}[reduce](grouped, axis=2)


def over_heads(score: Float[Array, "B H S"], cache: KVCache) -> Float[Array, "B H S"]:
    """The mean over all KV heads of a row whose slots hold the same tokens in each."""
    first = all_heads(cache.position[:, :1], cache.heads // cache.shape[1])[:, :1]
    same = all_heads((cache.position == first).all(2), cache.heads).all(1)[:, None, None]
    mean = all_heads(score, cache.heads).mean(1, keepdims=True)
    return jnp.where(same, mean, score)
