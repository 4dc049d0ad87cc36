"""Budgets by head: one budget, shared among all heads of a model by a profile of it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from kvjax.budgets.heads import HeadShares
from kvjax.budgets.profile import layouts, shares
from kvjax.compose.walks import map_methods, walk
from kvjax.compose.wrappers import HeadGroups, PerLayer
from kvjax.messages import brief
from kvjax.protocol import KVTransform, Stage, check_transform

_TOKENS = 10_000  # of which rectangles are made: shares are rounded to such parts


@dataclass(frozen=True, eq=False)
class HeadProfile:
    """Shares of the heads of a model, for all budgets: `calibrate_heads` makes it.

    Profiles with equal numbers are equal, and they are hashable.

    Args:
      table: share of its tokens that each head keeps, for growing budgets, `[layers, KV heads,
        steps]`; see `kvjax.budgets.profile`.
      method: text form of the method whose scores it comes from.

    Raises:
      ValueError: a table that is no profile.
    """

    table: Float[np.ndarray, "N H K"]
    method: str
    _digest: bytes = field(init=False, repr=False)

    def __post_init__(self):
        table = np.array(self.table, np.float64)
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


def by_head(base: KVTransform, profile: HeadProfile) -> PerLayer:
    """Shares the budget of a method among all heads of all layers, by a profile of the model.

    A head keeps the share of its tokens that the profile gives it at this budget; the mean of all
    heads is the budget. Each layer stores its heads in up to three rectangles of slots, so that
    heads that need little really take little memory. Layers share four layouts at most.

    Args:
      base: a method with a budget that is a share, or a chain with one such method.
      profile: of the model that the transform is for.

    Raises:
      TypeError: no transform, or no profile.
      ValueError: no method, or several, whose budget is a share.

    Example:
      >>> import kvjax, numpy as np
      >>> table = np.array([[[0.8, 1.0], [0.0, 1.0]], [[0.2, 1.0], [0.4, 1.0]]])
      >>> tx = kvjax.by_head(kvjax.KVzip(0.35), kvjax.HeadProfile(table, "kvzip"))
      >>> caches = [
      ...     kvjax.init_cache(layer, batch=1, kv_heads=2, head_dim=4, max_prompt=100, max_new=0,
      ...                      layer=i) for i, layer in enumerate(kvjax.bind(tx, 2))]
      >>> [[(part.heads.tolist(), part.kv.slots) for part in cache] for cache in caches]
      [[([0], 100), ([1], 100)], [([1], 100), ([0], 100)]]
    """
    check_transform(base, "by_head")
    if not isinstance(profile, HeadProfile):
        raise TypeError(f"by_head needs a HeadProfile of the model, got {brief(profile)}")
    shared = [part for part in walk(base) if _has_share(part)]
    if len(shared) != 1:
        raise ValueError(
            f"by_head takes one method whose budget is a share of the tokens, got {brief(base)}"
        )
    return PerLayer(_HeadChoice(base, profile, shared[0].budget))


@dataclass(frozen=True)
class _HeadChoice:
    """Function of a `PerLayer` that gives each layer its head groups."""

    base: KVTransform
    profile: HeadProfile
    budget: float

    def __call__(self, layer: int, num_layers: int) -> KVTransform:
        layers = len(self.profile.table)
        if num_layers != layers:
            raise ValueError(f"the profile is of {layers} layers, got a model of {num_layers}")
        return _by_layer(self.base, self.profile, self.budget)[layer]


@functools.lru_cache(maxsize=8)
def _by_layer(base: KVTransform, profile: HeadProfile, budget: float) -> tuple[KVTransform, ...]:
    """Returns the transform of every layer."""
    each = shares(profile.table, budget)
    ranks = np.argsort(-each, axis=1, kind="stable")
    order = tuple(tuple(map(int, heads)) for heads in ranks)
    transforms: dict[int, KVTransform] = {}
    for layout in layouts(each, _TOKENS):
        groups = []
        for heads, _ in layout.rectangles:
            of_layers = tuple(
                tuple(float(each[layer, ranks[layer, rank]]) for rank in heads)
                for layer in layout.layers
            )
            groups.append((heads, map_methods(_WithShares(of_layers, layout.layers), base)))
        transforms |= dict.fromkeys(layout.layers, HeadGroups(tuple(groups), order))
    return tuple(transforms[layer] for layer in range(len(each)))


@dataclass(frozen=True)
class _WithShares:
    """Replaces the budget of a method; a function for `map_methods`."""

    shares: tuple[tuple[float, ...], ...]
    layers: tuple[int, ...]

    def __call__(self, method: KVTransform, heads: tuple[int, ...] | None) -> KVTransform:
        if not _has_share(method):
            return method
        budget = HeadShares(self.shares, self.layers, method.minimum)
        return dataclasses.replace(method, budget=budget)


def _has_share(method: KVTransform) -> bool:
    budget = getattr(method, "budget", None)
    return method.stage == Stage.EVICT and isinstance(budget, float | np.floating)
