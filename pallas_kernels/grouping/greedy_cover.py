"""A greedy cover: few directions that stand for many vectors."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels.base.rows import block_of
from pallas_kernels.formats.packed_bits import WORD, pack_bits
from pallas_kernels.grouping.nearest_entries import directions, nearest_directions

# Cosines that are held at a time: on CPU, so few that they stay near its caches; elsewhere 256 MB,
# since every step of a loop costs a launch there.
COSINES = 2**20
ACCELERATOR_COSINES = 2**26
STRIP = 64  # rows of a block whose cosines are computed or left out together; whole words
PIVOTS = 1024  # vectors that the others are ordered by
SKETCH = 0.25  # share of channels that a sketch has; twice as many rule out hardly more
MARGIN = 1e-4  # more than the rounding error of products of sketches
FEW = 32  # vertices whose gain is no more than this become entries many at a time


class Cover(NamedTuple):
    """Which vectors became entries, and which entry stands for each vector.

    Args:
      index: the entry of every vector; 0 where it is no member or zero.
      centers: the vector that became each entry; N from entry `count` on.
      count: entries.
      overflow: members that no entry is near enough to, because there was no room for more.
    """

    index: Int[Array, "B N"]
    centers: Int[Array, "B E"]
    count: Int[Array, " B"]
    overflow: Int[Array, " B"]


def greedy_cover(
    vectors: Float[Array, "B N D"],
    members: Bool[Array, "B N"],
    weights: Int[Array, "B N"],
    *,
    theta: float | Float[Array, " B"],
    capacity: int,
) -> Cover:
    """Covers vectors with as few of their directions as greed finds.

    Two vectors are neighbours where their cosine is above `theta`, and every vector is its own
    neighbour. In each step, the uncovered vector whose uncovered neighbours weigh most becomes an
    entry, the first of equals. It stands for those neighbours, which are covered from then on. Once
    there is no room for another entry, every vector that is left goes to the entry with the highest
    cosine, the first of equals. A zero vector has no direction and no neighbours.

    The graph is held as bits, N² / 8 bytes for one row at a time (8.6 GB for 262,144 vectors), made
    from blocks of float32 cosines: as numbers it would be 32 times as large. Products of sketches,
    which have a quarter of the channels, find the strips that may hold a cosine above `theta`; no
    other cosines are computed. An entry that covers many vectors takes one step or a few, each of
    which reads the bits of one vector. Entries that cover few are made many at a time.

    Args:
      vectors: what to cover.
      members: which of them; nothing that stands in the others is looked at.
      weights: how often each of them counts, at least 1.
      theta: threshold of cosines, of each row or of all. No cosine is above 1.
      capacity: E, the most entries.

    Raises:
      ValueError: a capacity below 1.

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

    def one_row(row: tuple[Array, Array, Array, Array]) -> Cover:
        return _cover(*row, capacity)

    theta = jnp.broadcast_to(jnp.asarray(theta, jnp.float32), vectors.shape[:1])
    return jax.lax.map(one_row, (vectors, members, weights, theta))


def _most() -> int:
    """How many cosines may be held at a time."""
    return COSINES if jax.default_backend() == "cpu" else ACCELERATOR_COSINES


def _put_nearest(
    index: Int[Array, " N"],
    wanted: Bool[Array, " N"],
    units: Float[Array, "N D"],
    centers: Int[Array, " E"],
    count: Int[Array, ""],
    side: int,
) -> Int[Array, " N"]:
    """Gives wanted vectors the nearest of `count` centers, `side` vectors at a time."""
    size = units.shape[0]
    side = min(side, size)
    entries = units[jnp.minimum(centers, size - 1)]

    def block(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        left, index = carry
        # The block that begins with the first vector that is left, or the last whole one.
        start = jnp.minimum(_first(left), size - side)
        own = block_of(left, start, side)
        nearest, _ = nearest_directions(block_of(units, start, side), entries, count)
        nearest = jnp.where(own, nearest, block_of(index, start, side))
        index = jax.lax.dynamic_update_slice_in_dim(index, nearest, start, 0)
        done = jnp.zeros(side, bool)
        return jax.lax.dynamic_update_slice_in_dim(left, done, start, 0), index

    return jax.lax.while_loop(lambda carry: _some(carry[0]), block, (wanted, index))[1]


def _first(x: Bool[Array, " N"]) -> Int[Array, ""]:
    """The lowest number of those that are true, 0 if none is."""
    return jax.lax.argmax(x, 0, jnp.int32)


def _some(x: Bool[Array, " N"]) -> Bool[Array, ""]:
    """Whether any is true, by one kernel; `any` takes three."""
    return x[_first(x)]


class _Tiles(NamedTuple):
    """The N x N cosines, N rounded up, as `number`² tiles of `side`² cosines each."""

    number: int
    side: int

    @classmethod
    def of(cls, size: int) -> _Tiles:
        """As few tiles as the cosines that may be held allow, each of whole strips."""
        number = -(-size // math.isqrt(_most()))
        return cls(number, -(-size // (number * STRIP)) * STRIP)

    @property
    def size(self) -> int:
        """N, rounded up."""
        return self.number * self.side

    def block(self, x: Array, number: Array) -> Array:
        """What belongs to one block of `side` vectors."""
        return block_of(x, number * self.side, self.side)


class _Graph(NamedTuple):
    """Which vertices are neighbours; a vertex is not its own here.

    Args:
      bits: tile [I, J] has a row for each vertex of block I, with a bit for each of block J.
      filled: [J, N], whether a vertex has neighbours in block J.
      gain: what a vertex and its neighbours weigh.
    """

    bits: UInt32[Array, "M M T W"]
    filled: Bool[Array, "M N"]
    gain: Int[Array, " N"]


def _unpack(words: UInt32[Array, " W"]) -> Bool[Array, " N"]:
    """Bits of words, the lowest first."""
    bits = words[:, None] >> jnp.arange(WORD, dtype=jnp.uint32)[None] & jnp.uint32(1)
    return bits.reshape(-1) > 0


def _pack_columns(bits: Bool[Array, "R N"]) -> UInt32[Array, "V N"]:
    """Words of the bits of columns, the lowest first."""
    rows, columns = bits.shape
    bits = bits.reshape(rows // WORD, WORD, columns).astype(jnp.uint32)
    place = jnp.arange(WORD, dtype=jnp.uint32)[None, :, None]
    return (bits << place).sum(1, dtype=jnp.uint32)


def _order(units: Float[Array, "N D"], there: Bool[Array, " N"], tiles: _Tiles) -> Int[Array, " N"]:
    """Members first; those that are nearest to the same one of a few pivots stand together."""
    pivots = units[:: -(-tiles.size // PIVOTS)]
    number = jnp.arange(pivots.shape[0], dtype=jnp.int32)[:, None]

    def nearest(block: Float[Array, "T D"]) -> Array:
        cosine = jnp.dot(pivots, block.T)
        return jnp.where(cosine == cosine.max(0)[None], number, number.size).min(0)

    cell = jax.lax.map(nearest, units.reshape(tiles.number, tiles.side, -1)).reshape(-1)
    return jnp.argsort(jnp.where(there, cell, number.size), stable=True).astype(jnp.int32)


def _sketch(units: Float[Array, "N D"]) -> Float[Array, "N C"]:
    """Short vectors whose products bound the cosines from above.

    A sketch holds a vector's components in the directions in which all vectors are longest, and the
    length of the rest. The product of two rests is no larger than that of their lengths.
    """
    dim = units.shape[1]
    square = jnp.dot(units.T, units, precision="highest")
    turned = jnp.dot(units, jnp.linalg.eigh(square)[1], precision="highest")
    short = max(int(dim * SKETCH), 1)
    rest, part = turned[:, : dim - short + 1], turned[:, dim - short + 1 :]
    return jnp.concatenate([part, jnp.sqrt((rest * rest).sum(1, keepdims=True))], axis=1)


def _graph(
    units: Float[Array, "N D"], weights: Int[Array, " N"], theta: Array, tiles: _Tiles
) -> _Graph:
    """Makes the graph of unit vectors; zero vectors have no neighbours.

    Each pair is compared once, in the tiles on the diagonal and above it, so that both vectors get
    the same answer. One product of sketches rules out most strips of a tile.
    """
    number, side = tiles.number, tiles.side
    sketch = _sketch(units)

    def tile(i: Array, j: Array, graph: _Graph) -> _Graph:
        bound = jnp.dot(tiles.block(sketch, i), tiles.block(sketch, j).T, precision="highest")
        bound = bound.reshape(side // STRIP, STRIP, side).max(1).max(1)

        def write(carry: tuple[Array, _Graph]) -> tuple[Array, _Graph]:
            left, (bits, filled, gain) = carry
            rows, columns, gain = _tile(units, weights, theta, tiles, (i, j), left, gain)
            bits = jax.lax.dynamic_update_slice(bits, columns[None, None], (j, i, 0, 0))
            # A tile on the diagonal is its own transpose: it takes the bits of rows and of columns.
            rows |= jnp.where(i == j, columns, 0)
            bits = jax.lax.dynamic_update_slice(bits, rows[None, None], (i, j, 0, 0))
            for own, other, words in ((j, i, columns), (i, j, rows)):
                some = (words != 0).any(1)[None]
                filled = jax.lax.dynamic_update_slice(filled, some, (other, own * side))
            return jnp.zeros_like(left), _Graph(bits, filled, gain)

        # A loop of one round or none, since the result of a conditional would be a copy.
        start = (bound > theta - MARGIN, graph)
        return jax.lax.while_loop(lambda carry: _some(carry[0]), write, start)[1]

    def line(i: Array, graph: _Graph) -> _Graph:
        return jax.lax.fori_loop(i, number, functools.partial(tile, i), graph)

    bits = jnp.zeros((number, number, side, side // WORD), jnp.uint32)
    graph = _Graph(bits, jnp.zeros((number, tiles.size), bool), weights)
    return jax.lax.fori_loop(0, number, line, graph)


def _tile(
    units: Float[Array, "N D"],
    weights: Int[Array, " N"],
    theta: Array,
    tiles: _Tiles,
    at: tuple[Array, Array],
    left: Bool[Array, " P"],
    gain: Int[Array, " N"],
) -> tuple[UInt32[Array, "T W"], UInt32[Array, "T W"], Int[Array, " N"]]:
    """Bits of a tile's rows and of its columns, from the strips that are left; and all gains."""
    own, other = at[0] * tiles.side, at[1] * tiles.side
    column = other + jnp.arange(tiles.side, dtype=jnp.int32)[None]
    units_there, weights_there = (tiles.block(x, at[1]) for x in (units, weights))

    def strip(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        left, rows, columns, gain = carry
        first = _first(left)
        start = own + first * STRIP
        row = start + jnp.arange(STRIP, dtype=jnp.int32)[:, None]
        units_here, weights_here = (block_of(x, start, STRIP) for x in (units, weights))
        cosine = jnp.dot(units_here, units_there.T, precision="highest")
        # Rounding must not bring a cosine above 1.
        near = (jnp.minimum(cosine, 1.0) > theta) & (row < column)
        near &= (weights_here > 0)[:, None] & (weights_there > 0)[None]
        rows = jax.lax.dynamic_update_slice(rows, pack_bits(near), (first * STRIP, 0))
        down = (first * (STRIP // WORD), 0)
        columns = jax.lax.dynamic_update_slice(columns, _pack_columns(near), down)
        weigh = jnp.where(near, weights_there[None], 0).sum(1, dtype=jnp.int32)
        gain = _add(gain, start, weigh)
        weigh = jnp.where(near, weights_here[:, None], 0).sum(0, dtype=jnp.int32)
        return left.at[first].set(False), rows, columns, _add(gain, other, weigh)

    words = jnp.zeros((tiles.side, tiles.side // WORD), jnp.uint32)
    start = (left, words, words.T, gain)
    _, rows, columns, gain = jax.lax.while_loop(lambda carry: _some(carry[0]), strip, start)
    return rows, columns.T, gain


def _add(x: Array, start: Array, more: Array) -> Array:
    own = block_of(x, start, more.shape[0])
    return jax.lax.dynamic_update_slice_in_dim(x, own + more, start, 0)


class _Greed(NamedTuple):
    """The state of the search.

    Args:
      uncovered: vertices that no entry stands for yet.
      gain: an upper bound of what a vertex and its uncovered neighbours weigh.
      center: which vertex stands for each; N for none.
      value: the gain with which a vertex became an entry, else 0.
    """

    uncovered: Bool[Array, " N"]
    gain: Int[Array, " N"]
    center: Int[Array, " N"]
    value: Int[Array, " N"]

    def sharing(self, weights: Array) -> Bool[Array, " N"]:
        """Uncovered vertices whose gain is more than their own weight."""
        return self.uncovered & (self.gain > weights)


def _take_heavy(
    graph: _Graph, greed: _Greed, weights: Array, number: Array, capacity: int
) -> tuple[_Greed, Int[Array, ""]]:
    """Makes entries one by one while one may cover more than a few, and counts them.

    Gains only fall, so an old gain is an upper bound. Each step computes the gain of the vertex
    with the highest bound; where it is still the bound, no gain is higher. So a step reads one row
    of bits, instead of one for every covered vertex.
    """
    tiles = _Tiles(*graph.bits.shape[1:3])
    own = jnp.arange(tiles.size, dtype=jnp.int32)

    def heaviest(greed: _Greed) -> tuple[Array, Array]:
        """The highest gain of more than a few, else -1, and the first vertex that has it."""
        heavy = greed.sharing(weights) & (greed.gain > FEW)
        return _highest_first(jnp.where(heavy, greed.gain, -1), number)

    def goes_on(carry: tuple[_Greed, Array, Array, Array]) -> Bool[Array, ""]:
        return (carry[2] >= 0) & (carry[1] < capacity)

    def step(carry: tuple[_Greed, Array, Array, Array]) -> tuple[_Greed, Array, Array, Array]:
        greed, count, best, vertex = carry
        words = graph.bits[vertex // tiles.side, :, vertex % tiles.side]
        near = (_unpack(words.reshape(-1)) | (own == vertex)) & greed.uncovered
        gain = jnp.where(near, weights, 0).sum(dtype=jnp.int32)
        holds = gain == best
        covered = near & holds
        greed = _Greed(
            greed.uncovered & ~covered,
            greed.gain.at[vertex].set(gain),
            jnp.where(covered, vertex, greed.center),
            greed.value.at[vertex].set(jnp.where(holds, gain, 0)),
        )
        return greed, count + holds.astype(jnp.int32), *heaviest(greed)

    return jax.lax.while_loop(goes_on, step, (greed, jnp.int32(0), *heaviest(greed)))[:2]


def _highest_first(
    score: Int[Array, " N"], number: Int[Array, " N"]
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """The highest score, and the place of the one with the lowest number of those that have it."""

    def better(one: tuple[Array, ...], other: tuple[Array, ...]) -> tuple[Array, ...]:
        first = (one[0] > other[0]) | ((one[0] == other[0]) & (one[1] < other[1]))
        return tuple(jnp.where(first, a, b) for a, b in zip(one, other, strict=True))

    least, none = jnp.iinfo(jnp.int32).min, jnp.iinfo(jnp.int32).max
    place = jnp.arange(score.size, dtype=jnp.int32)
    given = score, number, place
    best, _, place = jax.lax.reduce(
        given, (jnp.int32(least), jnp.int32(none), jnp.int32(0)), better, (0,)
    )
    return best, place


def _lists(
    graph: _Graph, uncovered: Bool[Array, " N"], wanted: Bool[Array, " N"]
) -> Int[Array, "N F"]:
    """The uncovered neighbours of wanted vertices, of which each has fewer than FEW; N for none."""
    tiles = _Tiles(*graph.bits.shape[1:3])
    inside = jnp.arange(tiles.side, dtype=jnp.int32)
    block = jnp.arange(tiles.number, dtype=jnp.int32)[:, None]
    word = jnp.arange(tiles.side // WORD, dtype=jnp.int32)[None]
    open_words = pack_bits(uncovered.reshape(tiles.number, tiles.side))
    place = jnp.arange(FEW, dtype=jnp.int32)[None]

    def of_block(i: Array) -> Array:
        def next_bit(carry: tuple[Array, ...]) -> tuple[Array, ...]:
            words, j, found, lists = carry
            at = jnp.where(words != 0, word, word.size - 1).min(1)
            bits = words[inside, at]
            some = bits != 0
            lowest = jax.lax.population_count((bits & -bits) - 1).astype(jnp.int32)
            vertex = j * tiles.side + at * WORD + lowest
            put = some[:, None] & (place == found[:, None])
            lists = jnp.where(put, vertex[:, None], lists)
            words = jnp.where(word == at[:, None], words & (words - 1), words)
            return words, j, found + some.astype(jnp.int32), lists

        def more(carry: tuple[Array, ...]) -> Bool[Array, ""]:
            return _some((carry[0] != 0).reshape(-1))

        def next_tile(carry: tuple[Array, ...]) -> tuple[Array, ...]:
            left, found, lists = carry
            j = jax.lax.argmax(left, 0, jnp.int32)
            some = left[j, inside][:, None]
            words = jnp.where(some, graph.bits[i, j, inside] & open_words[j], 0)
            carry = (words, j, found, lists)
            _, _, found, lists = jax.lax.while_loop(more, next_bit, carry)
            return left & (block != j[None]), found, lists

        left = block_of(graph.filled, i * tiles.side, tiles.side, 1)
        left &= tiles.block(wanted, i)[None]
        empty = jnp.full((tiles.side, FEW), tiles.size, jnp.int32)
        start = (left, jnp.zeros(tiles.side, jnp.int32), empty)
        return jax.lax.while_loop(lambda c: _some(c[0].reshape(-1)), next_tile, start)[2]

    lists = jax.lax.map(of_block, jnp.arange(tiles.number, dtype=jnp.int32))
    return lists.reshape(tiles.size, FEW)


def _take_light(graph: _Graph, greed: _Greed, weights: Array, number: Array) -> _Greed:
    """Makes the entries that cover few, many at a time.

    A vertex that has the highest gain of all within two edges of it becomes an entry before any
    vertex that could change its gain, so that it need not wait for its turn.
    """
    size = number.size
    own = jnp.arange(size, dtype=jnp.int32)
    lists = _lists(graph, greed.uncovered, greed.sharing(weights))

    def around(x: Array, none: int) -> Array:
        return jnp.append(x, none)[lists]

    def highest(x: Array) -> Array:
        return jnp.maximum(x, around(x, -1).max(1))

    def gains(uncovered: Array) -> Array:
        return weights + around(jnp.where(uncovered, weights, 0), 0).sum(1, dtype=jnp.int32)

    def step(greed: _Greed) -> _Greed:
        # These gains are at most FEW, so that a gain and a vertex fit into one number.
        sharing = greed.sharing(weights)
        key = jnp.where(sharing, greed.gain * size + (size - 1 - number), -1)
        within_one = jnp.where(sharing, highest(key), -1)
        chosen = sharing & (highest(within_one) == key)
        center = jnp.where(greed.uncovered, highest(jnp.where(chosen, own, -1)), -1)
        uncovered = greed.uncovered & (center < 0)
        return _Greed(
            uncovered,
            gains(uncovered),
            jnp.where(center >= 0, center, greed.center),
            jnp.where(chosen, greed.gain, greed.value),
        )

    greed = greed._replace(gain=gains(greed.uncovered))
    return jax.lax.while_loop(lambda greed: _some(greed.sharing(weights)), step, greed)


def _search(
    graph: _Graph, there: Bool[Array, " N"], weights: Array, number: Array, capacity: int
) -> tuple[Int[Array, " N"], Int[Array, " N"]]:
    """Center and value of every vertex as in `_Greed`, of all that may be among the entries."""
    own, none = jnp.arange(number.size, dtype=jnp.int32), jnp.zeros_like(number)
    greed = _Greed(there, graph.gain, none + number.size, none)
    greed, count = _take_heavy(graph, greed, weights, number, capacity)
    greed = jax.lax.cond(
        count < capacity,
        lambda greed: _take_light(graph, greed, weights, number),
        lambda greed: greed,
        greed,
    )
    # A vertex without uncovered neighbours stands for itself alone.
    alone = greed.uncovered & ~greed.sharing(weights)
    return jnp.where(alone, own, greed.center), jnp.where(alone, weights, greed.value)


def _cover(vectors, members, weights, theta: Array, capacity: int) -> Cover:
    size = vectors.shape[0]
    tiles = _Tiles.of(size)
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
    number = _order(padded[0], padded[1], tiles)
    ordered_units, ordered_there, ordered_weights = (x[number] for x in padded)
    graph = _graph(ordered_units, ordered_weights, theta, tiles)
    center, value = _search(graph, ordered_there, ordered_weights, number, capacity)

    # The order in which entries come one by one: by falling gain, of equals the first vector first.
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
    index = _put_nearest(index, beyond, units, centers, count, tiles.side)
    return Cover(index, centers, count, beyond.sum(dtype=jnp.int32))
