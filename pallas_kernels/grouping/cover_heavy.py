"""A kernel for the entries of a greedy cover that come one by one."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from pallas_kernels.base import route
from pallas_kernels.base.kernel_parts import own_part
from pallas_kernels.base.tiles import power_of_two
from pallas_kernels.formats.packed_bits import WORD, pack_bits

BLOCK = 64  # vertices of which the best one is remembered; their number is a multiple of it
ZERO, NONE, LAST = np.int32(0), np.int32(-1), np.int32(np.iinfo(np.int32).max)


def heavy_entries(
    bits: UInt32[Array, "N W"],
    uncovered: Bool[Array, " N"],
    weights: Int[Array, " N"],
    number: Int[Array, " N"],
    gain: Int[Array, " N"],
    *,
    few: int,
    capacity: int,
    interpret: bool,
) -> tuple[Array, Array, Array, Array, Array]:
    """The entries of the greatest gain, one by one, while a gain may be more than `few`.

    One launch of one program: each entry depends on all that come before. The best vertex of each
    block is remembered with its bound and looked for again when it was used or covered. Bounds only
    fall, so the highest of them that still holds is the highest of all.

    Args:
      bits: of the graph; a vertex is not its own neighbour there.
      uncovered: vertices that may be covered.
      number: decides between equal gains.
      gain: upper bounds of what vertices and their uncovered neighbours weigh; 0 where there is no
        vertex.

    Returns:
      `[N]` each: which vertices are uncovered still, their bounds, the entry that covers each (N:
      none), and the gain of each entry; and how many entries there are.
    """
    size = number.shape[0]
    words = pack_bits(uncovered).view(jnp.int32)
    heavy = jnp.where(uncovered & (gain > weights) & (gain > few), gain, NONE)
    vertex = jnp.arange(size, dtype=jnp.int32)
    by_block, numbers, vertices = (x.reshape(-1, BLOCK) for x in (heavy, number, vertex))
    tops = _best(by_block, numbers, vertices, 1)
    state = gain, jnp.full_like(gain, size), jnp.zeros_like(gain)
    given = bits.view(jnp.int32), words, weights, number, *tops, *state
    shapes = (*state, jnp.zeros(1, jnp.int32))
    gain, center, value, count = route.pallas_call(
        functools.partial(_kernel, few=few, capacity=capacity, interpret=interpret),
        grid=(1,),
        in_specs=[own_part(x, ()) for x in given],
        out_specs=[own_part(x, ()) for x in shapes],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes],
        input_output_aliases={len(given) - 3 + n: n for n in range(3)},
        num_stages=1,
        interpret=interpret,
        name="heavy_entries",
    )(*given)
    return uncovered & (center == size), gain, center, value, count[0]


def _best(score, number, vertex, axis: int):
    """The highest score, and number and vertex of the one with the lowest number that has it."""
    best = score.max(axis, keepdims=True)
    first = jnp.where(score == best, number, LAST).min(axis, keepdims=True)
    own = jnp.where((score == best) & (number == first), vertex, LAST).min(axis)
    return best.max(axis), first.min(axis), own


def _kernel(
    bits, words, weights, number, top, top_number, top_vertex, *refs,
    few: int, capacity: int, interpret: bool,
):  # fmt: skip
    """All entries that may cover more than a few."""
    gain, center, value, count = refs[3:]  # the first three are the same memory
    size, row_words = number.shape[0], bits.shape[1]
    lane = jnp.arange(power_of_two(row_words), dtype=jnp.int32)
    block = jnp.arange(power_of_two(top.shape[0]), dtype=jnp.int32)
    inside = jnp.arange(BLOCK, dtype=jnp.int32)
    is_word, is_block = lane < row_words, block < top.shape[0]

    def load(ref, at, wanted, other=ZERO):
        return route.load(ref.at[at], mask=wanted, other=other)

    def one(ref, at, x, wanted):
        """Stores one number."""
        route.store(ref.at[jnp.full((1,), at)], jnp.full((1,), x), mask=jnp.full((1,), wanted))

    def has_bit(words, k):
        return ((words >> k) & 1) > 0

    def goes_on(carry):
        best, made = carry[0].max(), carry[4]
        return (best >= 0) & (made < capacity)

    def step(carry):
        top, top_number, top_vertex, uncovered, made = carry
        best, _, vertex = _best(top, top_number, top_vertex, 0)
        own = jax.lax.div(vertex, np.int32(BLOCK))
        itself = jnp.where(lane == jax.lax.div(vertex, np.int32(WORD)), 1, 0)
        itself = (itself << jax.lax.rem(vertex, np.int32(WORD))) & uncovered
        there = jnp.where(itself != 0, np.int32(1), np.int32(0)).max() > 0
        near = (load(bits, (vertex, lane), is_word) & uncovered) | itself

        def weigh(k, total):
            return total + load(weights, lane * WORD + k, has_bit(near, k))

        none = jnp.zeros_like(lane)
        found = jax.lax.fori_loop(np.int32(0), np.int32(WORD), weigh, none).sum(dtype=jnp.int32)
        holds = there & (found == best)

        def cover(k, done):
            route.store(center.at[lane * WORD + k], none + vertex, mask=has_bit(near, k))
            return done + 1

        rounds = jnp.where(holds, np.int32(WORD), np.int32(0))
        jax.lax.fori_loop(np.int32(0), rounds, cover, np.int32(0))
        one(gain, vertex, found, there)
        one(value, vertex, found, holds)
        if not interpret:
            route.debug_barrier()  # other threads read below what was stored above
        here = own * BLOCK + inside
        bounds, weight = load(gain, here, here < size), load(weights, here, here < size)
        open_ = load(center, here, here < size) == size
        heavy = jnp.where(open_ & (bounds > weight) & (bounds > few), bounds, NONE)
        new = _best(heavy, load(number, here, here < size), here, 0)
        old = top, top_number, top_vertex
        top, top_number, top_vertex = (
            jnp.where(block == own, a, b) for a, b in zip(new, old, strict=True)
        )
        uncovered = jnp.where(holds, uncovered & ~near, uncovered)
        return top, top_number, top_vertex, uncovered, made + holds.astype(jnp.int32)

    tops = (
        load(x, block, is_block, other)
        for x, other in ((top, NONE), (top_number, LAST), (top_vertex, LAST))
    )
    carry = *tops, load(words, lane, is_word), np.int32(0)
    *_, made = jax.lax.while_loop(goes_on, step, carry)
    one(count, np.int32(0), made, made >= 0)
