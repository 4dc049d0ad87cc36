"""The graph of a greedy cover, whose bits tell which vectors are neighbours."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels.base.annotations import NoneElsewhere
from pallas_kernels.base.rows import block_of
from pallas_kernels.base.varying import varying
from pallas_kernels.formats.packed_bits import WORD, pack_bits
from pallas_kernels.grouping.cover_kernels import neighbour_bits

# Cosines that are held at a time: on CPU, so few that they nearly stay in its caches. Elsewhere
# 256 MB, since each step of a loop costs a launch there.
COSINES = 2**20
ACCELERATOR_COSINES = 2**26
# Rows of a block whose cosines are computed or left out together: whole words, and as many as a
# tile and a block of the kernels have.
STRIP = 64
PIVOTS = 1024  # vectors by which all others are ordered
SKETCH = 0.25  # share of channels in a sketch; twice as many rule out hardly more
MARGIN = 1e-4  # more than the rounding error of products of sketches


def first_of(x: Bool[Array, " N"]) -> Int[Array, ""]:
    """Returns the lowest index that is true, 0 if none is."""
    return jax.lax.argmax(x, 0, jnp.int32)


def any_of(x: Bool[Array, " N"]) -> Bool[Array, ""]:
    """Returns whether any is true, by one kernel; `any` takes three."""
    return x[first_of(x)]


class Tiles(NamedTuple):
    """Division of N x N cosines, N rounded up, into `number`² tiles of `side`² cosines."""

    number: int
    side: int

    @classmethod
    def of(cls, size: int, chosen: str) -> Tiles:
        """Makes as few tiles of whole strips as can be; one tile's cosines are held at a time."""
        on_cpu = chosen == "xla" and jax.default_backend() == "cpu"
        number = -(-size // math.isqrt(COSINES if on_cpu else ACCELERATOR_COSINES))
        return cls(number, -(-size // (number * STRIP)) * STRIP)

    @property
    def size(self) -> int:
        """N, rounded up."""
        return self.number * self.side

    def block(self, x: Array, number: Array) -> Array:
        """Returns the part of `x` for one block of `side` vectors."""
        return block_of(x, number * self.side, self.side)


class Graph(NamedTuple):
    """Neighbours of each vertex; a vertex is not its own neighbour here.

    Args:
      bits: tile [I, J] has a row for each vertex of block I, with a bit for each vertex of block J.
        The kernel makes a single tile.
      filled: [J, N], whether a vertex has neighbours in block J; None where kernels look for them.
      gain: total weight of a vertex and its neighbours.
    """

    bits: UInt32[Array, "M M T W"]
    filled: Bool[Array, "M N"] | NoneElsewhere
    gain: Int[Array, " N"]


def _pack_columns(bits: Bool[Array, "R N"]) -> UInt32[Array, "V N"]:
    """Packs the bits of columns into words, the lowest first."""
    rows, columns = bits.shape
    bits = bits.reshape(rows // WORD, WORD, columns).astype(jnp.uint32)
    place = jnp.arange(WORD, dtype=jnp.uint32)[None, :, None]
    return (bits << place).sum(1, dtype=jnp.uint32)


def order_of(
    units: Float[Array, "N D"], there: Bool[Array, " N"], tiles: Tiles
) -> Int[Array, " N"]:
    """Returns an order: members first, and vectors with the same nearest pivot together."""
    pivots = units[:: -(-tiles.size // PIVOTS)]
    number = jnp.arange(pivots.shape[0], dtype=jnp.int32)[:, None]

    def nearest(block: Float[Array, "T D"]) -> Array:
        cosine = jnp.dot(pivots, block.T)
        return jnp.where(cosine == cosine.max(0)[None], number, number.size).min(0)

    cell = jax.lax.map(nearest, units.reshape(tiles.number, tiles.side, -1)).reshape(-1)
    return jnp.argsort(jnp.where(there, cell, number.size), stable=True).astype(jnp.int32)


def sketch_of(units: Float[Array, "N D"]) -> Float[Array, "N C"]:
    """Returns short vectors whose products bound the cosines from above.

    A sketch holds a vector's components in the directions in which all vectors are longest, and the
    length of the remaining part. The product of two remaining parts is at most that of their
    lengths.
    """
    dim = units.shape[1]
    square = jnp.dot(units.T, units, precision="highest")
    turned = jnp.dot(units, jnp.linalg.eigh(square)[1], precision="highest")
    short = max(int(dim * SKETCH), 1)
    rest, longest = turned[:, : dim - short + 1], turned[:, dim - short + 1 :]
    return jnp.concatenate([longest, jnp.sqrt((rest * rest).sum(1, keepdims=True))], axis=1)


def make_graph(
    units: Float[Array, "N D"],
    weights: Int[Array, " N"],
    theta: Array,
    tiles: Tiles,
    chosen: str,
) -> Graph:
    """Makes the graph of unit vectors, by the chosen implementation.

    Zero vectors have no neighbours. Each pair is compared once, in the tiles on the diagonal and
    above it, so that both vectors get the same answer. One product of sketches rules out most
    strips of a tile.
    """
    number, side = tiles.number, tiles.side
    sketch = sketch_of(units)
    if chosen != "xla":
        bound = theta - MARGIN
        bits = neighbour_bits(units, sketch, weights > 0, theta, bound, chosen == "interpret")
        place = jnp.arange(WORD, dtype=jnp.uint32)[None, None]
        near = (bits[..., None] >> place & 1).astype(jnp.int32)
        gain = weights + (near * weights.reshape(1, -1, WORD)).sum((1, 2), dtype=jnp.int32)
        return Graph(bits[None, None], None, gain)

    def tile(i: Array, j: Array, graph: Graph) -> Graph:
        i, j = jnp.int32(i), jnp.int32(j)  # with x64 loops count in int64
        zero = jnp.zeros_like(i)
        bound = jnp.dot(tiles.block(sketch, i), tiles.block(sketch, j).T, precision="highest")
        bound = bound.reshape(side // STRIP, STRIP, side).max(1).max(1)

        def write(carry: tuple[Array, Graph]) -> tuple[Array, Graph]:
            remaining, (bits, filled, gain) = carry
            rows, columns, gain = _tile(units, weights, theta, tiles, (i, j), remaining, gain)
            bits = jax.lax.dynamic_update_slice(bits, columns[None, None], (j, i, zero, zero))
            # A tile on the diagonal is its own transpose, so it takes the bits of rows and columns.
            rows |= jnp.where(i == j, columns, 0)
            bits = jax.lax.dynamic_update_slice(bits, rows[None, None], (i, j, zero, zero))
            for block, neighbours, words in ((j, i, columns), (i, j, rows)):
                any_bit = (words != 0).any(1)[None]
                filled = jax.lax.dynamic_update_slice(filled, any_bit, (neighbours, block * side))
            return jnp.zeros_like(remaining), Graph(bits, filled, gain)

        # Uses a loop of one round or none, since the result of a conditional would be a copy.
        start = (bound > theta - MARGIN, graph)
        return jax.lax.while_loop(lambda carry: any_of(carry[0]), write, start)[1]

    def line(i: Array, graph: Graph) -> Graph:
        return jax.lax.fori_loop(i, number, functools.partial(tile, i), graph)

    bits = jnp.zeros((number, number, side, side // WORD), jnp.uint32)
    graph = Graph(bits, jnp.zeros((number, tiles.size), bool), weights)
    graph = varying(graph, units, weights, theta)
    return jax.lax.fori_loop(0, number, line, graph)


def _tile(
    units: Float[Array, "N D"],
    weights: Int[Array, " N"],
    theta: Array,
    tiles: Tiles,
    at: tuple[Array, Array],
    remaining: Bool[Array, " P"],
    gain: Int[Array, " N"],
) -> tuple[UInt32[Array, "T W"], UInt32[Array, "T W"], Int[Array, " N"]]:
    """Returns bits of a tile's rows and columns from the remaining strips, and all gains."""
    first_row, first_column = at[0] * tiles.side, at[1] * tiles.side
    column = first_column + jnp.arange(tiles.side, dtype=jnp.int32)[None]
    units_there, weights_there = (tiles.block(x, at[1]) for x in (units, weights))

    def strip(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        remaining, rows, columns, gain = carry
        first = first_of(remaining)
        start = first_row + first * STRIP
        row = start + jnp.arange(STRIP, dtype=jnp.int32)[:, None]
        units_here, weights_here = (block_of(x, start, STRIP) for x in (units, weights))
        cosine = jnp.dot(units_here, units_there.T, precision="highest")
        # Rounding must not bring a cosine above 1.
        near = (jnp.minimum(cosine, 1.0) > theta) & (row < column)
        near &= (weights_here > 0)[:, None] & (weights_there > 0)[None]
        rows = jax.lax.dynamic_update_slice_in_dim(rows, pack_bits(near), first * STRIP, 0)
        down = first * (STRIP // WORD)
        columns = jax.lax.dynamic_update_slice_in_dim(columns, _pack_columns(near), down, 0)
        weigh = jnp.where(near, weights_there[None], 0).sum(1, dtype=jnp.int32)
        gain = _add(gain, start, weigh)
        weigh = jnp.where(near, weights_here[:, None], 0).sum(0, dtype=jnp.int32)
        return remaining.at[first].set(False), rows, columns, _add(gain, first_column, weigh)

    words = jnp.zeros((tiles.side, tiles.side // WORD), jnp.uint32)
    start = varying((remaining, words, words.T, gain), units, remaining, gain)
    _, rows, columns, gain = jax.lax.while_loop(lambda carry: any_of(carry[0]), strip, start)
    return rows, columns.T, gain


def _add(x: Array, start: Array, terms: Array) -> Array:
    part = block_of(x, start, terms.shape[0])
    return jax.lax.dynamic_update_slice_in_dim(x, part + terms, start, 0)
