"""Sums the rows of a cache that go into the same place; finds those rows for kernels."""

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
from pallas_kernels.base.kernel_parts import load_rows, program_part, store_rows
from pallas_kernels.base.tiles import power_of_two

# A program adds up MEMBERS rows of each of its targets at a time. Segments are rarely longer than
# that. The number of targets fills a tile of TILE numbers, which 4 warps hold in registers.
MEMBERS, TILE, MOST_TARGETS = 8, 8192, 128


def segment_sum(
    rows: Array,
    into: Int[Array, "B H N"],
    places: int | None = None,
    *,
    implementation: str | None = None,
) -> Array:
    """Sums the rows that go into each place: `out[p] = Σ_{n: into[n] = p} rows[n]`.

    XLA adds rows to their places one by one. On a GPU these are atomic additions, whose order and
    rounding differ from run to run. The kernel adds up each place's rows in the order of their
    numbers, so that equal arguments give equal sums.

    Args:
      rows: `[B, H, N, ...]`.
      into: the place of each row; numbers from `places` on mean none, and no number is negative.
      places: P, N by default.
      implementation: `"pallas"` (the kernel), `"interpret"` (the kernel, interpreted on any
        device), `"xla"`, or None: the kernel on a GPU that can run it, XLA elsewhere.

    Returns:
      `[B, H, P, ...]` in the dtype of the rows. The kernel sums in float32.

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


# Adds rows to those of a store for each row and head; drops rows for places beyond its end.
add_into = jax.vmap(
    jax.vmap(lambda x, into, rows: x.at[into].add(rows, mode="drop", wrap_negative_indices=False))
)


class Segments(NamedTuple):
    """Rows of each place, listed for kernels.

    Args:
      order: numbers of the rows, sorted by the places that they go into, then by number.
      first: where a place's rows begin in that order.
      count: number of a place's rows.
    """

    order: Int[Array, "B H N"]
    first: Int[Array, "B H P"]
    count: Int[Array, "B H P"]  # pyright: ignore[reportIncompatibleMethodOverride]  # a field, no method of tuples

    @classmethod
    def of(cls, into: Int[Array, "B H N"], places: int) -> Segments:
        """Finds the segments from each row's place."""
        number = jax.lax.broadcasted_iota(jnp.int32, into.shape, 2)
        # XLA would make a sort of three arrays of a stable sort by one key.
        place, order = jax.lax.sort((into, number), dimension=2, num_keys=2, is_stable=False)
        edge = jnp.pad(place[..., 1:] != place[..., :-1], ((0, 0), (0, 0), (1, 1)),
                       constant_values=True)  # fmt: skip
        nothing = jnp.zeros((*into.shape[:2], places), jnp.int32)
        # Each place is written at most once, so the order of writes does not matter.
        first = _set(nothing, jnp.where(edge[..., :-1], place, places), number)
        end = _set(nothing, jnp.where(edge[..., 1:], place, places), number + 1)
        return cls(order, first, end - first)

    def parts(self) -> list[pl.BlockSpec]:
        """Returns the parts of the segments that a program is given."""
        return [program_part(x, (0, 1)) for x in self]


_set = jax.vmap(
    jax.vmap(lambda x, into, value: x.at[into].set(value, mode="drop", wrap_negative_indices=False))
)


class Targets(NamedTuple):
    """Targets of a program and their rows, read from refs of `Segments`.

    Args:
      order: order of the rows.
      target: numbers of the targets.
      there: which of the targets exist.
      first, count: as in `Segments`, for these targets.
    """

    order: Any
    target: Any
    there: Any
    first: Any
    count: Any

    @classmethod
    def of(cls, order, first, count, tile: int) -> Targets:
        """Loads the `tile` targets of a program."""
        target = pl.program_id(2) * tile + jnp.arange(tile, dtype=jnp.int32)
        there = target < first.shape[0]
        bounds = (route.load(x.at[target], mask=there, other=np.int32(0)) for x in (first, count))
        return cls(order, target, there, *bounds)

    def fold(self, count, add, start):
        """Calls `add(slots, wanted, carry)` on `[T, MEMBERS]` rows of the targets at a time.

        Takes `count` rows of each target.
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
    """Returns how many targets a program has, for rows of `channels` channels."""
    fitting = max(TILE // (MEMBERS * power_of_two(channels)), 1)
    return min(fitting, MOST_TARGETS, power_of_two(places))


def _sum(rows: Array, segments: Segments, interpret: bool) -> Array:
    """Sums by one launch, after those that find the segments."""
    channels, places = rows.shape[3], segments.first.shape[2]
    tile = targets_of(channels, places)
    out = jax.ShapeDtypeStruct((*rows.shape[:2], places, channels), rows.dtype)
    return route.pallas_call(
        functools.partial(_kernel, tile=tile),
        grid=(*rows.shape[:2], pl.cdiv(places, tile)),
        in_specs=[program_part(rows, (0, 1)), *segments.parts()],
        out_specs=program_part(out, (0, 1)),
        out_shape=out,
        num_stages=1,
        interpret=interpret,
        name="segment_sum",
    )(rows, *segments)


def _kernel(rows, order, first, count, out, *, tile: int):
    """Sums the rows of a tile of places."""
    targets = Targets.of(order, first, count, tile)
    sum_dtype = jnp.float32 if jnp.issubdtype(rows.dtype, jnp.floating) else rows.dtype

    def add(number, wanted, total):
        return total + load_rows(rows, number, wanted).astype(sum_dtype).sum(1, dtype=sum_dtype)

    total = targets.fold(
        targets.count, add, jnp.zeros((tile, power_of_two(rows.shape[1])), sum_dtype)
    )
    store_rows(out, targets.target, targets.there, total.astype(out.dtype))
