"""A greedy cover: few directions that stand for many vectors."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.base.dispatch import choose_implementation
from pallas_kernels.base.rows import block_of
from pallas_kernels.grouping.cover_graph import Tiles, any_of, first_of, make_graph, order_of
from pallas_kernels.grouping.cover_search import search
from pallas_kernels.grouping.nearest_entries import (
    directions,
    nearest_directions,
    nearest_of_wanted,
)


class Cover(NamedTuple):
    """Entries of a cover, and the entry that stands for each vector.

    Args:
      index: the entry of each vector; 0 for vectors that are zero or no members.
      centers: the vector that became each entry; N from entry `count` on.
      count: number of entries.
      overflow: number of members that are near to no entry, because there was no room for more.
      beyond: mask of those members.
    """

    index: Int[Array, "B N"]  # pyright: ignore[reportIncompatibleMethodOverride]  # a field, no method of tuples
    centers: Int[Array, "B E"]
    count: Int[Array, " B"]  # pyright: ignore[reportIncompatibleMethodOverride]  # a field, no method of tuples
    overflow: Int[Array, " B"]
    beyond: Bool[Array, "B N"]


def greedy_cover(
    vectors: Float[Array, "B N D"],
    members: Bool[Array, "B N"],
    weights: Int[Array, "B N"],
    *,
    theta: float | Float[Array, " B"],
    capacity: int,
    implementation: str | None = None,
) -> Cover:
    """Covers vectors with few of their directions, chosen greedily.

    Two vectors are neighbours where their cosine is above `theta`, and every vector is its own
    neighbour. In each step, the uncovered vector whose uncovered neighbours weigh most becomes an
    entry, the first of equals. It stands for those neighbours, which are covered from then on. Once
    all entries are taken, each remaining vector goes to the entry with the highest cosine, the
    first of equals. A zero vector has no direction and no neighbours.

    The graph is held as bits, N² / 8 bytes for one row at a time (8.6 GB for 262,144 vectors). It
    is made from blocks of float32 cosines; as numbers, it would be 32 times as large. Products of
    sketches, which have a quarter of the channels, find the strips that may hold a cosine above
    `theta`; no other cosines are computed. An entry that covers many vectors takes one step or a
    few, each of which reads the bits of one vector. Entries that cover few vectors are made many at
    a time.

    Args:
      vectors: vectors to cover.
      members: mask of the vectors to cover; contents of other vectors are ignored.
      weights: how often each member counts, at least 1.
      theta: threshold of cosines, for each row or for all. No cosine is above 1.
      capacity: E, the most entries.
      implementation: `"pallas"` (kernels make the graph, look for neighbours and for the nearest
        entries), `"interpret"` (the kernels, interpreted on any device), `"xla"`, or None: the
        kernels on a GPU that can run them, XLA elsewhere.

    Raises:
      ValueError: a capacity below 1; an unknown implementation, or one that the GPU is too old for.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import greedy_cover
      >>> vectors = jnp.array([[[0.0, 2.0], [3.0, 0.1], [1.0, 0.0]]])
      >>> ones = jnp.ones((1, 3), jnp.int32)
      >>> cover = greedy_cover(vectors, ones > 0, ones, theta=0.9, capacity=3)
      >>> cover.index.tolist(), cover.centers.tolist(), int(cover.count[0])
      ([[1, 0, 0]], [[1, 0, 3]], 2)
    """
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, got {capacity}")
    chosen = choose_implementation(implementation, vectors)

    def one_row(row: tuple[Array, Array, Array, Array]) -> Cover:
        return _cover(*row, capacity, chosen)

    theta = jnp.broadcast_to(jnp.asarray(theta, jnp.float32), vectors.shape[:1])
    return jax.lax.map(one_row, (vectors, members, weights, theta))


def _cover(vectors, members, weights, theta: Array, capacity: int, chosen: str) -> Cover:
    size = vectors.shape[0]
    tiles = Tiles.of(size, chosen)
    units, norms = directions(vectors)
    there = members & (norms > 0)
    # NaN in one vector must not hide the bounds of others.
    units = jnp.where(there[:, None], units, 0.0)
    weights = jnp.where(there, weights, 0).astype(jnp.int32)
    padded = [
        jnp.pad(x, [(0, tiles.size - size)] + [(0, 0)] * (x.ndim - 1))
        for x in (units, there, weights)
    ]
    # From here to the ranking, a vertex is a position in an order that fills few strips.
    number = order_of(padded[0], padded[1], tiles)
    ordered_units, ordered_there, ordered_weights = (x[number] for x in padded)
    graph = make_graph(ordered_units, ordered_weights, theta, tiles, chosen)
    center, value = search(graph, ordered_there, ordered_weights, number, capacity, chosen)

    # Orders entries by falling gain, as if made one by one; of equals, the first vector is first.
    rank = jnp.arange(tiles.size, dtype=jnp.int32)
    _, centers, position = jax.lax.sort((-value, number, rank), num_keys=2)
    count = jnp.minimum((value > 0).sum(dtype=jnp.int32), capacity)
    centers = jnp.pad(centers, (0, max(capacity - tiles.size, 0)))[:capacity]
    centers = jnp.where(jnp.arange(capacity, dtype=jnp.int32) < count, centers, size)
    # A vertex that no center stands for gets the number `capacity`, which no entry has.
    entry = jnp.append(jnp.zeros_like(rank).at[position].set(rank), capacity)[center]
    index = jnp.zeros_like(rank).at[number].set(entry)[:size]
    beyond = there & (index >= capacity)
    index = jnp.where(there, index, 0)
    entries = units[jnp.minimum(centers, size - 1)]
    if chosen == "xla":
        index = _put_nearest(index, beyond, units, entries, count, tiles.side)
    else:
        nearest, _ = nearest_of_wanted(
            units[None], beyond[None], entries[None], count[None], chosen == "interpret"
        )
        index = jnp.where(beyond, nearest[0], index)
    return Cover(index, centers, count, beyond.sum(dtype=jnp.int32), beyond)


def _put_nearest(
    index: Int[Array, " N"],
    wanted: Bool[Array, " N"],
    units: Float[Array, "N D"],
    entries: Float[Array, "E D"],
    count: Int[Array, ""],
    side: int,
) -> Int[Array, " N"]:
    """Gives wanted vectors the nearest of `count` entries, `side` vectors at a time."""
    size = units.shape[0]
    side = min(side, size)

    def block(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        remaining, index = carry
        # The block begins with the first remaining vector, but no later than the last whole block.
        start = jnp.minimum(first_of(remaining), size - side)
        in_block = block_of(remaining, start, side)
        nearest, _ = nearest_directions(block_of(units, start, side), entries, count)
        nearest = jnp.where(in_block, nearest, block_of(index, start, side))
        index = jax.lax.dynamic_update_slice_in_dim(index, nearest, start, 0)
        done = jnp.zeros(side, bool)
        return jax.lax.dynamic_update_slice_in_dim(remaining, done, start, 0), index

    return jax.lax.while_loop(lambda carry: any_of(carry[0]), block, (wanted, index))[1]
