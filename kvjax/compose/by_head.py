"""Budgets by head: one budget, shared among all heads of a model by a profile of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np
from jaxtyping import Array, Float

from kvjax.budgets.heads import HeadShares
from kvjax.budgets.profile import SAFEGUARD, ladder, layouts, profile, shares
from kvjax.cache.slots import KVCache
from kvjax.calibration import Calibration, Learner
from kvjax.checks import check_part
from kvjax.compose.chain import chain, parts_of
from kvjax.compose.foreseen import foreseen
from kvjax.compose.walks import map_methods, walk
from kvjax.compose.wrappers import HeadGroups, LayerChoice
from kvjax.decisions import made_by
from kvjax.messages import brief
from kvjax.protocol import (
    Card,
    Extent,
    KVTransform,
    MethodHeads,
    Needs,
    Stage,
    State,
    Step,
    check_transform,
)
from kvjax.serialization import named

_TOKENS = 10_000  # of which rectangles are made: shares are rounded to such parts


@dataclass(frozen=True)
class HeadProfile(Calibration):
    """Shares of a budget that the heads of a model need, for all budgets at once.

    The model reads each text of a sample of a thousand tokens or more, and the method scores its
    tokens. The scores of all heads of all layers together make a ladder of thresholds. A head's
    share at a threshold is the part of its tokens that has higher scores, averaged over the texts;
    see `kvjax.budgets.profile`.

    Layers with sliding windows hold their windows, whatever the method does elsewhere (`bind`). So
    the layers without one share the budget; heads of the others get the mean share, for texts that
    are no longer than a window.

    Args:
      table: share of its tokens that each head keeps, for growing budgets, `[layers, KV heads,
        steps]`; see `kvjax.budgets.profile`.

    Raises:
      ValueError: the table is not a profile of heads.

    Example:
      >>> import kvjax, numpy as np
      >>> table = np.array([[[0.8, 1.0], [0.0, 1.0]], [[0.2, 1.0], [0.4, 1.0]]])
      >>> kvjax.kit.HeadProfile(table).table.shape  # 2 layers, 2 KV heads, 2 steps
      (2, 2, 2)
    """

    table: Float[np.ndarray, "N H K"]

    def __post_init__(self):
        super().__post_init__()
        shares(self.table, 1.0)  # raises where it is not a profile


@named("by_head")
@dataclass(frozen=True)
class ByHead(LayerChoice, Learner):
    """Shares the budget of a method among all heads of all layers, by a profile of the model.

    The part `safeguard` of the budget goes to all heads alike, and the rest as the profile shares
    it at this budget; the mean of all heads is the budget. Each layer stores its heads in up to
    three rectangles of slots, so that heads that need little really take little memory. Layers
    share a few layouts of rectangles.

    Args:
      base: a method with a budget that is a share, or a chain with one such method.
      profile: of the model that the transform is for, or the path of its file. None:
        `kvjax.calibrated` makes it, or finds it in the user's cache.
      safeguard: part of the budget that all heads get alike, from 0 to 1; 0.2. Without it, heads
        to which the profile gives next to nothing would keep only sinks, and answers suffer.

    Raises:
      TypeError: `base` is not a transform, `profile` is not a profile, or `safeguard` is not a
        number.
      ValueError: `base` does not hold exactly one method whose budget is a share, or `safeguard`
        is outside [0, 1].

    Example:
      >>> import kvjax, numpy as np
      >>> table = np.array([[[0.8, 1.0], [0.0, 1.0]], [[0.2, 1.0], [0.4, 1.0]]])
      >>> tx = kvjax.ByHead(kvjax.KVzip(0.35), kvjax.kit.HeadProfile(table))
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

    learns = ("profile", HeadProfile)
    kept: ClassVar[bool] = True
    card = Card(
        acts="prompt", when="document", unscored=("safeguard",),
        examples=(
            '--method "by_head(chain(own_queries, quantize(bits=2, key_bits=4)))" --budget 0.25',
        ),
    )  # fmt: skip
    stage = property(lambda self: self.base.stage)

    def __post_init__(self):
        check_transform(self.base, "ByHead")
        self.check_learned()
        check_part("safeguard", self.safeguard)
        _ = self.method  # raises where there is none
        try:
            whole = map_methods(_WithShares(((1.0,),), (0,)), self.base)
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

    def source(self) -> KVTransform:
        """Returns this around the method alone by whose scores heads share."""
        return dataclasses.replace(self, base=self._profiled)

    @property
    def _profiled(self) -> KVTransform:
        method = self.method
        other: Any = method.card.profiled_by
        return method if other is None else other(method.budget)  # pyright: ignore[reportAttributeAccessIssue]

    def planned(self, model: Any) -> KVTransform:
        """Returns the base: all heads have the mean share."""
        return self.base

    def reader(self, model: Any, lengths: Sequence[int]) -> KVTransform:
        """Returns the method that scores, if the model has layers without a sliding window."""
        if model.windows and None not in model.windows:
            raise ValueError(
                "a profile of heads needs layers without a sliding window, since only they hold "
                f"more than a window, got windows of {brief(model.windows)}"
            )
        if getattr(foreseen(self._profiled, "prompt"), "score", None) is None:
            raise ValueError(
                f"a profile of heads needs a method that scores tokens, got {brief(self.method)}"
            )
        return self._profiled

    def observe(self, reader: KVTransform, cache: KVCache, state: State, step: Step) -> Array:
        """Returns the scores by which the method would keep the tokens, `[H, S]`."""
        decision: Any = made_by(reader, cache, state, step)[0]
        # Slots are filled in the order of tokens, and there are some for tokens that did not come.
        return decision.head_score(cache)[0, :, : cache.max_prompt]

    def learn(self, model: Any, observed: Sequence[Sequence[Any]]) -> HeadProfile:
        """Makes the profile of the scores of all texts."""
        windows = model.windows or (None,) * model.num_layers
        whole = np.array([window is None for window in windows])
        scores = [np.stack(text)[whole] for text in observed]
        of_whole = profile(scores, ladder(scores))
        table = np.tile(of_whole.mean((0, 1)), (model.num_layers, model.kv_heads, 1))
        table[whole] = of_whole
        return HeadProfile(table)

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
        self.profile.check_model(num_layers)
        return _by_layer(self)[layer]

    def init(self, cache: KVCache, layer: int) -> NoReturn:
        """Raises ValueError: there is no profile."""
        raise self.unlearned()


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
        minimum = method.minimum  # pyright: ignore[reportAttributeAccessIssue]
        return dataclasses.replace(method, budget=HeadShares(self.shares, self.layers, minimum))


def _has_share(method: KVTransform) -> bool:
    budget = getattr(method, "budget", None)
    return method.stage == Stage.EVICT and isinstance(budget, float | np.floating)
