"""Budgets that differ by head: a profile of a model, and the rectangles that its heads are kept in.

How many of its tokens a KV head needs belongs to the model and hardly to the text. So the scores of
a few texts tell, once and for all, how a budget is best shared among the heads of all layers. This
runs in NumPy, before anything is traced: shapes of caches follow from it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from kvjax.budgets.heads import ROUNDING, slots_of_shares
from kvjax.checks import check_part

THRESHOLDS = 64  # steps of the ladder, of 12 % each at the default smallest share
SMALLEST_SHARE = 1e-3  # smallest share of all tokens that a threshold stands for
SAFEGUARD = 0.2  # part of a budget that all heads get alike, as in Ada-KV (arXiv 2407.11550)
_MOST_LAYOUTS = 9
_LEAST_SAVING = 0.02  # of a further rectangle or layout, as a share of the slots that heads need

Profile = Float[np.ndarray, "N H K"]
"""Share of the tokens of head h in layer n at step k of a ladder, from nothing (0) to all (1)."""


class Rectangle(NamedTuple):
    """KV heads of a layer that are kept in one array, and the slots that each of them has there."""

    heads: tuple[int, ...]
    slots: int


def ladder(
    scores: Sequence[Float[np.ndarray, "N H _"]],
    steps: int = THRESHOLDS,
    smallest: float = SMALLEST_SHARE,
) -> Float[np.ndarray, " K"]:
    """Returns falling thresholds above which growing shares of all scores lie.

    The shares are spaced evenly in their logarithms, from `smallest` to 1: small budgets are where
    heads differ most. No score lies below the last threshold, minus infinity.

    Args:
      scores: what `profile` takes.
      steps: number of thresholds K, at least 2.
      smallest: share of all scores above the first threshold.

    Raises:
      ValueError: scores that `profile` refuses.

    Example:
      >>> import numpy as np
      >>> from kvjax.budgets.profile import ladder
      >>> ladder([np.arange(100.0).reshape(1, 2, 50)], steps=3, smallest=0.04).tolist()
      [95.0, 79.0, -inf]
    """
    scores = _checked(scores)
    falling = np.sort(np.concatenate([x.ravel() for x in scores]))[::-1]
    above = np.floor(np.geomspace(smallest, 1, steps)[:-1] * falling.size + ROUNDING).astype(int)
    return np.append(falling[above], -np.inf)


def profile(
    scores: Sequence[Float[np.ndarray, "N H _"]], thresholds: Float[np.ndarray, " K"]
) -> Profile:
    """Returns which share of its tokens each head has above each threshold, mean over the texts.

    `table[n, h, k] = mean over texts of |{s : score[n, h, s] > threshold[k]}| / S`

    A threshold is the same for all heads of all layers, so that heads with many large scores have
    large shares.

    Args:
      scores: for each text, a score of every token in every KV head of every layer, `[N, H, S]`;
        texts may differ in length. A score is comparable between heads, such as the largest
        attention probability that a token receives.
      thresholds: falling, the last one minus infinity, as `ladder` returns them.

    Returns:
      The shares, float64. They grow with k, to 1.

    Raises:
      ValueError: scores with NaN.

    Example:
      >>> import numpy as np
      >>> from kvjax.budgets.profile import profile
      >>> scores = [np.array([[[0.9, 0.8, 0.1, 0.2], [0.3, 0.0, 0.1, 0.2]]])]
      >>> profile(scores, np.array([0.5, 0.15, -np.inf])).tolist()
      [[[0.5, 0.75, 1.0], [0.0, 0.5, 1.0]]]
    """
    scores, thresholds = _checked(scores), np.asarray(thresholds, np.float64)
    # A score of minus infinity is above the last threshold, too: it means every token.
    by_text = [
        np.stack([((x > t) | (t == -np.inf)).mean(2) for t in thresholds], -1) for x in scores
    ]
    return np.mean(by_text, axis=0)


def shares(table: Profile, budget: float, safeguard: float = SAFEGUARD) -> Float[np.ndarray, "N H"]:
    """Returns the share of its tokens that each head keeps if all heads together keep a budget.

    `share[n, h] = safeguard · budget + (1 − safeguard) · share of the profile`

    The budget lies between the mean shares of two thresholds (or between none and the first), and
    so do each head's shares of the profile, by linear interpolation. Hence the mean of the shares
    is the budget; no share falls when the budget grows, and all are 1 at a budget of 1.

    Args:
      table: a profile.
      budget: share of all tokens of all heads that is kept, in (0, 1].
      safeguard: part of the budget that all heads get alike, from 0 to 1.

    Raises:
      ValueError: a budget outside (0, 1], or a safeguard outside [0, 1]; a table that is not a
        profile.

    Example:
      >>> import numpy as np
      >>> from kvjax.budgets.profile import shares
      >>> table = np.array([[[0.5, 0.75, 1.0], [0.0, 0.5, 1.0]]])
      >>> [shares(table, budget, 0).tolist() for budget in (0.125, 0.25, 0.4375, 1.0)]
      [[[0.25, 0.0]], [[0.5, 0.0]], [[0.625, 0.25]], [[1.0, 1.0]]]
      >>> shares(table, 0.25, safeguard=0.5).tolist()
      [[0.375, 0.125]]
    """
    table = np.asarray(table, np.float64)
    check_part("safeguard", safeguard)
    if not 0 < budget <= 1:
        raise ValueError(f"budget must lie in (0, 1], got {budget}")
    if table.ndim != 3 or not table.size:
        raise ValueError(f"a profile is [layers, KV heads, thresholds], got {table.shape}")
    table = np.concatenate((np.zeros((*table.shape[:2], 1)), table), axis=2)
    if (np.diff(table) < 0).any() or (table[..., -1] != 1).any():
        raise ValueError("the shares of a profile must grow to 1 with the thresholds")
    mean = table.mean((0, 1))
    last = int(np.searchsorted(mean, budget))  # the first step whose mean is at least the budget
    part = (budget - mean[last - 1]) / (mean[last] - mean[last - 1])
    of_profile = (1 - part) * table[..., last - 1] + part * table[..., last]
    return safeguard * budget + (1 - safeguard) * of_profile


def rectangles(
    shares_of_layer: Float[np.ndarray, " H"],
    tokens: int,
    *,
    at_most: int = 3,
    saves: float = 0,
) -> tuple[Rectangle, ...]:
    """Groups the heads of a layer so that they take the fewest slots in so few rectangles.

    A head needs `max(⌊share · tokens⌋, 1)` slots, and has as many as the largest head of its
    rectangle. Slots in total, Σ heads · slots, are fewest for rectangles of neighbours in the order
    of sizes, which dynamic programming finds. Among equally good ways, the one with the fewest
    rectangles is taken, then the one whose largest rectangles have the fewest heads.

    Args:
      shares_of_layer: share of its tokens that each head keeps, in [0, 1].
      tokens: tokens of which these are shares.
      at_most: number of rectangles at most.
      saves: slots that each further rectangle must save.

    Returns:
      The rectangles, the largest slots first. Each head is in one of them.

    Example:
      >>> import numpy as np
      >>> from kvjax.budgets.profile import rectangles
      >>> for rectangle in rectangles(np.array([0.05, 0.9, 0.06, 0.01]), 1000, at_most=2):
      ...     print(rectangle)
      Rectangle(heads=(1,), slots=900)
      Rectangle(heads=(0, 2, 3), slots=60)
    """
    each = np.asarray(shares_of_layer, np.float64)
    needed = slots_of_shares(each, tokens, minimum=1).tolist()
    order = sorted(range(each.size), key=lambda head: (-needed[head], head))

    def cost(first: int, end: int) -> float:
        return (end - first) * needed[order[first]] + saves

    return tuple(
        Rectangle(tuple(sorted(order[first:end])), needed[order[first]])
        for first, end in _cheapest_runs(len(order), at_most, cost)
    )


def _cheapest_runs(
    count: int, at_most: int, cost: Callable[[int, int], float]
) -> list[tuple[int, int]]:
    """Cuts the numbers from 0 to `count - 1` into at most so many runs with the least cost.

    Returns the first number and the end of each run. Among equally cheap ways, the one with the
    fewest runs is taken, then the one whose first runs are shortest.
    """

    @functools.cache
    def best(first: int, left: int) -> tuple[float, int, tuple[int, ...]]:
        """The numbers from `first` on in so many runs: the cost, the runs, and their ends."""
        if first == count:
            return 0, 0, ()
        if not left:
            return math.inf, 0, ()
        ways = []
        for end in range(first + 1, count + 1):
            others, more, ends = best(end, left - 1)
            ways.append((others + cost(first, end), 1 + more, (end, *ends)))
        return min(ways)

    ends = best(0, min(at_most, count))[2]
    return list(zip((0, *ends), ends, strict=False))


class Layout(NamedTuple):
    """Rectangles that several layers share.

    Args:
      layers: the layers.
      rectangles: heads are ranks within a layer, the most needed head first.
    """

    layers: tuple[int, ...]
    rectangles: tuple[Rectangle, ...]


def layouts(shares_of_layers: Float[np.ndarray, "N H"], tokens: int) -> tuple[Layout, ...]:
    """Groups layers that need similar numbers of slots, so that few layouts serve all of them.

    Each layout is compiled once. Its head of rank r has room for the heads of rank r in all its
    layers. Layers are ordered by the slots they need, and cut into at most 9 runs, so that all
    layers together take the fewest slots. Fewer layouts take more slots than the heads need. Each
    further rectangle of a layer, and each further layout, must save a fiftieth of the slots that
    heads need: they cost time while a step is compiled, and rectangles in each step.

    Args:
      shares_of_layers: share of its tokens that each head keeps, in [0, 1].
      tokens: tokens of which these are shares.

    Returns:
      The layouts. Each layer is in one of them.

    Example:
      >>> import numpy as np
      >>> from kvjax.budgets.profile import layouts
      >>> for layout in layouts(np.array([[0.9, 0.1], [0.0, 0.1], [0.1, 0.9]]), 100):
      ...     print(layout.layers, [(r.heads, r.slots) for r in layout.rectangles])
      (1,) [((0,), 10), ((1,), 1)]
      (0, 2) [((0,), 90), ((1,), 10)]
    """
    ranked = -np.sort(-np.asarray(shares_of_layers, np.float64), axis=1)
    by_need = np.argsort(ranked.sum(1), kind="stable").tolist()
    saved = _LEAST_SAVING * tokens * ranked.sum()

    @functools.cache
    def shared(first: int, end: int) -> tuple[Rectangle, ...]:
        """Rectangles for the layers `first` to `end - 1` in the order of their needs."""
        largest = ranked[by_need[first:end]].max(0)
        return rectangles(largest, tokens, saves=saved)

    def cost(first: int, end: int) -> float:
        slots = sum(len(r.heads) * r.slots + saved for r in shared(first, end))
        return (end - first) * slots + saved

    return tuple(
        Layout(tuple(sorted(by_need[first:end])), shared(first, end))
        for first, end in _cheapest_runs(len(by_need), _MOST_LAYOUTS, cost)
    )


def _checked(scores: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the scores in float64, or raises ValueError."""
    scores = [np.asarray(x, np.float64) for x in scores]
    if any(np.isnan(x).any() for x in scores):
        raise ValueError("scores must be numbers, got NaN")
    return scores
