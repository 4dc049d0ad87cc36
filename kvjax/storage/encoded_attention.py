"""Attention of a decode step over payloads that are encoded, in the form they are stored in."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.rope import Rotation
from pallas_kernels.attention.call import join_attention, stored_attention
from pallas_kernels.attention.decode import attention_by_products
from pallas_kernels.attention.forms import Rows
from pallas_kernels.attention.rotation import Turn
from pallas_kernels.base.dispatch import choose_implementation


class Seen(NamedTuple):
    """What attention knows of all slots.

    Args:
      bias, position: of each slot, `-inf` and -1 where it is free.
      used: a number of slots from which on none is live.
      rotate: how stored keys are rotated; None: they are already.
    """

    bias: Float[Array, "B H S"]
    position: Int[Array, "B H S"]
    used: Int[Array, "B H"]
    rotate: Rotation | None

    @property
    def turn(self) -> Turn | None:
        """The rotation as a kernel takes it."""
        return None if self.rotate is None else self.rotate.turn


class Piece(NamedTuple):
    """Slots whose keys, and whose values, stand in one form.

    Args:
      operation: of `pallas_kernels`, whose tile sizes are taken.
      k, v: their rows, N places.
      bias, position: of each place.
      turn: how keys are rotated; None: not.
      first, end: the places that count; None: all.
      slots: of each place, S = none; None: places are slots.
    """

    operation: str
    k: Rows
    v: Rows
    bias: Float[Array, "B H N"]
    position: Int[Array, "B H N"]
    turn: Turn | None
    first: Int[Array, "B H"] | None = None
    end: Int[Array, "B H"] | None = None
    slots: Int[Array, "B H N"] | None = None


def encoded_attention(
    q: Float[Array, "B H G T D"],
    k,
    v,
    seen: Seen,
    positions: Int[Array, "B T"],
    *,
    wants_mass: bool,
    implementation: str | None,
    **kind,
) -> tuple[Float[Array, "B H G T D"], Float[Array, "B H G T S"] | None]:
    """Output and, if wanted, the probability of each slot.

    Args:
      q: queries, rotated.
      k, v: payloads that have `pieces`, for the kernel, and `logits` and `mix`, for XLA.
    """
    chosen = choose_implementation(implementation, *jax.tree.leaves((k, v)))
    if chosen == "xla":
        out, _, p = attention_by_products(
            q, lambda rows: k.logits(rows, seen.rotate), v.mix, seen.bias, positions,
            seen.position, dtype=v.dtype, **kind,
        )  # fmt: skip
        return out, p
    pieces = k.pieces(v, seen)
    found = [
        stored_attention(
            piece.operation, q, piece.k, piece.v, piece.bias, positions, piece.position,
            first=piece.first, end=piece.end, turn=piece.turn, dtype=jnp.float32,
            probabilities=wants_mass, interpret=chosen == "interpret", **kind,
        )
        for piece in pieces
    ]  # fmt: skip
    out, _, weights = join_attention([(out, lse) for out, lse, _ in found])
    out = out.astype(v.dtype)
    if not wants_mass:
        return out, None
    total = jnp.zeros((*q.shape[:4], seen.bias.shape[2]), jnp.float32)
    for piece, weight, (_, _, p) in zip(pieces, weights, found, strict=True):
        total = _add(total, piece.slots, p * weight[..., None])
    return out, total


def _add(total: Array, slots: Array | None, p: Array) -> Array:
    """Probabilities of places, added to those of their slots."""
    if slots is None:
        return total + p
    return jax.vmap(jax.vmap(lambda x, at, p: x.at[..., at].add(p, mode="drop")))(total, slots, p)
