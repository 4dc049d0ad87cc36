"""Quest (arXiv 2406.10774): pages of tokens, judged by what their keys can score."""

from __future__ import annotations

import math

import numpy as np

from .clusterkv import Recalling
from .slots import Slots, best, reduce_group


def page_bounds(keys: np.ndarray, page: int) -> tuple[np.ndarray, np.ndarray]:
    """Smallest and largest key of every channel, [P, D], of pages of consecutive keys [N, D]."""
    pages = [keys[start : start + page] for start in range(0, len(keys), page)]
    return np.array([p.min(axis=0) for p in pages]), np.array([p.max(axis=0) for p in pages])


def page_moments(keys: np.ndarray, mass: np.ndarray, page: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of every channel, [P, D], of pages of consecutive keys [N, D].

    Each key counts as its mass [N] says.
    """
    means, variances = [], []
    for start in range(0, len(keys), page):
        p, weights = keys[start : start + page], mass[start : start + page]
        means.append(np.average(p, axis=0, weights=weights))
        variances.append(np.average((p - means[-1]) ** 2, axis=0, weights=weights))
    return np.array(means), np.array(variances)


def page_scores(q: np.ndarray, lowest: np.ndarray, highest: np.ndarray) -> np.ndarray:
    """sum_c max(q_c lowest_c, q_c highest_c), [P], of q [D] and the pages' bounds [P, D]."""
    return np.maximum(q * lowest, q * highest).sum(axis=-1)


def page_budget(budget: int | float, length: int, page: int = 16) -> int:
    """Pages that a row of `length` prompt tokens looks at.

    An int is a number of tokens, a multiple of `page`.  A float f is a share of the prompt:
    floor(min(L, max(floor(f L), 3 page)) / page), at least 3.
    """
    if isinstance(budget, int):
        return budget // page
    return max(min(length, max(math.floor(budget * length), 3 * page)) // page, 3)


class Quest(Recalling):
    """The first and the newest page, and the best of the others up to the budget, ascending.

    With first_page=False the first page has to be among the best, as in the paper.  Pages are
    `page` consecutive live tokens in the order of their positions; generated tokens go on filling
    the last one.  A KV head goes by the maximum of the page's scores over its group.  With a
    sliding window, pages all of whose tokens lie outside it are not candidates.

    The bounds of a page are `spread` standard deviations below and above the mean of its keys, by
    channel; with spread=None they are its smallest and largest keys, as in the paper.
    """

    def __init__(
        self,
        budget: int | float,
        page: int = 16,
        per_query_head: bool = False,
        first_page: bool = True,
        spread: float | None = 1.0,
        **options: float | None,
    ) -> None:
        super().__init__(per_query_head, **options)
        self.budget, self.page, self.first_page, self.spread = budget, page, first_page, spread

    def bounds(self, slots: Slots) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper bounds of every channel, [P, D]."""
        if self.spread is None:
            return page_bounds(slots.keys, self.page)
        mass = np.exp([token.log_mass for token in slots.tokens])
        mean, variance = page_moments(slots.keys, mass, self.page)
        apart = self.spread * np.sqrt(variance)
        return mean - apart, mean + apart

    def pages(self, slots: Slots) -> list[list[int]]:
        """The positions of each page."""
        positions = slots.positions.tolist()
        return [positions[i : i + self.page] for i in range(0, len(positions), self.page)]

    def select(self, q: np.ndarray) -> list[list[int]]:
        """The positions of the pages taken, ascending."""
        taken = page_budget(self.budget, self.prompt_length, self.page)
        selected = []
        for slots, group in zip(self.heads, self.by_group(q), strict=True):
            bounds = self.bounds(slots)
            scores = np.array([page_scores(query, *bounds) for query in group])
            if not self.per_query_head:
                scores = reduce_group(scores, "max")[None]
            pages = self.pages(slots)
            seen = [i for i, page in enumerate(pages[:-1]) if page[-1] >= self.first]
            always = [i for i in seen if i == 0 and self.first_page]
            others = [i for i in seen if i not in always]
            for row in scores:
                chosen = [others[i] for i in best(row[others], taken - 1 - len(always))]
                listed = [*always, *chosen, len(pages) - 1]
                selected.append([p for i in listed for p in pages[i]])
        return selected
