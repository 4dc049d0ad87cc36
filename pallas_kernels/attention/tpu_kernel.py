"""The TPU kernel behind attention of few queries: a running softmax over blocks of slots.

The grid is rows, heads, parts, and the blocks of a part in sequence; the keys and values of a block
are fetched while the block before is computed. Maximum, sum and output stay in scratch memory from
one block to the next. Lengths are scalars that the grid knows before it fetches, so blocks outside
of them are neither fetched nor computed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.forms import Rows
from pallas_kernels.attention.kernel import nothing
from pallas_kernels.attention.tpu_forms import LANES, SUBLANES, Stored, TPURows, tpu_rows
from pallas_kernels.base.annotations import NoneElsewhere
from pallas_kernels.base.dispatch import tpu_cores
from pallas_kernels.base.logits import (
    Mask,
    Queries,
    Seen,
    capped,
    finite_or_zero,
    or_one,
    visible_slots,
)

BLOCK_BYTES = 1 << 19  # bytes of a block of keys: fetching it takes longer than starting a round
LOGIT_BYTES = 1 << 20  # bytes of a block's logits, of which there are several copies


class _Plan(NamedTuple):
    """Static arguments of a kernel."""

    k: Any  # reader
    v: Any
    block: int
    parts: int
    rounds: int
    mask: Mask


def tpu_attention(
    queries: Queries,
    k: Rows,
    v: Rows,
    seen: Seen,
    mask: Mask,
    *,
    with_logits: bool,
    dtype: DTypeLike,
) -> tuple[
    Float[Array, "B H G T D"],
    Float[Array, "B H G T"],
    Float[Array, "B H G T S"] | NoneElsewhere,
]:
    """Computes `split_attention` over all slots, for TPUs.

    Logits are written only for blocks that are looked at. All other logits are undefined, and the
    caller must mask them.

    Raises:
      ValueError: rows in a form or dtype that the kernel does not read, as `reads` says.
    """
    q, (batch, heads, group, tokens, channels) = queries.q, queries.q.shape
    if not q.size * seen.places:
        return nothing(q, dtype, seen.places, with_logits)
    rows = tpu_rows(k, v)
    if rows is None:
        raise ValueError(f"the kernel for TPUs reads no {k.reader.dtype} rows by {k.reader}")
    keys, values = rows
    visible = visible_slots(seen, queries.position, mask.window)
    visible_bias = jnp.where(visible, seen.bias[:, :, None], -jnp.inf)
    # A store in groups of slots may have more slots, so that its last group is whole.
    padding = keys.slots - seen.places
    visible_bias = jnp.pad(
        visible_bias, ((0, 0), (0, 0), (0, 0), (0, padding)), constant_values=-jnp.inf
    )
    if tokens > 1:  # a single token has one mask for all query heads
        shape = batch, heads, group, tokens, keys.slots
        visible_bias = jnp.broadcast_to(visible_bias[:, :, None], shape).reshape(
            batch, heads, -1, keys.slots
        )
    first = jnp.zeros_like(seen.end) if seen.first is None else seen.first
    of_rows = {"q": q.astype(keys.reader.dtype).reshape(batch, heads, group * tokens, channels)}
    if queries.shift is not None:
        of_rows["shift"] = queries.shift.astype(jnp.float32).reshape(batch, heads, -1, 1)
    out, lse, logits = _parts(
        of_rows, keys, values, visible_bias, (first, jnp.minimum(seen.end, seen.places)), mask,
        parts=-(-tpu_cores() // (batch * heads)), with_logits=with_logits,
    )  # fmt: skip
    total = jax.nn.logsumexp(lse, axis=2)
    share = jnp.where(lse > -jnp.inf, jnp.exp(lse - total[:, :, None]), 0.0)
    out = (share[..., None] * out).sum(2).astype(dtype)
    per_query = q.shape[:4]
    return (
        out.reshape(q.shape),
        total.reshape(per_query),
        logits.reshape(*per_query, -1)[..., : seen.places] if with_logits else None,
    )


def _parts(
    queries: dict[str, Float[Array, "B H R X"]],
    k: TPURows,
    v: TPURows,
    visible_bias: Float[Array, "B H M S"],
    places: tuple[Int[Array, "B H"], Int[Array, "B H"]],
    mask: Mask,
    *,
    parts: int,
    with_logits: bool,
) -> tuple[
    Float[Array, "B H P R D"], Float[Array, "B H P R"], Float[Array, "B H R S"] | NoneElsewhere
]:
    """Computes float32 outputs and log-sum-exps of parts of the slots, and masked logits if wanted.

    Args:
      queries: query rows of each head, "q", and, if there is one, their "shift", `[B, H, R, 1]`.
      visible_bias: added to the logits of each row, or of all rows (M = 1); `-inf` where a slot is
        not visible.
      places: first and end of the slots that are looked at.
      parts: number of parts that the blocks of a head are divided into, so that no core is idle.
        Block i belongs to part `i % parts`.
    """
    batch, heads, rows, channels = queries["q"].shape
    slots = visible_bias.shape[3]
    block = min(slots, _block([*k.arrays.values(), *v.arrays.values()], rows))
    blocks = pl.cdiv(slots, block)
    parts = min(parts, blocks)
    rounds = pl.cdiv(blocks, parts)
    plan = _Plan(k.reader, v.reader, block, parts, rounds, mask)
    spec = functools.partial(
        _spec, block=block, at=functools.partial(_block_at, plan=plan, blocks=blocks)
    )
    shapes: list[tuple[int, ...]] = [(parts, rows, channels), (parts, rows, 1)]
    out_specs = [
        pl.BlockSpec((None, None, None, *shape[1:]), lambda b, h, p, *_: (b, h, p, 0, 0))
        for shape in shapes
    ]
    if with_logits:
        shapes.append((rows, slots))
        out_specs.append(spec(Stored(jax.ShapeDtypeStruct((0, 0, rows, slots), jnp.float32), 3)))
    out_shape = [jax.ShapeDtypeStruct((batch, heads, *x), jnp.float32) for x in shapes]
    arrays = queries, visible_bias, *(
        {name: stored.array for name, stored in side.arrays.items()} for side in (k, v)
    )  # fmt: skip
    results = pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, heads, parts, rounds),
            in_specs=[
                {
                    name: pl.BlockSpec((None, None, *x.shape[2:]), lambda b, h, *_: (b, h, 0, 0))
                    for name, x in queries.items()
                },
                spec(Stored(visible_bias, 3)),
                *({name: spec(stored) for name, stored in side.arrays.items()} for side in (k, v)),
            ],
            out_specs=out_specs,
            scratch_shapes=[
                pltpu.VMEM(shape, jnp.float32) for shape in ((rows, 1), (rows, 1), (rows, channels))
            ],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * batch * heads * rows * slots * channels,
            transcendentals=batch * heads * rows * slots,
            bytes_accessed=sum(
                x.size * x.dtype.itemsize for x in jax.tree.leaves((arrays, out_shape))
            ),
        ),
        name="tpu_attention",
    )(*places, *arrays)
    out, lse = results[:2]
    return out, lse[..., 0], results[2] if with_logits else None


def _block(stored: list[Stored], rows: int) -> int:
    """Returns the slots of a block: as many as are fetched at a time of the widest array."""
    slot_bytes = max(x.array.shape[5 - x.axis] * x.array.dtype.itemsize // x.group for x in stored)
    fitting = min(BLOCK_BYTES // slot_bytes, LOGIT_BYTES // (4 * max(rows, SUBLANES)))
    unit = math.lcm(LANES, *(SUBLANES * x.group for x in stored if x.axis == 2))
    return max(fitting // unit, 1) * unit


def _spec(stored: Stored, block: int, at: Callable) -> pl.BlockSpec:
    """Returns the spec of a block of an array; `at(part, round, first, end)` is its number."""
    shape, axis = list(stored.array.shape[2:]), stored.axis - 2
    shape[axis] = block // stored.group

    def pick(b, h, p, i, first, end):
        place = [0, 0]
        place[axis] = at(p, i, first[b, h], end[b, h])
        return (b, h, *place)

    return pl.BlockSpec((None, None, *shape), pick)


def _range(first, end, plan: _Plan):
    """Returns the range of blocks that are looked at: its first and its end."""
    block = jnp.int32(plan.block)
    return jax.lax.div(first, block), jax.lax.div(end + (block - 1), block)


def _block_at(p, i, first, end, *, plan: _Plan, blocks: int):
    """Returns the block of a part's round, or the nearest in range, which is not fetched again."""
    lowest, last = _range(first, end, plan)
    parts = jnp.int32(plan.parts)
    begin = jax.lax.div(jnp.maximum(lowest - p, 0) + (parts - 1), parts)
    stop = jax.lax.div(jnp.maximum(jnp.minimum(last, blocks) - 1 - p, 0), parts)
    begin = jnp.minimum(begin, stop)
    return jnp.clip(i, begin, stop) * parts + p


def _kernel(first, end, queries, visible_bias, k, v, *refs, plan: _Plan):
    """Runs one round: a block of slots of one row and head."""
    out, lse, *logit_refs, top, total, acc = refs
    row_head = pl.program_id(0), pl.program_id(1)
    first, end, i = first[row_head], end[row_head], pl.program_id(3)
    at = i * plan.parts + pl.program_id(2)
    lowest, last = _range(first, end, plan)

    @pl.when(i == 0)
    def _():
        top[...] = jnp.full_like(top, -jnp.inf)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)

    @pl.when((at >= lowest) & (at < last))
    def _():
        place = at * plan.block + jax.lax.broadcasted_iota(jnp.int32, (1, plan.block), 1)
        # The last block may reach beyond the slots, where contents are undefined.
        bias = jnp.where(place < end, visible_bias[...], -jnp.inf)
        any_visible = bias.max(0, keepdims=True) > -jnp.inf
        logits = plan.k.products(k, queries["q"][...], any_visible)
        if "shift" in queries:
            logits += queries["shift"][...]
        logits = capped(logits * plan.mask.scale, plan.mask.soft_cap)
        logits = jnp.where(bias > -jnp.inf, logits + bias, -jnp.inf)
        for ref in logit_refs:
            ref[...] = logits
        new_top = jnp.maximum(top[...], logits.max(1, keepdims=True))
        finite = finite_or_zero(new_top)
        weights, shrink = jnp.exp(logits - finite), jnp.exp(top[...] - finite)
        total[...] = total[...] * shrink + weights.sum(1, keepdims=True)
        acc[...] = acc[...] * shrink + plan.v.mix(v, weights, any_visible)
        top[...] = new_top

    @pl.when(i == plan.rounds - 1)
    def _():
        out[...] = acc[...] / or_one(total[...])
        lse[...] = top[...] + jnp.log(total[...])
