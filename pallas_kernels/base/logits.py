"""Attention's operands, and its logits: products that are scaled, capped, biased and masked."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.base.annotations import NoneElsewhere
from pallas_kernels.base.rotation import Turn
from pallas_kernels.base.rows import take_slots


class Queries(NamedTuple):
    """Queries of attention, grouped under their KV head or their list of slots.

    Args:
      q: G query heads of T tokens, for each of H KV heads or lists of slots.
      position: token position of each; -1 marks padding, which sees nothing.
      shift: added to a query's products with all keys; None: nothing is added.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import Queries
      >>> q = jnp.ones((1, 8, 1, 64))  # 8 query heads of a decode step, of which 4 share a KV head
      >>> Queries(q.reshape(1, 2, 4, 1, 64), position=jnp.array([[99]])).q.shape
      (1, 2, 4, 1, 64)
    """

    q: Float[Array, "B H G T D"]
    position: Int[Array, "B T"]
    shift: Float[Array, "B H G T"] | None = None


class Seen(NamedTuple):
    """The slots of a cache as attention sees them.

    With an `index`, places are the entries of its lists, else the slots themselves. In a kernel,
    `first` and `end` may have one more axis: one range for each tile of the rows of a list.

    Args:
      bias: added to the logit of each slot, `-inf` where it is free (a cache's `log_mass`).
      position: token position of each slot, -1 where it is free.
      end: the place from which on none is live, if it is known.
      first: the first place that is looked at; None: 0.
      index: slots of each of K lists, in any order; -1: none. List k reads head `k // (K / H)`. A
        slot that is listed twice counts twice. None: all slots are seen.
      turn: rotation of keys when they are read; None: no rotation.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import Seen
      >>> seen = Seen(jnp.zeros((1, 1, 3)), jnp.array([[[0, 1, 2]]]))
      >>> seen._replace(index=jnp.array([[[2, -1]]])).listed().position.tolist()
      [[[2, -1]]]
    """

    bias: Float[Array, "B H S"]
    position: Int[Array, "B H S"]
    end: Int[Array, "B K *I"] | NoneElsewhere = None
    first: Int[Array, "B K *I"] | None = None
    index: Int[Array, "B K N"] | None = None  # pyright: ignore[reportIncompatibleMethodOverride]  # a field, no method of tuples
    turn: Turn | None = None

    @property
    def places(self) -> int:
        """Number of places (static)."""
        return (self.bias if self.index is None else self.index).shape[2]

    @property
    def live(self) -> Bool[Array, "B H S"]:
        """Which slots hold a token."""
        return live_slots(self.bias, self.position)

    def listed(self) -> Seen:
        """Returns the places of the lists as slots of their own; an entry -1 is a free slot."""
        index: Array = self.index  # pyright: ignore[reportAssignmentType]  # there are lists
        named, slot = index >= 0, jnp.maximum(index, 0)
        return Seen(
            bias=jnp.where(named, take_slots(self.bias, slot), -jnp.inf),
            position=jnp.where(named, take_slots(self.position, slot), -1),
            end=jnp.full(slot.shape[:2], slot.shape[2], jnp.int32),
            turn=None if self.turn is None else self.turn.at(take_slots(self.turn.position, slot)),
        )

    def turned(self, k: Float[Array, "B H S D"]) -> Float[Array, "B H S D"]:
        """Returns the keys of all slots, rotated if they are stored unrotated."""
        return k if self.turn is None else self.turn.rotate(k)


class Mask(NamedTuple):
    """Options that turn a product of query and key into a logit (static).

    Args:
      scale: factor of the product.
      window: a query sees the newest `window` positions, its own included; None: all of them.
      soft_cap: bound c of logits before the bias, `c · tanh(logit / c)`; None: no bound.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import Mask, Queries, Seen, decode_attention
      >>> queries = Queries(jnp.zeros((1, 1, 1, 1, 2)), jnp.array([[2]]))
      >>> rows, seen = jnp.ones((1, 1, 3, 2)), Seen(jnp.zeros((1, 1, 3)), jnp.array([[[0, 1, 2]]]))
      >>> _, _, p = decode_attention(queries, rows, rows, seen, Mask(scale=2**-0.5, window=2))
      >>> p.tolist()
      [[[[[0.0, 0.5, 0.5]]]]]
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None


def capped(logits: Float[Array, "*R"], soft_cap: float | None) -> Float[Array, "*R"]:
    """Returns logits between `-soft_cap` and `soft_cap`. None: as they are."""
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def masked(
    logits: Float[Array, "B H R S"],
    seen: Seen,
    query_position: Int[Array, "B T"],
    window: int | None,
) -> Float[Array, "B H R S"]:
    """Adds the bias to logits, and makes them `-inf` where a query does not see a slot.

    The R query rows of a KV head are its G query heads times the T tokens, tokens fastest. Masking
    uses `where`, so that the contents of a free slot's key never reach the result.
    """
    rows, tokens = logits.shape[2], query_position.shape[1]
    visible = visible_slots(seen, query_position, window)
    logits = logits + seen.bias[:, :, None, :]
    grouped = logits.reshape(*logits.shape[:2], rows // tokens, tokens, -1)
    return jnp.where(visible[:, :, None], grouped, -jnp.inf).reshape(logits.shape)


def visible_slots(
    seen: Seen, query_position: Int[Array, "B T"], window: int | None
) -> Bool[Array, "B H T S"]:
    """Returns whether a query sees a slot: live, not newer than the query, and in its window."""
    q_pos, k_pos = query_position[:, None, :, None], seen.position[:, :, None, :]
    visible = (k_pos <= q_pos) & seen.live[:, :, None, :]
    return visible if window is None else visible & (k_pos > q_pos - window)


def live_slots(bias: Float[Array, "*S"], key_position: Int[Array, "*S"]) -> Bool[Array, "*S"]:
    """Returns which slots hold a token."""
    return (bias > -jnp.inf) & (key_position >= 0)


def finite_or_zero(top: Float[Array, "*R"]) -> Float[Array, "*R"]:
    """Returns what to subtract before exp: 0 for a row that sees nothing, as exp(-inf - 0) = 0."""
    return jnp.where(top == -jnp.inf, 0.0, top)


def or_one(total: Float[Array, "*R"]) -> Float[Array, "*R"]:
    """Returns what to divide weights by: 1 for a row that sees nothing, whose weights are 0."""
    return jnp.where(total == 0, 1.0, total)
