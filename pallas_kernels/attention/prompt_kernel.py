"""A prompt's attention by the attention kernel, and the kernel that reduces its columns.

Before a kernel starts, an array `[tiles, blocks]` is computed from the positions, which says which
tiles of queries and blocks of slots meet. A program goes through all blocks from the first to the
last that it meets: slots may be in any order, but a prompt's are mostly in that of their positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.attention.forms import dense_rows
from pallas_kernels.attention.kernel import (
    LOG2_E,
    NOTHING,
    NOWHERE,
    binary_logits,
    binary_scale,
    mask_tile,
    row_bytes,
    split_attention,
)
from pallas_kernels.base import route
from pallas_kernels.base.kernel_parts import dot, load_rows, program_part
from pallas_kernels.base.logits import Mask, Queries, Seen, finite_or_zero, live_slots
from pallas_kernels.base.seen_blocks import first_run, hull, meets, sees_all
from pallas_kernels.base.tiles import SMALLEST, Launch


@overload
def attention_by_kernel(
    queries: Queries, k: Array, v: Array, seen: Seen, mask: Mask, launch: Launch
) -> tuple[Array, Array]: ...
@overload
def attention_by_kernel(
    queries: Queries, k: Array, v: None, seen: Seen, mask: Mask, launch: Launch
) -> tuple[None, Array]: ...
def attention_by_kernel(
    queries: Queries,
    k: Float[Array, "B H S D"],
    v: Float[Array, "B H S D"] | None,
    seen: Seen,
    mask: Mask,
    launch: Launch,
) -> tuple[Float[Array, "B H G T D"] | None, Float[Array, "B H G T"]]:
    """Computes `prompt_attention` by the kernel of decode steps, with a slot range per row tile.

    Rows of a KV head are its G query heads times the T tokens, tokens fastest. So a tile has a few
    consecutive tokens of one head, whose ranges are nearly the same.
    """
    keys, values = dense_rows(k), None if v is None else dense_rows(v)
    _, _, group, tokens, channels = queries.q.shape
    rows = launch.tile.rows(row_bytes(channels, k.dtype), group * tokens)
    block = launch.tile.block(keys.reader.row_bytes, k.shape[2])
    position = jnp.tile(queries.position, (1, group))
    met, plain = (of(position, seen, mask.window, rows, block) for of in (meets, sees_all))
    first, end = (block * x for x in hull(met, 3))
    out, lse, _ = split_attention(
        queries, keys, values, seen._replace(first=first, end=end), mask, launch,
        with_logits=False, dtype=k.dtype if v is None else v.dtype, plain=first_run(plain, 3),
    )  # fmt: skip
    return out, lse


# --- column sums and maxima -----------------------------------------------------------------------


class _Reduction(NamedTuple):
    """How an operation reduces log2 of the probabilities that a slot gets from the queries."""

    start: float
    add: Callable[[Array, Array, bool], Array]  # adds a tile `[R, N]` of them to those before
    end: Callable[[Array], Array]  # `[R, N]` to `[N]`


REDUCTIONS = {
    "column_sums": _Reduction(
        0.0, lambda sums, x, interpret: sums + route.exp2(x, interpret), lambda sums: sums.sum(0)
    ),
    # The largest probability is that of the largest logarithm: one exponential for each slot.
    "column_maxima": _Reduction(
        -jnp.inf, lambda top, x, _: jnp.maximum(top, x), lambda top: jnp.exp2(top.max(0))
    ),
}


class _Refs(NamedTuple):
    """Arrays of a program's row, head and block that it reads and, last, writes.

    A call makes one of arrays, and a program has one of references.
    """

    query_position: Any
    q: Any
    lse: Any
    first: Any  # first tile of queries
    end: Any  # end of the tiles of queries
    plain_first: Any  # first tile of queries that see all slots, which have no bias
    plain_end: Any
    bias: Any
    position: Any
    k: Any
    out: Any


class _Plan(NamedTuple):
    """Static arguments of the kernel."""

    rows: int  # queries of a tile
    tokens: int
    block: int  # slots of a program
    slots: int
    mask: Mask
    reduction: _Reduction
    interpret: bool


def columns_by_kernel(
    operation: str,
    queries: Queries,
    k: Float[Array, "B H S D"],
    seen: Seen,
    lse: Float[Array, "B H G T"],
    mask: Mask,
    launch: Launch,
) -> Float[Array, "B H G S"]:
    """Computes an operation of `REDUCTIONS`; a program takes a query head and a block of slots."""
    q, tile, slots = queries.q, launch.tile, k.shape[2]
    batch, heads, group, tokens, channels = q.shape
    out = jax.ShapeDtypeStruct((batch, heads, group, slots), jnp.float32)
    if not q.size or not slots:
        return jnp.zeros(out.shape, out.dtype)
    query_bytes = row_bytes(channels, k.dtype)
    rows, block = tile.rows(query_bytes, tokens), tile.block(channels * k.dtype.itemsize, slots)
    given = queries.position, seen, mask.window, rows, block
    first, end = hull(meets(*given), 2)
    plain_first, plain_end = first_run(sees_all(*given), 2)
    plan = _Plan(rows, tokens, block, slots, mask, REDUCTIONS[operation], launch.interpret)
    # Query heads are the first axis of the grid: heads that run at the same time share the keys.
    row, head, query_head = (1,), (1, 2), (1, 2, 0)
    tiles = (1, 2, 3)
    axes = row, query_head, query_head, tiles, tiles, tiles, tiles, head, head, head, query_head
    arrays = _Refs(
        queries.position, q.astype(k.dtype), lse, first, end, plain_first, plain_end, seen.bias,
        seen.position, k, out,
    )  # fmt: skip
    specs = [program_part(x, axis) for x, axis in zip(arrays, axes, strict=True)]
    return route.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid=(group, batch, heads, pl.cdiv(slots, block)),
        in_specs=specs[:-1],
        out_specs=specs[-1],
        out_shape=out,
        num_warps=tile.warps,
        num_stages=tile.stages_of(query_bytes),
        interpret=launch.interpret,
        name=operation,
    )(*arrays[:-1])


def _kernel(*refs, plan: _Plan):
    """Reduces a block of slots over the query tiles that may see any of them."""
    refs = _Refs(*refs)
    slot = pl.program_id(3) * plan.block + jnp.arange(plan.block, dtype=jnp.int32)
    there = slot < plan.slots
    mass = route.load(refs.bias.at[slot], mask=there, other=NOTHING)
    position = route.load(refs.position.at[slot], mask=there, other=NOWHERE)
    live = live_slots(mass, position)
    keys = load_rows(refs.k, slot, live, SMALLEST).T

    def add(i, reduced, masked: bool = False):
        token = i * plan.rows + jnp.arange(plan.rows, dtype=jnp.int32)
        is_token = token < plan.tokens
        lse = finite_or_zero(route.load(refs.lse.at[token], mask=is_token, other=NOTHING))
        products = dot(load_rows(refs.q, token, is_token, SMALLEST), keys)
        logits = binary_logits(products * binary_scale(plan.mask), plan.mask)
        if masked:
            at = route.load(refs.query_position.at[token], mask=is_token, other=NOWHERE)
            logits = mask_tile(logits, mass, position, live, at, plan.mask.window)
        logits = logits - (lse * LOG2_E)[:, None]
        return plan.reduction.add(reduced, logits, plan.interpret)

    # A tile's queries are reduced across threads, so this is done once, after the loops.
    reduced = jnp.full((plan.rows, plan.block), plan.reduction.start, jnp.float32)
    start, stop = refs.first[...], refs.end[...]
    skip_at = jnp.clip(refs.plain_first[...], start, stop)
    plain_end = jnp.clip(refs.plain_end[...], skip_at, stop)
    reduced = jax.lax.fori_loop(skip_at, plain_end, add, reduced)
    skipped = plain_end - skip_at

    def add_masked(n, reduced):
        return add(jnp.where(n < skip_at, n, n + skipped), reduced, masked=True)

    reduced = jax.lax.fori_loop(start, stop - skipped, add_masked, reduced)
    route.store(refs.out.at[slot], plan.reduction.end(reduced), mask=there)
