"""Budgets: the number of slots that a method may keep, for a prompt of each length.

A budget is an `int` (slots), a `float` (share of each row's own prompt), or a function from prompt
lengths to slots, such as PyramidKV's layer budgets. Rows differ in length. Therefore a budget
becomes a table over lengths when a function is traced, and each row looks up its own length.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.budgets.heads import HeadShares
from kvjax.checks import check_count, check_number
from kvjax.messages import brief
from kvjax.serialization import static_value

Budget = int | float | Callable[[np.ndarray], np.ndarray]
"""Slots per list: a number, a share of a row's tokens, or a function of rows' lengths."""


def check_budget(budget: Budget, minimum: int, why: str) -> None:
    """Raises unless the budget is a workable number of slots or a share of a prompt.

    A budget that is a function is not checked.

    Args:
      budget: budget to check.
      minimum: smallest workable number of slots.
      why: explanation of the minimum, for the message.

    Raises:
      TypeError: the budget is not a number.
      ValueError: it is an int below `minimum` or above `MOST_COUNT`, or a float outside (0, 1].

    Example:
      >>> import kvjax
      >>> kvjax.kit.check_budget(0.25, minimum=17, why="window + 1")
      >>> kvjax.kit.check_budget(8, minimum=17, why="window + 1")
      Traceback (most recent call last):
        ...
      ValueError: budget must be at least 17 (window + 1), got 8
    """
    if callable(budget):
        return
    if isinstance(budget, bool) or not isinstance(budget, int | float | np.integer | np.floating):
        raise TypeError(
            f"budget must be an int (slots) or a float (share of the prompt), got {brief(budget)}"
        )
    if isinstance(budget, float | np.floating):
        check_number("a float budget", budget, 0.0, 1.0)
    elif budget < minimum:
        raise ValueError(f"budget must be at least {minimum} ({why}), got {brief(budget)}")
    else:
        check_count("budget", budget, minimum)


def slots_for(budget: Budget, lengths: np.ndarray | int, minimum: int) -> np.ndarray:
    """Returns the slots for prompts of these lengths.

    They are B for a number, and `min(L, max(⌊f·L⌋, minimum))` for a share f, where `f·L` is the
    product in double precision.

    Example:
      >>> from kvjax.budgets.budgets import slots_for
      >>> [int(slots_for(0.2, length, minimum=33)) for length in (1000, 100, 20)]
      [200, 33, 20]
    """
    lengths = np.asarray(lengths)
    if callable(budget):
        return budget(lengths)
    if isinstance(budget, float | np.floating):
        share = np.floor(float(budget) * lengths).astype(np.int64)
        return np.minimum(lengths, np.maximum(share, minimum))
    return np.full(lengths.shape, operator.index(budget))


def most_slots(budget: Budget, max_length: int, minimum: int) -> int:
    """Returns the largest budget of any prompt of up to `max_length` tokens.

    Args:
      budget: number of slots, or share of the prompt.
      max_length: most tokens of a prompt.
      minimum: smallest workable number of slots, to which a share is raised.

    Example:
      >>> import kvjax
      >>> kvjax.kit.most_slots(0.25, 1000, 32), kvjax.kit.most_slots(0.25, 80, 32)
      (250, 32)
    """
    return int(slots_for(budget, np.arange(max_length + 1), minimum).max())


def rows_budget(
    budget: Budget,
    length: Int[Array, " B"],
    max_length: int,
    minimum: int,
    table: Array | tuple[()] = (),
) -> Int[Array, " B"] | Int[Array, "B H"]:
    """Returns each row's budget, from its own length (at most `max_length`).

    With `HeadShares`, each row and head has a budget.

    Args:
      budget: number of slots, or share of a row's length.
      length: tokens of each row.
      max_length: length beyond which a share grows no more.
      minimum: smallest workable number of slots, to which a share is raised.
      table: a layer's budgets over lengths `[L]` (`kvjax.budgets.layers.layer_table`), which
        replace a `budget` that is a share; empty: without such budgets. For `HeadShares` they are
        the shares of the layer's heads `[H]`.

    Returns:
      Slots of each row `[B]`, or of each row and KV head `[B, H]` for `HeadShares`.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> lengths = jnp.array([400, 80, 2000])
      >>> kvjax.kit.rows_budget(0.25, lengths, max_length=1000, minimum=32).tolist()
      [100, 32, 250]
    """
    if isinstance(budget, int | np.integer):
        return jnp.full(length.shape, budget, jnp.int32)
    if isinstance(budget, HeadShares):
        return budget.slots(table, length, max_length)  # pyright: ignore[reportArgumentType]  # its heads' shares
    if isinstance(table, tuple):
        table = jnp.asarray(slots_for(budget, np.arange(max_length + 1), minimum))
    return table[jnp.minimum(length, table.size - 1)].astype(jnp.int32)


@static_value
@dataclass(frozen=True)
class Share:
    """Share of a budget B, `round(share · B)`, or the remainder of B; it is a budget itself.

    Args:
      budget: B.
      share: share of B.
      minimum: smallest workable number of slots, which the remainder always has.
      rest: True: the remainder; False: the share.

    Example:
      >>> import numpy as np
      >>> from kvjax.budgets.budgets import Share
      >>> Share(0.5, 0.25, minimum=33)(np.array([400, 80, 20])).tolist()
      [50, 7, 0]
    """

    budget: Budget
    share: float
    minimum: int
    rest: bool = False

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the slots for prompts of these lengths."""
        total = slots_for(self.budget, lengths, self.minimum)
        taken = np.rint(self.share * total).astype(np.int64)
        taken = np.minimum(taken, np.maximum(total - self.minimum, 0))
        return total - taken if self.rest else taken
