"""Kernels of a greedy cover: the bits of its graph, and lists of neighbours."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels.base import route
from pallas_kernels.base.kernel_parts import dot, program_part, zero
from pallas_kernels.base.tiles import SMALLEST, power_of_two
from pallas_kernels.formats.packed_bits import WORD

SIDE = 64  # vectors on each side of a tile of cosines: two words of bits
CHANNELS = 64  # channels of vectors that are multiplied at a time
TILES = 16  # adjacent tiles of a program
LOOKED_AT, WORDS = 256, 8  # words that are skipped if all are 0, and words whose bits are then read


def neighbour_bits(
    units: Float[Array, "N D"],
    sketch: Float[Array, "N C"],
    there: Bool[Array, " N"],
    theta: Array,
    bound: Array,
    interpret: bool,
) -> UInt32[Array, "N W"]:
    """Returns bits: bit n of row m tells whether the cosine of vectors m and n is above theta.

    Bit m of row m is 0. Each pair is compared once, so that both vectors get the same answer. No
    cosine of a tile is computed if no product of its sketches is above `bound`.

    Args:
      units: float32 unit vectors, a whole number of `SIDE`.
      sketch: short vectors, whose products bound the cosines from above.
      there: which vectors have neighbours at all.
    """
    size = units.shape[0]
    strips, limits = size // SIDE, jnp.stack((theta, bound)).astype(jnp.float32)
    out = jax.ShapeDtypeStruct((size, size // WORD), jnp.int32)
    bits = route.pallas_call(
        _graph_kernel,
        grid=(strips, pl.cdiv(strips, TILES)),
        in_specs=[program_part(x, ()) for x in (units, sketch, there, limits)],
        out_specs=program_part(out, ()),
        out_shape=out,
        num_stages=1,
        interpret=interpret,
        name="cover_graph",
    )(units, sketch, there.astype(jnp.int32), limits)
    return jax.lax.bitcast_convert_type(bits, jnp.uint32)


def _graph_kernel(units, sketch, there, limits, bits):
    """Makes some tiles of a strip on and above the diagonal, and their transposes."""
    i, group = pl.program_id(0), pl.program_id(1)
    side = jnp.arange(SIDE, dtype=jnp.int32)
    word = jnp.arange(SIDE // WORD, dtype=jnp.int32)
    place = jax.lax.rem(side, np.int32(WORD))
    row = i * SIDE + side
    theta, bound = limits[0], limits[1]
    row_there = route.load(there.at[row]) > 0

    def product(x, row, column):
        """Multiplies rows of `x`, some channels at a time."""
        step = min(CHANNELS, max(SMALLEST, power_of_two(x.shape[1])))

        def add(c, total):
            channel = c * step + jnp.arange(step, dtype=jnp.int32)[None, :]
            a, b = (
                route.load(
                    x.at[r[:, None], channel], mask=channel < x.shape[1], other=zero(x.dtype)
                )
                for r in (row, column)
            )
            return total + dot(a, b.T)

        none = jnp.zeros((SIDE, SIDE), jnp.float32)
        return jax.lax.fori_loop(0, pl.cdiv(x.shape[1], step), add, none)

    def tile(j, done):
        column = j * SIDE + side

        def compare(_, near):
            # Rounding must not bring a cosine above 1.
            cosine = jnp.minimum(product(units, row, column), 1.0)
            near = (cosine > theta) & (row[:, None] < column[None, :])
            column_there = route.load(there.at[column]) > 0
            return (near & row_there[:, None] & column_there[None, :]).astype(jnp.int32)

        may_be_near = product(sketch, row, column).max() > bound
        near = jax.lax.fori_loop(
            np.int32(0), may_be_near.astype(jnp.int32), compare, jnp.zeros((SIDE, SIDE), jnp.int32)
        )
        near = near + jnp.where(i == j, near.T, 0)  # a tile on the diagonal is its own transpose
        of_rows = (near << place[None, :]).reshape(SIDE, SIDE // WORD, WORD).sum(2)
        of_columns = (near << place[:, None]).reshape(SIDE // WORD, WORD, SIDE).sum(1)
        words = np.int32(SIDE // WORD)
        route.store(bits.at[row[:, None], j * words + word[None, :]], of_rows)
        route.store(bits.at[column[None, :], i * words + word[:, None]], of_columns)
        return done + 1

    first = jnp.maximum(i, group * TILES)
    last = jnp.minimum((group + 1) * TILES, np.int32(units.shape[0] // SIDE))
    jax.lax.fori_loop(first, last, tile, np.int32(0))


def neighbour_lists(
    bits: UInt32[Array, "V W"],
    uncovered: Bool[Array, " N"],
    wanted: Bool[Array, " V"],
    length: int,
    interpret: bool,
) -> Int[Array, "V F"]:
    """Lists the first `length` uncovered neighbours of each wanted vertex; N for none."""
    lists = jax.ShapeDtypeStruct((bits.shape[0], length), jnp.int32)
    wanted, uncovered = (x.astype(jnp.int32) for x in (wanted, uncovered))
    return route.pallas_call(
        functools.partial(_list_kernel, length=length),
        grid=bits.shape[:1],
        in_specs=[
            program_part(bits, (0,)),
            program_part(uncovered, ()),
            program_part(wanted, (0,)),
        ],
        out_specs=program_part(lists, (0,)),
        out_shape=lists,
        num_stages=1,
        interpret=interpret,
        name="neighbour_lists",
    )(jax.lax.bitcast_convert_type(bits, jnp.int32), uncovered, wanted)


def _list_kernel(bits, uncovered, wanted, lists, *, length: int):
    """Makes the list of a vertex from its row of bits."""
    words, size = bits.shape[0], uncovered.shape[0]
    entry = jnp.arange(power_of_two(length), dtype=jnp.int32)
    lane = jnp.arange(WORDS * WORD, dtype=jnp.int32)
    at, place = jax.lax.div(lane, np.int32(WORD)), jax.lax.rem(lane, np.int32(WORD))

    def load(word):
        return route.load(bits.at[word], mask=word < words, other=np.int32(0))

    def any_in(word):
        return (load(word) != 0).astype(jnp.int32).max()

    def put(first):
        """Appends the neighbours of some words from `first` on."""

        def add(_, carry):
            count, listed = carry
            vertex = (first + at) * WORD + place
            near = ((load(first + at) >> place) & 1) > 0
            near = near & (route.load(uncovered.at[vertex], mask=near, other=np.int32(0)) > 0)
            number = count + jnp.cumsum(near.astype(jnp.int32), dtype=jnp.int32) - 1
            here = near[:, None] & (number[:, None] == entry[None, :])
            listed = listed + jnp.where(here, vertex[:, None] - size, 0).sum(0, dtype=jnp.int32)
            return count + near.astype(jnp.int32).sum(dtype=jnp.int32), listed

        return add

    def look(i, carry):
        def look_closer(j, carry):
            first = i * LOOKED_AT + j * WORDS
            any_bit = any_in(first + jnp.arange(WORDS, dtype=jnp.int32))
            return jax.lax.fori_loop(np.int32(0), any_bit, put(first), carry)

        some = any_in(i * LOOKED_AT + jnp.arange(LOOKED_AT, dtype=jnp.int32))
        rounds = some * np.int32(LOOKED_AT // WORDS)
        return jax.lax.fori_loop(np.int32(0), rounds, look_closer, carry)

    rounds = jnp.where(wanted[...] > 0, np.int32(pl.cdiv(words, LOOKED_AT)), np.int32(0))
    none = np.int32(0), jnp.full_like(entry, size)
    _, listed = jax.lax.fori_loop(np.int32(0), rounds, look, none)
    route.store(lists.at[entry], listed, mask=entry < length)
