"""KVMerger (arXiv 2407.08454): neighbouring tokens with similar keys become one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np

from .budgets import rows_budget
from .slots import Slots, Token, best, reduce_group

ROUNDING = 2.0**-21  # keys that are no further apart than this share of their length are equal


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """a . b / (|a| |b|), 0 where one of them is 0 (equation 3)."""
    norms = math.sqrt(a @ a) * math.sqrt(b @ b)
    return float(a @ b) / norms if norms > 0 else 0.0


def similar_pairs(
    keys: np.ndarray, free: list[bool], epsilon: float, against: str = "neighbour"
) -> set[int]:
    """Algorithm 1, from the last to the first: the i for which token i joins the set of i + 1.

    Token i joins if it and token i + 1 are free to merge and cos(k_i, k_j) > epsilon, where j is
    i + 1, or with against="anchor" the last token of that set.
    """
    joins, anchor = set(), len(keys) - 1
    for i in range(len(keys) - 2, -1, -1):
        other = i + 1 if against == "neighbour" else anchor
        if free[i] and free[i + 1] and cosine(keys[i], keys[other]) > epsilon:
            joins.add(i)
        else:
            anchor = i
    return joins


def top_up(keys: np.ndarray, free: list[bool], joins: set[int], need: int) -> set[int]:
    """`joins` and as many of the most similar other pairs as make `need` of them together."""
    pairs = [i for i in range(len(keys) - 1) if free[i] and free[i + 1] and i not in joins]
    similarity = np.array([cosine(keys[i], keys[i + 1]) for i in pairs])
    return joins | {pairs[i] for i in best(similarity, max(need - len(joins), 0))}


def merging_sets(size: int, joins: set[int]) -> list[list[int]]:
    """The runs that the joins make of tokens 0 .. size - 1."""
    sets: list[list[int]] = []
    for i in range(size):
        if i > 0 and i - 1 in joins:
            sets[-1].append(i)
        else:
            sets.append([i])
    return sets


def gaussian_weights(
    keys: np.ndarray,
    pivot: int,
    sigma: float | Literal["mean_distance", "literal"] = "mean_distance",
) -> np.ndarray:
    """g_i = exp(-|k_p - k_i|^2 / (2 sigma^2)) of one merging set (equation 6), not normalised.

    sigma: a number; "mean_distance": the mean of |k_p - k_i| over i != p, over sqrt(2), all ones
    where that is 0; "literal": sum_i g_i / (sqrt(2) |S|) with the g of sigma = 5.
    """
    distance = np.sqrt(((keys - keys[pivot]) ** 2).sum(-1))
    distance[distance <= ROUNDING * np.sqrt((keys**2).sum(-1))] = 0.0
    if sigma == "mean_distance":
        sigma = np.delete(distance, pivot).mean() / math.sqrt(2)
    elif sigma == "literal":
        sigma = gaussian_weights(keys, pivot, 5.0).sum() / (math.sqrt(2) * len(keys))
    return np.exp(-(distance**2) / (2 * sigma**2)) if sigma > 0 else np.ones(len(keys))


def paper_share(budget: float, at_35: float, at_50: float) -> float:
    """A share that is given at budgets of 35 % and 50 %: linear between, scaled outside."""
    if budget <= 0.35:
        return at_35 * budget / 0.35
    if budget >= 0.5:
        return at_50 * budget / 0.5
    return at_35 + (at_50 - at_35) * (budget - 0.35) / 0.15


class KVMerger:
    """Merges runs of neighbours with similar keys, at a prompt's end.

    Excluded: the newest `recent` positions, and the `heavy` of the others that received the most
    attention (mean over the group).  With `epsilon` alone all similar pairs are merged, with a
    budget B as many of the most similar as bring the live tokens down to B, with both the larger
    number.  A set S with pivot p (most attention received; or the highest `priority(position)`)
    becomes

        k = sum_S w k      v = sum_S w v      w_i = m_i g_i / sum_S m g      position p

    where m are the masses.  value_scale: "log_mass" leaves the mass sum_S m on the token, "paper"
    multiplies v by it and leaves 1, "none" leaves 1.  Nothing happens while decoding.
    """

    def __init__(
        self,
        budget: int | float | None = None,
        epsilon: float | None = None,
        recent: int | float | None = None,
        heavy: int | float | None = None,
        against: str = "neighbour",
        weights: str = "gaussian",
        sigma: float | Literal["mean_distance", "literal"] = "mean_distance",
        value_scale: str = "log_mass",
        priority: Callable[[int], float] | None = None,
        **options: float | None,
    ) -> None:
        self.budget, self.epsilon, self.against = budget, epsilon, against
        self.recent, self.heavy, self.priority = recent, heavy, priority
        self.weights, self.sigma, self.value_scale = weights, sigma, value_scale
        self.slots = Slots(**options)
        self.sets: list[list[int]] = []

    @property
    def kept(self) -> list[int]:
        """Positions of the live tokens."""
        return self.slots.positions.tolist()

    def prompt(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray, last: bool = True
    ) -> np.ndarray:
        """q [G, T, D], k and v [T, D], positions [T] -> out [G, T, D].  Merges if `last`."""
        out = self._step(q, k, v, positions)
        if self.slots.ends_prompt(positions, last):
            self._merge()
        return out

    def decode(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int) -> np.ndarray:
        """q [G, D], k and v [D] of one token -> out [G, D]."""
        return self._step(q[:, None], k[None], v[None], [position])[:, 0]

    def _step(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray
    ) -> np.ndarray:
        self.slots.append(k, v, positions, len(q))
        out, probabilities = self.slots.attend(q, positions)
        if len(self.slots):
            self.slots.add_scores(probabilities.sum(axis=1))
        return out

    def limits(self) -> tuple[int | None, int, int]:
        """Budget, recent and heavy tokens of a row of this length.

        Fractions of the tokens so far, the paper's where none are given (at half the prompt if
        there is no budget); of a budget the recent ones then are at least 64 or seven eighths,
        where that leaves room for a given number of heavy ones.  A heavy token cuts a run in two,
        so with h of them, r recent ones and n tokens there may be as few as n - r - 2h - 1 pairs: B
        must reach r + 2h + 1, and r and h are cut down to that.
        """
        length = self.slots.length
        fixed = [x if isinstance(x, int) else 0 for x in (self.recent, self.heavy)]
        budget = self.budget
        if budget is not None:
            budget = rows_budget(budget, length, fixed[0] + 2 * fixed[1] + 1)
        share = 0.5 if budget is None else min(budget / length, 1.0)
        recent, heavy = self.recent, self.heavy
        recent = paper_share(share, 0.08, 0.17) if recent is None else recent
        heavy = paper_share(share, 0.02, 0.12) if heavy is None else heavy
        recent = recent if isinstance(recent, int) else math.floor(recent * length + 1e-9)
        heavy = heavy if isinstance(heavy, int) else math.floor(heavy * length + 1e-9)
        if budget is not None:
            if self.recent is None:
                least = min(64, math.floor(7 * budget / 8))
                if self.heavy is not None:
                    least = min(least, budget - 1 - 2 * heavy)
                recent = max(recent, least)
            recent = min(recent, budget - 1)
            heavy = min(heavy, (budget - 1 - recent) // 2)
        return budget, recent, heavy

    def _merge(self) -> None:
        tokens, keys = self.slots.tokens, self.slots.keys
        budget, recent, heavy = self.limits()
        attention = reduce_group(self.slots.scores, "mean")
        old = [i for i, t in enumerate(tokens) if t.position < self.slots.length - recent]
        hitters = {old[i] for i in best(attention[old], heavy)}
        free = [i in old and i not in hitters for i in range(len(tokens))]
        joins = set()
        if self.epsilon is not None:
            joins = similar_pairs(keys, free, self.epsilon, self.against)
        if budget is not None:
            joins = top_up(keys, free, joins, len(tokens) - budget)
        self.sets = merging_sets(len(tokens), joins)
        self.slots.tokens = [self._merged([tokens[i] for i in own]) for own in self.sets]
        self.slots.tokens.sort(key=lambda token: token.position)

    def _merged(self, members: list[Token]) -> Token:
        if len(members) == 1:
            return members[0]
        if self.priority is None:
            rank = np.array([token.score.mean() for token in members])
        else:
            rank = np.array([self.priority(token.position) for token in members])
        (pivot,) = best(rank, 1)
        keys, values = (np.array([getattr(t, x) for t in members]) for x in ("key", "value"))
        mass = np.exp([token.log_mass for token in members])
        g = np.ones(len(members))
        if self.weights == "gaussian":
            g = gaussian_weights(keys, pivot, self.sigma)
        w = mass * g / (mass * g).sum()
        scale = mass.sum() if self.value_scale == "paper" else 1.0
        left = mass.sum() if self.value_scale == "log_mass" else 1.0
        score = np.sum([token.score for token in members], axis=0)
        position = members[pivot].position
        return Token(position, w @ keys, scale * (w @ values), score, math.log(left))
