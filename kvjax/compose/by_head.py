"""Budgets by head: one budget, shared among all heads of a model by a profile of it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
from jaxtyping import Float

from kvjax.budgets.heads import HeadShares
from kvjax.budgets.profile import SAFEGUARD, layouts, shares
from kvjax.cache.slots import KVCache
from kvjax.checks import check_part
from kvjax.compose.chain import chain, parts_of
from kvjax.compose.foreseen import foreseen
from kvjax.compose.walks import MethodHeads, map_methods, walk
from kvjax.compose.wrappers import HeadGroups, LayerChoice
from kvjax.messages import brief
from kvjax.protocol import Card, Extent, KVTransform, Needs, Stage, check_transform
from kvjax.serialization import static_value

_TOKENS = 10_000  # of which rectangles are made: shares are rounded to such parts


@static_value
@dataclass(frozen=True, eq=False)
class HeadProfile:
    """Shares of the heads of a model, for all budgets: `calibrate_heads` makes it.

    Profiles with equal numbers are equal, and they are hashable.

    Args:
      table: share of its tokens that each head keeps, for growing budgets, `[layers, KV heads,
        steps]`; see `kvjax.budgets.profile`. It is kept in float32.
      method: text form of the method whose scores it comes from, without its budget.

    Raises:
      ValueError: a table that is no profile.
    """

    table: Float[np.ndarray, "N H K"]
    method: str
    _digest: bytes = field(init=False, repr=False)

    def __post_init__(self):
        table = np.array(self.table, np.float32)
        shares(table, 1.0)  # raises where it is no profile
        table.setflags(write=False)
        digest = hashlib.sha256(repr((table.shape, self.method)).encode() + table.tobytes())
        object.__setattr__(self, "table", table)
        object.__setattr__(self, "_digest", digest.digest())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeadProfile) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        layers, heads, _ = self.table.shape
        numbers = f"layers={layers}, kv_heads={heads}, id={self._digest.hex()[:8]}"
        return f"HeadProfile({self.method!r}, {numbers})"


@dataclass(frozen=True)
class ByHead(LayerChoice):
    """Shares the budget of a method among all heads of all layers, by a profile of the model.

    All heads get a part of the budget alike, `safeguard`, and the rest as the profile shares it at
    this budget; the mean of all heads is the budget. Each layer stores its heads in up to three
    rectangles of slots, so that heads that need little really take little memory. Layers share a
    few layouts of rectangles.

    Args:
      base: a method with a budget that is a share, or a chain with one such method.
      profile: of the model that the transform is for, from `kvjax.calibrate_heads` or
        `kvjax.load_profile`; or the path of its file. None, or a path: `kvjax.calibrated` finds it.
      safeguard: part of the budget that all heads get alike, from 0 to 1; 0.2. Without it, heads
        that the profile hardly counts would have no token but sinks, and answers suffer.

    Raises:
      TypeError: no transform, no profile, or a safeguard that is no number.
      ValueError: no method, or several, whose budget is a share; a safeguard outside [0, 1].

    Example:
      >>> import kvjax, numpy as np
      >>> table = np.array([[[0.8, 1.0], [0.0, 1.0]], [[0.2, 1.0], [0.4, 1.0]]])
      >>> tx = kvjax.ByHead(kvjax.KVzip(0.35), kvjax.HeadProfile(table, "kvzip"))
      >>> caches = [
      ...     kvjax.init_cache(layer, batch=1, kv_heads=2, head_dim=4, max_prompt=2000, max_new=0,
      ...                      layer=i) for i, layer in enumerate(kvjax.bind(tx, 2))]
      >>> [[(part.heads.tolist(), part.kv.slots - 256) for part in cache] for cache in caches]
      [[([0], 1420), ([1], 140)], [([1], 780), ([0], 460)]]

    References:
      Kim et al., KVzip, arXiv 2505.23416, shares a budget among heads for each document anew;
      Feng et al., Ada-KV, arXiv 2407.11550, for the safeguard.
    """

    base: KVTransform
    profile: HeadProfile | str | None = None
    safeguard: float = SAFEGUARD

    card = Card(acts="prompt", when="facts")
    stage = property(lambda self: self.base.stage)

    def __post_init__(self):
        check_transform(self.base, "ByHead")
        if not isinstance(self.profile, HeadProfile | str | None):
            raise TypeError(
                f"profile must be a kvjax.HeadProfile or the path of one, got {brief(self.profile)}"
            )
        check_part("safeguard", self.safeguard)
        _ = self.method  # raises where there is none
        try:
            whole = map_methods(_WithShares(((1.0,),), (0,)), self.base)
            # What stands behind may need a calibration, which comes with the profile.
            foreseen(chain(*(x for x in parts_of(whole) if x.stage == Stage.EVICT)), "prompt")
        except TypeError as error:
            raise ValueError(
                "ByHead takes a method that compresses prompts and takes a budget for each head, "
                f"such as KVzip and SnapKV, got {brief(self.base)}"
            ) from error

    @property
    def method(self) -> KVTransform:
        """The method whose budget is shared."""
        shared = [part for part in walk(self.base) if _has_share(part)]
        if len(shared) != 1:
            raise ValueError(
                "ByHead takes one method whose budget is a share of the tokens, such as 0.05, got "
                f"{brief(self.base)}"
            )
        return shared[0]

    @property
    def needs(self) -> Needs:
        """Needs of the base."""
        return self.base.needs

    def extent(self, extent: Extent) -> Extent:
        """Bounds slots as the base does, on average over the heads."""
        return self.base.extent(extent)

    def chosen(self, layer: int, num_layers: int) -> KVTransform:
        """Returns a layer's head groups, or itself without a profile.

        Raises:
          ValueError: the profile is of another number of layers.
        """
        if not isinstance(self.profile, HeadProfile):
            return self
        layers = len(self.profile.table)
        if num_layers != layers:
            raise ValueError(f"the profile is of {layers} layers, got a model of {num_layers}")
        return _by_layer(self)[layer]

    def init(self, cache: KVCache, layer: int) -> NoReturn:
        """Raises ValueError: there is no profile."""
        raise ValueError(
            f"{brief(self)} needs a profile of the model: kvjax.calibrated gives it one, or "
            "kvjax.calibrate_heads makes it"
        )


@functools.lru_cache(maxsize=8)
def _by_layer(transform: ByHead) -> tuple[KVTransform, ...]:
    """Returns the head groups of every layer."""
    budget = transform.method.budget  # pyright: ignore[reportAttributeAccessIssue]
    each = shares(transform.profile.table, budget, transform.safeguard)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    ranks = np.argsort(-each, axis=1, kind="stable")
    order = tuple(tuple(map(int, heads)) for heads in ranks)
    all_shares = tuple(
        tuple(float(each[layer, head]) for head in heads) for layer, heads in enumerate(order)
    )
    for_all = map_methods(_WithShares(all_shares, tuple(range(len(each)))), transform.base)
    whole = chain(*(part for part in parts_of(for_all) if part.stage == Stage.EVICT))
    if any(part.card.couples_heads for part in walk(whole)):  # each rectangle decides for its heads
        whole = None
    transforms: dict[int, KVTransform] = {}
    for layout in layouts(each, _TOKENS):
        groups = []
        for heads, _ in layout.rectangles:
            of_layers = tuple(
                tuple(float(each[layer, ranks[layer, rank]]) for rank in heads)
                for layer in layout.layers
            )
            with_shares = _WithShares(of_layers, layout.layers)
            groups.append((heads, map_methods(with_shares, transform.base)))
        transforms |= dict.fromkeys(layout.layers, HeadGroups(tuple(groups), order, whole))
    return tuple(transforms[layer] for layer in range(len(each)))


@dataclass(frozen=True)
class _WithShares:
    """Replaces the budget of a method; a function for `map_methods`."""

    shares: tuple[tuple[float, ...], ...]
    layers: tuple[int, ...]

    def __call__(self, method: KVTransform, heads: MethodHeads) -> KVTransform:
        if not _has_share(method):
            return method
        minimum, shared = method.minimum, float(method.budget)  # pyright: ignore[reportAttributeAccessIssue]
        budget = HeadShares(self.shares, self.layers, minimum, shared)
        return dataclasses.replace(method, budget=budget)


def _has_share(method: KVTransform) -> bool:
    budget = getattr(method, "budget", None)
    return method.stage == Stage.EVICT and isinstance(budget, float | np.floating)
