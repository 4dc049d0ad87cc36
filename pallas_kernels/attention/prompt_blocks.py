"""The XLA reference of a prompt's attention, column sums and maxima: loops over blocks.

None of them ever holds more than one block of logits. Blocks before the first and after the last
that a query may see are skipped at run time. On a GPU, the device alone knows the bounds of these
loops. XLA runs loops from the host, so it waits for the device before each block.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.base.logits import finite_or_zero, live_slots, masked_logits, or_one
from pallas_kernels.base.mixing import as_weights, unscaled
from pallas_kernels.base.rows import block_of, entry_of
from pallas_kernels.base.seen_blocks import hull, meets
from pallas_kernels.base.varying import varying

# The fastest sizes on CPU of those tried (2 cores, float32, head_dim 128): a logit tile stays in
# cache. Fewer queries meet more slots at a time: as many as make such a tile, MOST_SLOTS at most.
QUERY_BLOCK = 128
KEY_BLOCK = 256
MOST_SLOTS = 1024
# Elsewhere each block costs a few launches, so a few large blocks should be best. Not measured yet.
ACCELERATOR_BLOCK = 1024


def attention_by_blocks(
    q: Float[Array, "B H G T D"],
    k: Float[Array, "B H S D"],
    v: Float[Array, "B H S D"],
    bias: Float[Array, "B H S"],
    query_position: Int[Array, "B T"],
    key_position: Int[Array, "B H S"],
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[Float[Array, "B H G T D"], Float[Array, "B H G T"]]:
    """Computes `prompt_attention` block by block."""
    batch, kv_heads, group, tokens, head_dim = q.shape
    blocks = _Blocks.of(q, bias, query_position, key_position, window)
    mask_and_scale = functools.partial(masked_logits, scale=scale, window=window, soft_cap=soft_cap)

    def query_block(i):
        q_i, position_i = blocks.query(i)
        rows = (batch, kv_heads, group * blocks.query_size)

        def key_block(j, carry):
            top, total, acc = carry
            k_j, v_j, *slot_data = blocks.key(j, k, v)
            logits = mask_and_scale(q_i, k_j, slot_data[0], slot_data[1], position_i)
            # For one block this costs nothing beside the products with 128 queries or more.
            v_j = jnp.where(live_slots(*slot_data)[..., None], v_j, 0)
            new_top = jnp.maximum(top, logits.max(-1))
            finite = finite_or_zero(new_top)
            weights = jnp.exp(logits - finite[..., None])
            shrink = jnp.exp(top - finite)
            acc = acc * shrink[..., None] + jnp.einsum(
                "bhqk,bhkd->bhqd", as_weights(weights, v.dtype), v_j,
                preferred_element_type=jnp.float32,
            )  # fmt: skip
            return new_top, total * shrink + weights.sum(-1), acc

        start = (
            jnp.full(rows, -jnp.inf, jnp.float32),
            jnp.zeros(rows, jnp.float32),
            jnp.zeros((*rows, head_dim), jnp.float32),
        )
        start = varying(start, k, v, *blocks[:5])
        top, total, acc = jax.lax.fori_loop(*blocks.keys_of_query(i), key_block, start)
        out = unscaled(acc, v.dtype) / or_one(total)[..., None]
        return out.astype(v.dtype), top + jnp.log(total)

    out, lse = jax.lax.map(query_block, jnp.arange(blocks.num_query))
    out = blocks.join_queries(out)[..., :tokens, :]
    return out, blocks.join_queries(lse)[..., :tokens]


def sums_by_blocks(
    q: Float[Array, "B H G T D"],
    k: Float[Array, "B H S D"],
    bias: Float[Array, "B H S"],
    lse: Float[Array, "B H G T"],
    query_position: Int[Array, "B T"],
    key_position: Int[Array, "B H S"],
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "B H G S"]:
    """Computes `column_sums` block by block."""
    blocks = _Blocks.of(q, bias, query_position, key_position, window)
    lse = blocks.split_queries(_pad(lse, blocks.queries, 3, -jnp.inf))
    mask_and_scale = functools.partial(masked_logits, scale=scale, window=window, soft_cap=soft_cap)
    group = q.shape[2]

    def key_block(j):
        k_j, *slot_data = blocks.key(j, k)

        def query_block(i, sums):
            q_i, position_i = blocks.query(i)
            logits = mask_and_scale(q_i, k_j, slot_data[0], slot_data[1], position_i)
            row_lse = finite_or_zero(entry_of(lse, i)).reshape(logits.shape[:-1])
            probabilities = jnp.exp(logits - row_lse[..., None])
            per_head = probabilities.reshape(*logits.shape[:2], group, -1, blocks.key_size)
            return sums + per_head.sum(3)

        start = jnp.zeros((*q.shape[:3], blocks.key_size), jnp.float32)
        start = varying(start, k, lse, *blocks[:5])
        return jax.lax.fori_loop(*blocks.queries_of_key(j), query_block, start)

    sums = jax.lax.map(key_block, jnp.arange(blocks.num_key))  # [J, B, H, G, key_size]
    sums = jnp.moveaxis(sums, 0, 3).reshape(*q.shape[:3], -1)
    tail = bias.shape[-1] - (blocks.num_key - 1) * blocks.key_size
    return jnp.concatenate((sums[..., : -blocks.key_size], sums[..., -tail:]), axis=-1)


def maxima_by_blocks(
    q: Float[Array, "B H G T D"],
    k: Float[Array, "B H S D"],
    bias: Float[Array, "B H S"],
    lse: Float[Array, "B H G T"],
    query_position: Int[Array, "B T"],
    key_position: Int[Array, "B H S"],
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "B H G S"]:
    """Computes `column_maxima` block by block."""
    blocks = _Blocks.of(q, bias, query_position, key_position, window)
    lse = blocks.split_queries(_pad(lse, blocks.queries, 3, -jnp.inf))
    mask_and_scale = functools.partial(masked_logits, scale=scale, window=window, soft_cap=soft_cap)

    def key_block(j):
        k_j, *slot_data = blocks.key(j, k)

        def query_block(i, top):
            q_i, position_i = blocks.query(i)
            logits = mask_and_scale(q_i, k_j, slot_data[0], slot_data[1], position_i)
            row_lse = finite_or_zero(entry_of(lse, i))[..., None]
            log_p = logits.reshape(*row_lse.shape[:-1], blocks.key_size) - row_lse
            return jnp.maximum(top, log_p.max(3))

        start = jnp.full((*q.shape[:3], blocks.key_size), -jnp.inf, jnp.float32)
        start = varying(start, k, lse, *blocks[:5])
        # The largest probability is that of the largest logarithm: one exponential for each slot.
        return jnp.exp(jax.lax.fori_loop(*blocks.queries_of_key(j), query_block, start))

    maxima = jax.lax.map(key_block, jnp.arange(blocks.num_key))  # [J, B, H, G, key_size]
    maxima = jnp.moveaxis(maxima, 0, 3).reshape(*q.shape[:3], -1)
    tail = bias.shape[-1] - (blocks.num_key - 1) * blocks.key_size
    return jnp.concatenate((maxima[..., : -blocks.key_size], maxima[..., -tail:]), axis=-1)


class _Blocks(NamedTuple):
    """Queries and slots cut into blocks, with the range of blocks that each block meets."""

    q: Array  # [I, B, H, G * query_size, D]
    query_position: Array  # [I, B, query_size]
    bias: Array  # [B, H, J * key_size]
    key_position: Array  # [B, H, J * key_size]
    met: Bool[Array, "I J"]  # whether the blocks meet in any row and head
    query_size: int
    key_size: int
    group: int

    @classmethod
    def of(cls, q, bias, query_position, key_position, window):
        batch, kv_heads, group, tokens, head_dim = q.shape
        query_size, key_size = _block_sizes(tokens)
        key_size = min(key_size, bias.shape[-1])
        padded = math.ceil(tokens / query_size) * query_size
        q = _pad(q, padded, 3).reshape(batch, kv_heads, group, -1, query_size, head_dim)
        q = jnp.moveaxis(q, 3, 0).reshape(-1, batch, kv_heads, group * query_size, head_dim)
        query_position = _pad(query_position, padded, 1, -1)
        bias = _pad_tail(bias, key_size, -jnp.inf)
        key_position = _pad_tail(key_position, key_size, -1)
        met = meets(query_position, bias, key_position, window, query_size, key_size).any((0, 1))
        query_position = jnp.moveaxis(query_position.reshape(batch, -1, query_size), 1, 0)
        return cls(q, query_position, bias, key_position, met, query_size, key_size, group)

    @property
    def num_query(self) -> int:
        return self.met.shape[0]

    @property
    def num_key(self) -> int:
        return self.met.shape[1]

    @property
    def queries(self) -> int:
        return self.num_query * self.query_size

    def query(self, i):
        return entry_of(self.q, i), entry_of(self.query_position, i)

    def key(self, j, *rows):
        """Returns block j of `rows [B, H, S, D]`, of the bias and of the positions.

        A slice that would reach beyond the last slot starts earlier instead. So the last block has
        the last `key_size` slots, and `_pad_tail` hides those that the block before has had. Keys
        and values need no padding, which would copy them.
        """
        start, arrays = j * self.key_size, (*rows, self.bias, self.key_position)
        return tuple(block_of(x, start, self.key_size, 2) for x in arrays)

    def keys_of_query(self, i):
        return hull(entry_of(self.met, i), 0)

    def queries_of_key(self, j):
        return hull(entry_of(self.met, j, axis=1), 0)

    def split_queries(self, x):
        """Reshapes `[B, H, G, T, ...]` to `[I, B, H, G, query_size, ...]`."""
        return jnp.moveaxis(x.reshape(*x.shape[:3], self.num_query, self.query_size), 3, 0)

    def join_queries(self, x):
        """Reshapes `[I, B, H, G * query_size, ...]` back to `[B, H, G, T, ...]`."""
        x = x.reshape(*x.shape[:3], self.group, self.query_size, *x.shape[4:])
        x = jnp.moveaxis(x, 0, 3)
        return x.reshape(*x.shape[:3], self.queries, *x.shape[5:])


def _block_sizes(tokens: int) -> tuple[int, int]:
    """Returns how many queries and how many slots a block has."""
    if jax.default_backend() != "cpu":
        return min(ACCELERATOR_BLOCK, tokens), ACCELERATOR_BLOCK
    queries = min(QUERY_BLOCK, tokens)
    return queries, min(QUERY_BLOCK * KEY_BLOCK // queries, MOST_SLOTS)


def _pad_tail(x: Array, block: int, value: float) -> Array:
    """Pads `x [B, H, S]` to whole blocks, at the start of the last block."""
    tail = x.shape[-1] % block
    if tail == 0:
        return x
    fill = jnp.full((*x.shape[:-1], block - tail), value, x.dtype)
    return jnp.concatenate((x[..., :-tail], fill, x[..., -tail:]), axis=-1)


def _pad(x: Array, size: int, axis: int, value: float = 0) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths, constant_values=value) if size > x.shape[axis] else x
