"""The XLA reference of a prompt's attention, column sums and maxima: loops over blocks.

They hold one block of logits at a time; where sums or maxima come with attention, the weights of
a block of queries with all slots. Blocks before the first and after the last that a query may see
are skipped at run time. On a CPU, only blocks in which a query does not see a slot, or a slot has
a bias, are masked: those at the diagonal, at a window's end and with free slots.

On a GPU, the device alone knows the bounds of these loops. XLA runs loops from the host, so it
waits for the device before each block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.base.logits import (
    Mask,
    Queries,
    Seen,
    capped,
    finite_or_zero,
    masked,
    or_one,
)
from pallas_kernels.base.mixing import as_weights, unscaled
from pallas_kernels.base.products import products
from pallas_kernels.base.rows import block_of, counted_rows, entry_of, put_block
from pallas_kernels.base.seen_blocks import hull, meets, sees_all
from pallas_kernels.base.varying import varying

T = TypeVar("T")

# The fastest sizes on a CPU of those tried. Few heads want large tiles, for the products. Tiles of
# many heads must stay in the processor's caches. With several blocks of queries, a block has at
# most a quarter of the slots that a query sees, since much of the diagonal's blocks is computed for
# nothing.
QUERY_BLOCK = 256
KEY_BLOCK = 256
MOST_SLOTS = 1024
MOST_LOGITS = 1_250_000  # of a tile over all rows and heads
# Weights of a block of one head's queries with all slots, where they are held: 12 MB. Twice as many
# are hardly faster. But a block has so many rows of queries at least, since products of few rows
# are slow: with 16,000 slots, 168 rows took 1.6 times as long as attention alone, 336 rows 1.2.
MOST_HELD = 3_000_000
LEAST_ROWS = 384
# Elsewhere each block costs a few launches, so a few large blocks should be best. Not measured yet.
ACCELERATOR_BLOCK = 1024


def attention_by_blocks(
    queries: Queries,
    k: Float[Array, "B H S D"],
    v: Float[Array, "B H S D"],
    seen: Seen,
    mask: Mask,
) -> tuple[Float[Array, "B H G T D"], Float[Array, "B H G T"]]:
    """Computes `prompt_attention` block by block."""
    q, head_dim = queries.q, queries.q.shape[-1]
    blocks = _Blocks.of(queries, seen, mask.window)
    to_query, to_product = _factors(mask.scale, k.dtype)

    def query_block(n, results):
        i = blocks.num_query - 1 - n  # block i - 1 replaces what the last block's padding gave
        q_i = blocks.queries(i, q).astype(k.dtype) * to_query

        def key_block(j, mix):
            return blocks.mixed(i, j, q_i, k, v, mask.soft_cap, to_product, mix)[0]

        start = _Mix.empty(jnp.full(q_i.shape[:3], -jnp.inf), head_dim)
        start = varying(start, q, k, v, *blocks[:4])
        mix = jax.lax.fori_loop(*blocks.keys_of_query(i), key_block, start)
        return blocks.put(i, results, (mix.out(v.dtype), mix.lse))

    results = jnp.zeros(q.shape, v.dtype), jnp.zeros(q.shape[:-1], jnp.float32)
    results = varying(results, q, k, v, *blocks[:4])
    return jax.lax.fori_loop(0, blocks.num_query, query_block, results)


def attention_and_columns_by_blocks(
    queries: Queries,
    k: Float[Array, "B H S D"],
    v: Float[Array, "B H S D"],
    seen: Seen,
    elsewhere: Float[Array, "B H G T"],
    mask: Mask,
    *,
    add: Callable[[Array, Array, Array], Array],
) -> tuple[Float[Array, "B H G T D"], Float[Array, "B H G T"], Float[Array, "B H G S"]]:
    """Computes attention, and reduces all probabilities of a slot to one number, head by head.

    Weights of a block of queries with all slots are held, so that each product of queries and keys
    and each exponential is computed once. One KV head comes after the other, so that a block has
    many queries where few weights are held.

    Args:
      elsewhere: log-sum-exps of columns of the softmax that are not among the slots.
      add: returns the numbers `[B, H, G, S]` of a block after more queries, of the numbers before,
        of these queries' weights `[B, H, G, T, S]`, and of what makes them probabilities, `[B, H,
        G, T]`. Numbers are 0 before any query.
    """

    def of_head(head: Array) -> tuple[Array, Array, Array]:
        q_head, k_head, v_head, seen_head, elsewhere_head = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, head, 1, axis=1),
            (queries.q, k, v, seen, elsewhere),
        )
        results = _columns_of_head(
            queries._replace(q=q_head), k_head, v_head, seen_head, elsewhere_head, mask, add=add
        )
        return jax.tree.map(lambda x: x[:, 0], results)

    heads = jax.lax.map(of_head, jnp.arange(k.shape[1]))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), heads)


def _columns_of_head(
    queries: Queries,
    k: Float[Array, "B 1 S D"],
    v: Float[Array, "B 1 S D"],
    seen: Seen,
    elsewhere: Float[Array, "B 1 G T"],
    mask: Mask,
    *,
    add: Callable[[Array, Array, Array], Array],
) -> tuple[Float[Array, "B 1 G T D"], Float[Array, "B 1 G T"], Float[Array, "B 1 G S"]]:
    """Computes `attention_and_columns_by_blocks` for one KV head."""
    q, blocks = queries.q, _Blocks.of(queries, seen, mask.window, held=True)
    to_query, to_product = _factors(mask.scale, k.dtype)
    rows = (*q.shape[:2], q.shape[2] * blocks.query_size)  # [B, H, G * query_size]

    def query_block(n, carry):
        results, numbers, held = carry
        i = blocks.num_query - 1 - n  # block i - 1 replaces what the last block's padding gave
        in_sight = blocks.keys_of_query(i)
        q_i = blocks.queries(i, q).astype(k.dtype) * to_query

        def key_block(j, carry):
            mix, (held, tops) = carry
            mix, weights = blocks.mixed(i, j, q_i, k, v, mask.soft_cap, to_product, mix)
            return mix, (put_block(held, weights[None], j, 0), put_block(tops, mix.top[None], j, 0))

        start = _Mix.empty(blocks.queries(i, elsewhere), q.shape[-1])
        start = varying(start, q, k, v, *blocks[:4])
        mix, held = jax.lax.fori_loop(*in_sight, key_block, (start, held))

        def add_block(j, numbers):
            weights, top = (entry_of(x, j) for x in held)
            weights, share = (
                x.reshape(*q.shape[:3], -1, *x.shape[3:]) for x in (weights, mix.share(top))
            )
            first = j * blocks.key_size
            after = add(block_of(numbers, first, blocks.key_size, 3), weights, share)
            return put_block(numbers, after, first, 3)

        numbers = jax.lax.fori_loop(*in_sight, add_block, numbers)
        return blocks.put(i, results, (mix.out(v.dtype), mix.lse)), numbers, held

    carry = (
        (jnp.zeros(q.shape, v.dtype), jnp.zeros(q.shape[:-1], jnp.float32)),
        jnp.zeros((*q.shape[:3], seen.places), jnp.float32),
        (
            jnp.zeros((blocks.num_key, *rows, blocks.key_size), jnp.float32),
            jnp.zeros((blocks.num_key, *rows), jnp.float32),
        ),
    )
    elsewhere, carry = varying((elsewhere, carry), q, k, v, *blocks[:4])
    (out, lse), numbers, _ = jax.lax.fori_loop(0, blocks.num_query, query_block, carry)
    return out, lse, numbers


def add_shares(
    sums: Float[Array, "B H G S"],
    weights: Float[Array, "B H G T S"],
    share: Float[Array, "B H G T"],
) -> Float[Array, "B H G S"]:
    """Adds the probabilities of more queries; as a product, which XLA computes faster."""
    return sums + jnp.einsum("bhgq,bhgqk->bhgk", share, weights, precision="highest")


def largest_shares(
    maxima: Float[Array, "B H G S"],
    weights: Float[Array, "B H G T S"],
    share: Float[Array, "B H G T"],
) -> Float[Array, "B H G S"]:
    """Takes more queries into the largest probabilities."""
    return jnp.maximum(maxima, (weights * share[..., None]).max(3))


def sums_by_blocks(*args) -> Float[Array, "B H G S"]:
    """Computes `column_sums` block by block."""
    return _over_queries(*args, start=0.0, add=_add_sums)


def maxima_by_blocks(*args) -> Float[Array, "B H G S"]:
    """Computes `column_maxima` block by block."""
    return jnp.exp(_over_queries(*args, start=-jnp.inf, add=_add_maxima))


def _add_sums(
    sums: Float[Array, "B H G S"], log_p: Float[Array, "B H G T S"]
) -> Float[Array, "B H G S"]:
    """Adds the probabilities of more queries, of which these are the logarithms."""
    return add_shares(sums, jnp.exp(log_p), jnp.ones(log_p.shape[:-1], log_p.dtype))


def _add_maxima(
    maxima: Float[Array, "B H G S"], log_p: Float[Array, "B H G T S"]
) -> Float[Array, "B H G S"]:
    """Takes more queries into the largest logarithms: one exponential for each slot follows."""
    return jnp.maximum(maxima, log_p.max(3))


def _over_queries(
    queries: Queries,
    k: Float[Array, "B H S D"],
    seen: Seen,
    lse: Float[Array, "B H G T"],
    mask: Mask,
    *,
    start: float,
    add: Callable[[Array, Array], Array],
) -> Float[Array, "B H G S"]:
    """Reduces the logarithms of all probabilities of a slot to one number, block by block.

    Args:
      start: the number before any query.
      add: returns the numbers `[B, H, G, S]` of a block after more queries, of the numbers before
        and of the logarithms `[B, H, G, T, S]` of these queries' probabilities.
    """
    q, blocks = queries.q, _Blocks.of(queries, seen, mask.window)
    to_query, to_product = _factors(mask.scale, k.dtype)

    def key_block(j):
        (k_j,) = blocks.keys(j, k)

        def query_block(i, numbers):
            q_i = blocks.queries(i, q).astype(k.dtype) * to_query
            logits = capped(products(q_i, k_j) * to_product, mask.soft_cap)

            logits = blocks.where_masked(i, j, lambda j, x: blocks.masked(i, j, x), logits)
            log_p = logits - finite_or_zero(blocks.queries(i, lse))[..., None]
            return add(numbers, log_p.reshape(*q.shape[:3], -1, blocks.key_size))

        first = jnp.full((*q.shape[:3], blocks.key_size), start, jnp.float32)
        first = varying(first, q, k, lse, *blocks[:4])
        return jax.lax.fori_loop(*blocks.queries_of_key(j), query_block, first)

    numbers = jax.lax.map(key_block, jnp.arange(blocks.num_key))  # [J, B, H, G, key_size]
    numbers = jnp.moveaxis(numbers, 0, 3).reshape(*q.shape[:3], -1)
    tail = seen.places - (blocks.num_key - 1) * blocks.key_size
    return jnp.concatenate((numbers[..., : -blocks.key_size], numbers[..., -tail:]), axis=-1)


class _Mix(NamedTuple):
    """Holds a query block's attention to some of the slots.

    Args:
      top: largest logits, by which weights `exp(logit − top)` are scaled.
      total: sums of the weights.
      acc: sums of the values, times their weights.
    """

    top: Float[Array, "B H Q"]
    total: Float[Array, "B H Q"]
    acc: Float[Array, "B H Q D"]

    @classmethod
    def empty(cls, elsewhere: Float[Array, "B H Q"], head_dim: int) -> _Mix:
        """Makes the attention before any slot, beside columns with these log-sum-exps."""
        total = jnp.where(elsewhere > -jnp.inf, 1.0, 0.0)
        return cls(elsewhere, total, jnp.zeros((*elsewhere.shape, head_dim), jnp.float32))

    @property
    def lse(self) -> Float[Array, "B H Q"]:
        """Log-sum-exps of all logits."""
        return self.top + jnp.log(self.total)

    def out(self, dtype: DTypeLike) -> Float[Array, "B H Q D"]:
        """Returns the attention's output."""
        return (unscaled(self.acc, dtype) / or_one(self.total)[..., None]).astype(dtype)

    def share(self, top: Float[Array, "B H Q"]) -> Float[Array, "B H Q"]:
        """Returns what makes weights that are scaled by `top` probabilities."""
        return jnp.exp(top - finite_or_zero(self.top)) / or_one(self.total)


class _Blocks(NamedTuple):
    """Queries and slots cut into blocks, with the range of blocks that each block meets.

    A slice that would reach beyond the end starts earlier instead. So the last block has the last
    queries or slots, and `_pad_tail` hides those that the block before has, too. Queries, keys and
    values need no padding, which would copy them.
    """

    query_position: Int[Array, "B IT"]
    seen: Seen
    met: Bool[Array, "I J"]  # whether the blocks meet in any row and head
    # 1 if a mask or bias changes logits in any row and head, else 0. None: all blocks are masked.
    is_masked: Int[Array, "I J"] | None
    query_size: int
    key_size: int
    window: int | None

    @classmethod
    def of(cls, queries: Queries, seen: Seen, window: int | None, *, held: bool = False):
        """Cuts queries and slots; `held`: whether weights of a block with all slots are held."""
        q = queries.q
        heads = counted_rows(q) * q.shape[1] * q.shape[2]
        rows = max(MOST_HELD // seen.places, LEAST_ROWS)
        most = max(rows // heads // 8 * 8, 8) if held else q.shape[3]
        query_size, key_size = _block_sizes(heads, q.shape[3], seen.places, window, most)
        # As many blocks as these, of one size: else the last one would be computed for few queries.
        query_size = -(-q.shape[3] // -(-q.shape[3] // query_size))
        query_position = _pad_tail(queries.position, query_size, -1)
        seen = Seen(
            _pad_tail(seen.bias, key_size, -jnp.inf), _pad_tail(seen.position, key_size, -1)
        )
        args = query_position, seen, window, query_size, key_size
        met, is_masked = meets(*args).any((0, 1)), None
        if met.shape[0] > 1 and jax.default_backend() == "cpu":
            is_masked = (~sees_all(*args).all((0, 1))).astype(jnp.int32)
        return cls(query_position, seen, met, is_masked, query_size, key_size, window)

    @property
    def num_query(self) -> int:
        return self.met.shape[0]

    @property
    def num_key(self) -> int:
        return self.met.shape[1]

    def queries(self, i, x):
        """Returns block i of `x [B, H, G, T, ...]` as `[B, H, G * query_size, ...]`."""
        block = block_of(x, i * self.query_size, self.query_size, 3)
        return block.reshape(*x.shape[:2], -1, *x.shape[4:])

    def put(self, i, results, blocks):
        """Writes block i of each of `results [B, H, G, T, ...]`."""

        def write(x, block):
            block = block.reshape(*x.shape[:3], self.query_size, *x.shape[4:])
            return put_block(x, block, i * self.query_size, 3)

        return jax.tree.map(write, results, blocks)

    def keys(self, j, *rows):
        """Returns block j of `rows [B, H, S, ...]`."""
        return tuple(block_of(x, j * self.key_size, self.key_size, 2) for x in rows)

    def mixed(self, i, j, q_i, k, v, soft_cap, to_product, mix: _Mix) -> tuple[_Mix, Array]:
        """Adds slots j to the attention of queries i; returns their weights `[B, H, Q, K]` too."""
        k_j, v_j = self.keys(j, k, v)
        logits = capped(products(q_i, k_j) * to_product, soft_cap)
        logits, v_j = self.where_masked(
            i, j, lambda j, x: (self.masked(i, j, x[0]), self.live(j, x[1])), (logits, v_j)
        )
        top = jnp.maximum(mix.top, logits.max(-1))
        finite = finite_or_zero(top)
        weights = jnp.exp(logits - finite[..., None])
        shrink = jnp.exp(mix.top - finite)
        acc = mix.acc * shrink[..., None] + jnp.einsum(
            "bhqk,bhkd->bhqd", as_weights(weights, v.dtype), v_j,
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        return _Mix(top, mix.total * shrink + weights.sum(-1), acc), weights

    def masked(self, i, j, logits):
        """Returns logits of queries i with slots j, with biases, `-inf` where a slot is unseen."""
        queries = block_of(self.query_position, i * self.query_size, self.query_size, 1)
        return masked(logits, self._seen(j), queries, self.window)

    def live(self, j, values):
        """Returns values of slots j, 0 where no token lives."""
        return jnp.where(self._seen(j).live[..., None], values, 0)

    def _seen(self, j) -> Seen:
        bias, position = self.keys(j, self.seen.bias, self.seen.position)
        return Seen(bias, position)

    def where_masked(self, i, j, mask: Callable[[Array, T], T], x: T) -> T:
        """Returns `mask(j, x)` where queries i need a mask for slots j, else x.

        It is a loop of 0 or 1 times: a condition was a little slower on CPU. The loop adds its
        counter, 0, to j: XLA computes all that does not depend on the counter before the loop, and
        so would make the masks of all blocks. Where all queries are one block, it would save little
        and takes longer to compile; elsewhere than on CPUs the host would wait for its length.
        There all blocks are masked.
        """
        if self.is_masked is None:
            return mask(j, x)
        times = entry_of(entry_of(self.is_masked, i), j)
        return jax.lax.fori_loop(0, times, lambda n, x: mask(j + n, x), x)

    def keys_of_query(self, i):
        return hull(entry_of(self.met, i), 0)

    def queries_of_key(self, j):
        return hull(entry_of(self.met, j, axis=1), 0)


def _factors(scale: float, dtype: DTypeLike) -> tuple[float, float]:
    """Returns factors of the queries and of the products; 16 bits would round scaled queries."""
    return (scale, 1.0) if dtype == jnp.float32 else (1.0, scale)


def _block_sizes(
    heads: int, tokens: int, slots: int, window: int | None, most_queries: int
) -> tuple[int, int]:
    """Returns how many queries and how many slots a block has."""
    if jax.default_backend() != "cpu":
        return min(ACCELERATOR_BLOCK, tokens, most_queries), min(ACCELERATOR_BLOCK, slots)
    queries = min(QUERY_BLOCK, tokens, most_queries)
    if heads * queries * KEY_BLOCK > MOST_LOGITS:
        queries = min(QUERY_BLOCK // 2, queries)
    most = min(MOST_LOGITS // (heads * queries), MOST_SLOTS)
    if queries == tokens:  # with one block of queries, no block of slots is computed for nothing
        keys = slots if slots <= most else most // KEY_BLOCK * KEY_BLOCK
    else:
        seen = slots if window is None else min(slots, window)
        keys = min(most, seen // 4) // KEY_BLOCK * KEY_BLOCK
    return queries, min(max(keys, KEY_BLOCK), slots)


def _pad_tail(x: Array, block: int, value: float) -> Array:
    """Pads `x [..., S]` to whole blocks, at the start of the last block."""
    tail = x.shape[-1] % block
    if tail == 0:
        return x
    fill = jnp.full((*x.shape[:-1], block - tail), value, x.dtype)
    return jnp.concatenate((x[..., :-tail], fill, x[..., -tail:]), axis=-1)
