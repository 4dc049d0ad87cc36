"""The search of a greedy cover, which makes vertices of its graph entries."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from pallas_kernels.base.rows import block_of
from pallas_kernels.base.varying import varying
from pallas_kernels.formats.packed_bits import WORD, pack_bits
from pallas_kernels.grouping.cover_graph import Graph, Tiles, any_of
from pallas_kernels.grouping.cover_heavy import heavy_entries
from pallas_kernels.grouping.cover_kernels import neighbour_lists

FEW = 32  # vertices with a gain of at most this become entries many at a time


def _unpack(words: UInt32[Array, " W"]) -> Bool[Array, " N"]:
    """Unpacks the bits of words, the lowest first."""
    bits = words[:, None] >> jnp.arange(WORD, dtype=jnp.uint32)[None] & jnp.uint32(1)
    return bits.reshape(-1) > 0


class Greed(NamedTuple):
    """The state of the search.

    Args:
      uncovered: vertices that no entry stands for yet.
      gain: upper bound of the weight of a vertex with its uncovered neighbours.
      center: the vertex that stands for each; N for none.
      value: the gain with which a vertex became an entry, else 0.
    """

    uncovered: Bool[Array, " N"]
    gain: Int[Array, " N"]
    center: Int[Array, " N"]
    value: Int[Array, " N"]

    def sharing(self, weights: Array) -> Bool[Array, " N"]:
        """Returns uncovered vertices whose gain is more than their own weight."""
        return self.uncovered & (self.gain > weights)


def _take_heavy(
    graph: Graph, greed: Greed, weights: Array, number: Array, capacity: int
) -> tuple[Greed, Int[Array, ""]]:
    """Makes entries one by one while one may cover more than a few, and counts them.

    Gains only fall, so an old gain is an upper bound. Each step computes the gain of the vertex
    with the highest bound; where it is still the bound, no gain is higher. So a step reads one row
    of bits, instead of one for every covered vertex.
    """
    tiles = Tiles(*graph.bits.shape[1:3])
    vertices = jnp.arange(tiles.size, dtype=jnp.int32)

    def heaviest(greed: Greed) -> tuple[Array, Array]:
        """Returns the highest gain of more than a few, else -1, and the first vertex with it."""
        heavy = greed.sharing(weights) & (greed.gain > FEW)
        return _highest_first(jnp.where(heavy, greed.gain, -1), number)

    def goes_on(carry: tuple[Greed, Array, Array, Array]) -> Bool[Array, ""]:
        return (carry[2] >= 0) & (carry[1] < capacity)

    def step(carry: tuple[Greed, Array, Array, Array]) -> tuple[Greed, Array, Array, Array]:
        greed, count, best, vertex = carry
        words = graph.bits[vertex // tiles.side, :, vertex % tiles.side]
        near = (_unpack(words.reshape(-1)) | (vertices == vertex)) & greed.uncovered
        gain = jnp.where(near, weights, 0).sum(dtype=jnp.int32)
        holds = gain == best
        covered = near & holds
        greed = Greed(
            greed.uncovered & ~covered,
            greed.gain.at[vertex].set(gain),
            jnp.where(covered, vertex, greed.center),
            greed.value.at[vertex].set(jnp.where(holds, gain, 0)),
        )
        return greed, count + holds.astype(jnp.int32), *heaviest(greed)

    start = varying((greed, jnp.int32(0), *heaviest(greed)), graph, greed)
    return jax.lax.while_loop(goes_on, step, start)[:2]


def _highest_first(
    score: Int[Array, " N"], number: Int[Array, " N"]
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Returns the highest score, and its place; of equal scores, that of the lowest number."""

    def better(x: tuple[Array, ...], y: tuple[Array, ...]) -> tuple[Array, ...]:
        x_first = (x[0] > y[0]) | ((x[0] == y[0]) & (x[1] < y[1]))
        return tuple(jnp.where(x_first, a, b) for a, b in zip(x, y, strict=True))

    least, none = jnp.iinfo(jnp.int32).min, jnp.iinfo(jnp.int32).max
    place = jnp.arange(score.size, dtype=jnp.int32)
    operands = score, number, place
    best, _, place = jax.lax.reduce(
        operands, (jnp.int32(least), jnp.int32(none), jnp.int32(0)), better, (0,)
    )
    return best, place


def _lists(
    graph: Graph, uncovered: Bool[Array, " N"], wanted: Bool[Array, " N"]
) -> Int[Array, "N F"]:
    """Lists the uncovered neighbours, fewer than FEW, of each wanted vertex; N for none."""
    tiles = Tiles(*graph.bits.shape[1:3])
    inside = jnp.arange(tiles.side, dtype=jnp.int32)
    block = jnp.arange(tiles.number, dtype=jnp.int32)[:, None]
    word = jnp.arange(tiles.side // WORD, dtype=jnp.int32)[None]
    open_words = pack_bits(uncovered.reshape(tiles.number, tiles.side))
    place = jnp.arange(FEW, dtype=jnp.int32)[None]

    def of_block(i: Array) -> Array:
        def next_bit(carry: tuple[Array, ...]) -> tuple[Array, ...]:
            words, j, count, lists = carry
            at = jnp.where(words != 0, word, word.size - 1).min(1)
            bits = words[inside, at]
            has_bit = bits != 0
            lowest = jax.lax.population_count((bits & -bits) - 1).astype(jnp.int32)
            vertex = j * tiles.side + at * WORD + lowest
            put = has_bit[:, None] & (place == count[:, None])
            lists = jnp.where(put, vertex[:, None], lists)
            words = jnp.where(word == at[:, None], words & (words - 1), words)
            return words, j, count + has_bit.astype(jnp.int32), lists

        def more(carry: tuple[Array, ...]) -> Bool[Array, ""]:
            return any_of((carry[0] != 0).reshape(-1))

        def next_tile(carry: tuple[Array, ...]) -> tuple[Array, ...]:
            tiles_left, count, lists = carry
            j = jax.lax.argmax(tiles_left, 0, jnp.int32)
            has_neighbours = tiles_left[j, inside][:, None]
            words = jnp.where(has_neighbours, graph.bits[i, j, inside] & open_words[j], 0)
            carry = (words, j, count, lists)
            _, _, count, lists = jax.lax.while_loop(more, next_bit, carry)
            return tiles_left & (block != j[None]), count, lists

        tiles_left = block_of(graph.filled, i * tiles.side, tiles.side, 1)
        tiles_left &= tiles.block(wanted, i)[None]
        empty = jnp.full((tiles.side, FEW), tiles.size, jnp.int32)
        start = varying((tiles_left, jnp.zeros(tiles.side, jnp.int32), empty), graph, tiles_left)
        return jax.lax.while_loop(lambda c: any_of(c[0].reshape(-1)), next_tile, start)[2]

    lists = jax.lax.map(of_block, jnp.arange(tiles.number, dtype=jnp.int32))
    return lists.reshape(tiles.size, FEW)


def _take_light(graph: Graph, greed: Greed, weights: Array, number: Array, chosen: str) -> Greed:
    """Makes the entries that cover few vertices, many at a time.

    A vertex that has the highest gain of all within two edges of it becomes an entry before any
    vertex that could change its gain, so that it need not wait for its turn.
    """
    size = number.size
    vertices = jnp.arange(size, dtype=jnp.int32)
    sharing = greed.sharing(weights)
    if chosen == "xla":
        lists = _lists(graph, greed.uncovered, sharing)
    else:
        bits = graph.bits[0, 0]
        lists = neighbour_lists(bits, greed.uncovered, sharing, FEW, chosen == "interpret")

    def around(x: Array, none: int) -> Array:
        return jnp.append(x, none)[lists]

    def highest(x: Array) -> Array:
        return jnp.maximum(x, around(x, -1).max(1))

    def gains(uncovered: Array) -> Array:
        return weights + around(jnp.where(uncovered, weights, 0), 0).sum(1, dtype=jnp.int32)

    def step(greed: Greed) -> Greed:
        # These gains are at most FEW, so that a gain and a vertex fit into one number.
        sharing = greed.sharing(weights)
        key = jnp.where(sharing, greed.gain * size + (size - 1 - number), -1)
        within_one = jnp.where(sharing, highest(key), -1)
        chosen = sharing & (highest(within_one) == key)
        center = jnp.where(greed.uncovered, highest(jnp.where(chosen, vertices, -1)), -1)
        uncovered = greed.uncovered & (center < 0)
        return Greed(
            uncovered,
            gains(uncovered),
            jnp.where(center >= 0, center, greed.center),
            jnp.where(chosen, greed.gain, greed.value),
        )

    greed = greed._replace(gain=gains(greed.uncovered))
    return jax.lax.while_loop(lambda greed: any_of(greed.sharing(weights)), step, greed)


def search(
    graph: Graph,
    there: Bool[Array, " N"],
    weights: Array,
    number: Array,
    capacity: int,
    chosen: str,
) -> tuple[Int[Array, " N"], Int[Array, " N"]]:
    """Returns center and value of each vertex, as in `Greed`, by the chosen implementation.

    All vertices that may be among the entries have a value.
    """
    vertices, none = jnp.arange(number.size, dtype=jnp.int32), jnp.zeros_like(number)
    greed = Greed(there, graph.gain, none + number.size, none)
    if chosen == "xla":
        greed, count = _take_heavy(graph, greed, weights, number, capacity)
    else:
        *state, count = heavy_entries(
            graph.bits[0, 0], there, weights, number, graph.gain, few=FEW, capacity=capacity,
            interpret=chosen == "interpret",
        )  # fmt: skip
        greed = Greed(*state)
    # Without room for more entries, the caller gives the remaining vectors to their nearest ones.
    greed = jax.lax.cond(
        count < capacity,
        lambda greed: _take_light(graph, greed, weights, number, chosen),
        lambda greed: greed,
        greed,
    )
    # A vertex without uncovered neighbours stands for itself alone.
    alone = greed.uncovered & ~greed.sharing(weights)
    return jnp.where(alone, vertices, greed.center), jnp.where(alone, weights, greed.value)
