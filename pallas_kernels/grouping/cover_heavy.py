"""A kernel for the entries of a greedy cover that come one by one."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from pallas_kernels.base import route
from pallas_kernels.base.kernel_parts import program_part
from pallas_kernels.base.tiles import power_of_two
from pallas_kernels.formats.packed_bits import WORD, pack_bits

BLOCK = 64  # vertices of a block, whose best one is remembered; divides the number of vertices
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
    """Makes the entries of the greatest gain, one by one, while a gain may be more than `few`.

    It is one launch of one program, since each entry depends on all that come before. The best
    vertex of each block is remembered with its bound, and searched again once it was used or
    covered. Bounds only fall, so the highest bound that still holds is the highest gain.

    Args:
      bits: bits of the graph; a vertex is not its own neighbour there.
      uncovered: vertices that may be covered.
      number: decides between equal gains; the lower number comes first.
      gain: upper bounds of the weight of vertices with their uncovered neighbours; 0 where there is
        no vertex.

    Returns:
      `[N]` each: vertices that are still uncovered, their bounds, the entry that covers each (N:
      none), and the gain of each entry; and the number of entries.
    """
    size = number.shape[0]
    words = pack_bits(uncovered).view(jnp.int32)
    heavy = jnp.where(uncovered & (gain > weights) & (gain > few), gain, NONE)
    vertex = jnp.arange(size, dtype=jnp.int32)
    by_block, numbers, vertices = (x.reshape(-1, BLOCK) for x in (heavy, number, vertex))
    tops = _best(by_block, numbers, vertices, 1)
    state = gain, jnp.full_like(gain, size), jnp.zeros_like(gain)
    arrays = bits.view(jnp.int32), words, weights, number, *tops, *state
    shapes = (*state, jnp.zeros(1, jnp.int32))
    gain, center, value, count = route.pallas_call(
        functools.partial(_kernel, few=few, capacity=capacity, interpret=interpret),
        grid=(1,),
        in_specs=[program_part(x, ()) for x in arrays],
        out_specs=[program_part(x, ()) for x in shapes],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes],
        input_output_aliases={len(arrays) - 3 + n: n for n in range(3)},
        num_stages=1,
        interpret=interpret,
        name="heavy_entries",
    )(*arrays)
    return uncovered & (center == size), gain, center, value, count[0]


def _best(score, number, vertex, axis: int):
    """Returns the highest score, and the lowest number that has it with its vertex."""
    best = score.max(axis, keepdims=True)
    first = jnp.where(score == best, number, LAST).min(axis, keepdims=True)
    best_vertex = jnp.where((score == best) & (number == first), vertex, LAST).min(axis)
    return best.max(axis), first.min(axis), best_vertex


def _kernel(bits, words, weights, number, *refs, few: int, capacity: int, interpret: bool) -> None:
    """Makes all entries that may cover more than a few vertices."""
    top, top_number, top_vertex, *refs = refs
    gain, center, value, count = refs[3:]  # the first three are the same memory
    size, row_words = number.shape[0], bits.shape[1]
    lane = jnp.arange(power_of_two(row_words), dtype=jnp.int32)
    block = jnp.arange(power_of_two(top.shape[0]), dtype=jnp.int32)
    inside = jnp.arange(BLOCK, dtype=jnp.int32)
    is_word, is_block = lane < row_words, block < top.shape[0]

    def load(ref, at, wanted, fill=ZERO):
        return route.load(ref.at[at], mask=wanted, other=fill)

    def store_number(ref, at, x, wanted):
        """Stores a single number."""
        route.store(ref.at[jnp.full((1,), at)], jnp.full((1,), x), mask=jnp.full((1,), wanted))

    def has_bit(words, k):
        return ((words >> k) & 1) > 0

    def goes_on(carry):
        best, entries = carry[0].max(), carry[4]
        return (best >= 0) & (entries < capacity)

    def step(carry):
        top, top_number, top_vertex, uncovered, entries = carry
        best, _, vertex = _best(top, top_number, top_vertex, 0)
        changed = jax.lax.div(vertex, np.int32(BLOCK))
        itself = jnp.where(lane == jax.lax.div(vertex, np.int32(WORD)), 1, 0)
        itself = (itself << jax.lax.rem(vertex, np.int32(WORD))) & uncovered
        there = jnp.where(itself != 0, np.int32(1), np.int32(0)).max() > 0
        near = (load(bits, (vertex, lane), is_word) & uncovered) | itself

        def weigh(k, total):
            return total + load(weights, lane * WORD + k, has_bit(near, k))

        none = jnp.zeros_like(lane)
        weighed = jax.lax.fori_loop(np.int32(0), np.int32(WORD), weigh, none)
        vertex_gain = weighed.sum(dtype=jnp.int32)
        holds = there & (vertex_gain == best)

        def cover(k, done):
            route.store(center.at[lane * WORD + k], none + vertex, mask=has_bit(near, k))
            return done + 1

        rounds = jnp.where(holds, np.int32(WORD), np.int32(0))
        jax.lax.fori_loop(np.int32(0), rounds, cover, np.int32(0))
        store_number(gain, vertex, vertex_gain, there)
        store_number(value, vertex, vertex_gain, holds)
        if not interpret:
            route.debug_barrier()  # other threads read below what was stored above
        here = changed * BLOCK + inside
        bounds, weight = load(gain, here, here < size), load(weights, here, here < size)
        open_ = load(center, here, here < size) == size
        heavy = jnp.where(open_ & (bounds > weight) & (bounds > few), bounds, NONE)
        # Only the block of this vertex may have another best vertex now.
        block_best = _best(heavy, load(number, here, here < size), here, 0)
        tops = top, top_number, top_vertex
        top, top_number, top_vertex = (
            jnp.where(block == changed, a, b) for a, b in zip(block_best, tops, strict=True)
        )
        uncovered = jnp.where(holds, uncovered & ~near, uncovered)
        return top, top_number, top_vertex, uncovered, entries + holds.astype(jnp.int32)

    tops = (
        load(x, block, is_block, fill)
        for x, fill in ((top, NONE), (top_number, LAST), (top_vertex, LAST))
    )
    carry = *tops, load(words, lane, is_word), np.int32(0)
    *_, entries = jax.lax.while_loop(goes_on, step, carry)
    store_number(count, np.int32(0), entries, entries >= 0)
