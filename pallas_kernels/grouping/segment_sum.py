"""Sums of the rows of a cache that go into the same place, and how kernels find those rows."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from pallas_kernels.base import route
from pallas_kernels.base.dispatch import choose_implementation
from pallas_kernels.base.kernel_parts import load_rows, own_part, store_rows
from pallas_kernels.base.tiles import power_of_two

# A program adds up MEMBERS rows of each of its targets at a time, of which it has as many as make
# such a tile: 4 warps hold it in registers. Segments are rarely longer than that.
MEMBERS, TILE, MOST_TARGETS = 8, 8192, 128


def segment_sum(
    rows: Array,
    into: Int[Array, "B H N"],
    places: int | None = None,
    *,
    implementation: str | None = None,
) -> Array:
    """Sums of the rows that go into each place: `out[p] = Σ_{n: into[n] = p} rows[n]`.

    XLA adds rows one by one where they go. On a GPU these are atomic additions, whose order and
    rounding differ from run to run. The kernel adds up each place's rows in the order of their
    numbers, so that equal arguments have equal sums.

    Args:
      rows: `[B, H, N, ...]`.
      into: the place of each row; numbers from `places` on are none, and no number is negative.
      places: P, N by default.
      implementation: `"pallas"` (the kernel), `"interpret"` (the kernel, interpreted on any
        device), `"xla"`, or None: the kernel on a GPU that can run it, XLA elsewhere.

    Returns:
      `[B, H, P, ...]` in the dtype of the rows. The kernel's sums are float32 on the way.

    Raises:
      ValueError: shapes that do not fit each other; an unknown implementation, or one that the
        GPU is too old for.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import segment_sum
      >>> segment_sum(jnp.array([[[1.0, 2.0, 4.0]]]), jnp.array([[[2, 0, 2]]])).tolist()
      [[[2.0, 0.0, 5.0]]]
    """
    chosen = choose_implementation(implementation, rows)
    if into.ndim != 3 or rows.shape[:3] != into.shape:
        raise ValueError(
            f"rows [B, H, N, ...] and into [B, H, N] must have the same B, H and N, got "
            f"{rows.shape} and {into.shape}"
        )
    places = rows.shape[2] if places is None else places
    out = jax.ShapeDtypeStruct((*rows.shape[:2], places, *rows.shape[3:]), rows.dtype)
    if chosen == "xla" or not out.size or not rows.size:
        return add_into(jnp.zeros(out.shape, out.dtype), into, rows)
    flat = rows.reshape(*into.shape, -1)
    return _sum(flat, Segments.of(into, places), chosen == "interpret").reshape(out.shape)


# Rows of each row and head added to those of a store, one by one; places behind its end are none.
add_into = jax.vmap(
    jax.vmap(lambda x, into, more: x.at[into].add(more, mode="drop", wrap_negative_indices=False))
)


class Segments(NamedTuple):
    """The rows of each place, as kernels read them.

    Args:
      order: numbers of the rows, sorted by the places that they go into, then by themselves.
      first, count: where a place's rows begin in that order, and how many they are.
    """

    order: Int[Array, "B H N"]
    first: Int[Array, "B H P"]
    count: Int[Array, "B H P"]

    @classmethod
    def of(cls, into: Int[Array, "B H N"], places: int) -> Segments:
        """From each row's place."""
        number = jax.lax.broadcasted_iota(jnp.int32, into.shape, 2)
        # Of a stable sort by one key XLA makes one of three arrays.
        place, order = jax.lax.sort((into, number), dimension=2, num_keys=2, is_stable=False)
        edge = jnp.pad(place[..., 1:] != place[..., :-1], ((0, 0), (0, 0), (1, 1)),
                       constant_values=True)  # fmt: skip
        nothing = jnp.zeros((*into.shape[:2], places), jnp.int32)
        # Each place is written once at most, in whatever order.
        first = _set(nothing, jnp.where(edge[..., :-1], place, places), number)
        end = _set(nothing, jnp.where(edge[..., 1:], place, places), number + 1)
        return cls(order, first, end - first)

    def parts(self) -> list[pl.BlockSpec]:
        """What a program is given of them."""
        return [own_part(x, (0, 1)) for x in self]


_set = jax.vmap(
    jax.vmap(lambda x, into, new: x.at[into].set(new, mode="drop", wrap_negative_indices=False))
)


class Targets(NamedTuple):
    """A program's targets, and their rows: of refs as in `Segments`.

    Args:
      order: of the rows.
      target, there: numbers of the targets, and which of them there are.
      first, count: as of the segments.
    """

    order: Any
    target: Any
    there: Any
    first: Any
    count: Any

    @classmethod
    def of(cls, order, first, count, tile: int) -> Targets:
        """Those of a program: `tile` of them."""
        target = pl.program_id(2) * tile + jnp.arange(tile, dtype=jnp.int32)
        there = target < first.shape[0]
        own = (route.load(x.at[target], mask=there, other=np.int32(0)) for x in (first, count))
        return cls(order, target, there, *own)

    def fold(self, count, add, start):
        """`add(slots, wanted, carry)` for some `[T, MEMBERS]` rows after the others of each target.

        `count` of the rows of each target are taken.
        """

        def some(i, carry):
            number = i * MEMBERS + jnp.arange(MEMBERS, dtype=jnp.int32)[None, :]
            wanted = number < count[:, None]
            place = jnp.where(wanted, self.first[:, None] + number, 0)
            rows = route.load(self.order.at[place], mask=wanted, other=np.int32(0))
            return add(rows, wanted, carry)

        rounds = jax.lax.div(count.max() + np.int32(MEMBERS - 1), np.int32(MEMBERS))
        return jax.lax.fori_loop(np.int32(0), rounds, some, start)


def targets_of(channels: int, places: int) -> int:
    """How many targets a program has, of rows of so many channels."""
    fitting = max(TILE // (MEMBERS * power_of_two(channels)), 1)
    return min(fitting, MOST_TARGETS, power_of_two(places))


def _sum(rows: Array, segments: Segments, interpret: bool) -> Array:
    """One launch, after those that find the segments."""
    channels, places = rows.shape[3], segments.first.shape[2]
    tile = targets_of(channels, places)
    out = jax.ShapeDtypeStruct((*rows.shape[:2], places, channels), rows.dtype)
    return route.pallas_call(
        functools.partial(_kernel, tile=tile),
        grid=(*rows.shape[:2], pl.cdiv(places, tile)),
        in_specs=[own_part(rows, (0, 1)), *segments.parts()],
        out_specs=own_part(out, (0, 1)),
        out_shape=out,
        num_stages=1,
        interpret=interpret,
        name="segment_sum",
    )(rows, *segments)


def _kernel(rows, order, first, count, out, *, tile: int):
    """The sums of a tile of places."""
    own = Targets.of(order, first, count, tile)
    kind = jnp.float32 if jnp.issubdtype(rows.dtype, jnp.floating) else rows.dtype

    def add(number, wanted, total):
        return total + load_rows(rows, number, wanted).astype(kind).sum(1, dtype=kind)

    total = own.fold(own.count, add, jnp.zeros((tile, power_of_two(rows.shape[1])), kind))
    store_rows(out, own.target, own.there, total.astype(out.dtype))
