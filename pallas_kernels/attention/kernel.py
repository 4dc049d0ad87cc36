"""The kernels for GPUs behind attention: a softmax over parts of the slots.

A program takes a tile of the query rows of one KV head and one part of its slots. It goes through
the slots tile by tile with a running softmax, and writes the normalised output and the log-sum-exp
of its part. Parts are in float32, and a second kernel joins them: XLA would need three launches,
each of which takes as long as reading a short cache. Keys and values are read once for each tile of
query rows. The queries of a decode step are one tile. Where lists choose the slots (`Seen.index`),
a tile has entries of a list, and rows are read through it.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention.forms import Part, Reader, Rows, split
from pallas_kernels.base import route
from pallas_kernels.base.annotations import NoneElsewhere
from pallas_kernels.base.kernel_parts import dot, dot_mixed, head_part, program_part, zero
from pallas_kernels.base.logits import (
    Mask,
    Queries,
    Seen,
    capped,
    finite_or_zero,
    live_slots,
    or_one,
)
from pallas_kernels.base.mixing import as_weights, unscaled
from pallas_kernels.base.rotation import Turn, cos_sin_of_turns, fixed_point, turns_of
from pallas_kernels.base.tiles import Launch, power_of_two

PARTS = 32  # parts that are joined at a time
NOTHING = np.float32(-np.inf)
LOG2_E = math.log2(math.e)
NOWHERE = np.int32(-1)


class _Pair(NamedTuple):
    """Two parts of keys whose channels form the rotated pairs."""

    a: Part
    b: Part
    first: int  # number of the frequency of the parts' first channels


class _Refs(NamedTuple):
    """Arrays that a program reads and, last, writes; None for arrays that a call does not have.

    A call makes one that holds arrays and the shapes of results, and one that holds their blocks. A
    program has one that holds references.
    """

    query_position: Any
    q: Any
    scale: Any  # multiplies each query's products with keys
    shift: Any  # added to each query's products with keys
    end: Any
    first: Any
    plain_first: Any  # tiles whose slots all queries see, and that have no bias
    plain_end: Any
    index: Any
    bias: Any
    position: Any
    k: Any  # by name
    v: Any  # by name
    frequency: Any  # frequencies of rotated channels
    turn_position: Any  # positions by which keys are rotated; None: `position`
    out: Any
    lse: Any
    logits: Any


# The axes of the grid that choose a program's part of an array. A program gets from any other array
# the part of the head that its list reads. `first` and `end` may have no axis of row tiles.
_AXES = {
    "query_position": (0,), "q": (0, 1), "scale": (0, 1), "shift": (0, 1), "end": (0, 1, 2),
    "first": (0, 1, 2), "plain_first": (0, 1, 2), "plain_end": (0, 1, 2), "index": (0, 1),
    "out": (0, 1, 3), "lse": (0, 1, 3), "logits": (0, 1),
}  # fmt: skip


class _Sizes(NamedTuple):
    """Sizes of the pieces that the work is cut into."""

    rows: int  # query rows of a program
    total_rows: int
    tokens: int
    places: int
    block: int  # places of a tile
    splits: int


class _Keys(NamedTuple):
    """Reader of keys, their pairs of parts that are rotated, and their other parts."""

    reader: Reader
    pairs: list[_Pair]
    parts: list[Part]
    factor: float  # multiplies rotated channels


class _Values(NamedTuple):
    """Reader of values and their parts; no parts where values are not read."""

    reader: Reader | NoneElsewhere
    parts: list[Part]


class _Plan(NamedTuple):
    """Static arguments of a kernel."""

    tree: Any  # tree structure of `_Refs`
    sizes: _Sizes
    mask: Mask
    keys: _Keys
    values: _Values
    interpret: bool


Plain = tuple[Int[Array, "B K I"] | None, Int[Array, "B K I"] | None]


@overload
def split_attention(
    queries: Queries, k: Rows, v: Rows, seen: Seen, mask: Mask, launch: Launch, *,
    with_logits: bool, dtype: DTypeLike, plain: Plain = ...,
) -> tuple[Array, Array, Array | NoneElsewhere]: ...  # fmt: skip
@overload
def split_attention(
    queries: Queries, k: Rows, v: None, seen: Seen, mask: Mask, launch: Launch, *,
    with_logits: bool, dtype: DTypeLike, plain: Plain = ...,
) -> tuple[None, Array, Array | NoneElsewhere]: ...  # fmt: skip
def split_attention(
    queries: Queries,
    k: Rows,
    v: Rows | None,
    seen: Seen,
    mask: Mask,
    launch: Launch,
    *,
    with_logits: bool,
    dtype: DTypeLike,
    plain: Plain = (None, None),
) -> tuple[
    Float[Array, "B K G T D"] | None,
    Float[Array, "B K G T"],
    Float[Array, "B K G T N"] | NoneElsewhere,
]:
    """Attends over rows in any form: output in `dtype`, log-sum-exps and, if wanted, logits.

    K is H or a multiple of it: list k reads head `k // (K / H)`. Without values the output is None.
    Logits are written only for tiles that are read. All other logits are undefined, and the caller
    must mask them. The caller gives the end of the places that are seen. For each tile of query
    rows it may give a range `plain` of tiles of dense slots, which need no mask.
    """
    q, turn, tile = queries.q, seen.turn, launch.tile
    batch, lists, group, tokens, channels = q.shape
    rows, places = group * tokens, seen.places
    if not batch * lists * rows * places:
        out, lse, logits = nothing(q, dtype, places, with_logits)
        return None if v is None else out, lse, logits
    keys = k.reader.of_keys(launch.interpret) if turn is None else k.reader
    values = values_view = None
    if v is not None:
        values = v.reader.of_values(launch.interpret)
        values_view = values.view(v.arrays)
    query_bytes = row_bytes(channels, k.reader.dtype)
    row_tile = tile.rows(query_bytes, rows)
    row_tiles = pl.cdiv(rows, row_tile)
    block = tile.block(max(x.reader.row_bytes for x in (k, v) if x is not None), places)
    splits = tile.splits(batch * lists * row_tiles, places, block, row_tile)
    shift = queries.shift
    if shift is not None:
        shift = shift.astype(jnp.float32).reshape(batch, lists, rows)
    frequency = turn_position = None
    if turn is not None:
        frequency = fixed_point(turn.inv_freq)[:, None]
        if turn.position is not seen.position:
            turn_position = turn.position
    arrays = _Refs(
        queries.position, *keys.cut(q.reshape(batch, lists, rows, channels)), shift,
        seen.end, seen.first, *plain, seen.index, seen.bias, seen.position,
        keys.view(k.arrays), values_view, frequency=frequency, turn_position=turn_position,
        out=None if v is None else jax.ShapeDtypeStruct(
            (batch, lists, splits, rows, channels), dtype if splits == 1 else jnp.float32
        ),
        lse=_float32(batch, lists, splits, rows),
        logits=_float32(batch, lists, rows, places) if with_logits else None,
    )  # fmt: skip
    leaves, tree = jax.tree.flatten(arrays)
    specs = jax.tree.leaves(_specs(arrays, lists))
    inputs = len(leaves) - len(jax.tree.leaves((arrays.out, arrays.lse, arrays.logits)))
    plan = _Plan(
        tree,
        _Sizes(row_tile, rows, tokens, places, block, splits),
        mask,
        _keys(keys, turn),
        _Values(None, []) if values is None else _Values(values, values.parts),
        launch.interpret,
    )
    results = route.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid=(batch, lists, row_tiles, splits),
        in_specs=specs[:inputs],
        out_specs=specs[inputs:],
        out_shape=leaves[inputs:],
        num_warps=tile.warps,
        num_stages=tile.stages_of(query_bytes),
        interpret=launch.interpret,
        name="split_attention",
    )(*leaves[:inputs])
    out = None if v is None else results[0]
    lse, logits = results[-2:] if with_logits else (results[-1], None)
    if splits > 1:
        out, lse = _join(out, lse, dtype, launch.interpret)
    per_query = (batch, lists, group, tokens)
    return (
        None if out is None else out.reshape(*per_query, channels),
        lse.reshape(per_query),
        None if logits is None else logits.reshape(*per_query, places),
    )


def row_bytes(channels: int, dtype: jnp.dtype) -> int:
    """Returns the bytes of a query in a program."""
    return power_of_two(channels) * dtype.itemsize


def _specs(arrays: _Refs, lists: int) -> _Refs:
    """Returns the part of every array that a program is given."""

    def spec_of(name: str, array: Any) -> Any:
        if name in _AXES:
            return jax.tree.map(lambda x: program_part(x, _AXES[name][: x.ndim]), array)
        return jax.tree.map(lambda x: head_part(x, lists), array)

    return _Refs(*(spec_of(*field) for field in arrays._asdict().items()))


def _keys(reader: Reader, turn: Turn | None) -> _Keys:
    if turn is None:
        return _Keys(reader, [], reader.parts, 1.0)
    pairs = turn.inv_freq.shape[-1]
    turned, rest = [], reader.channels - 2 * pairs
    if pairs and turn.interleaved:
        grain = math.gcd(2 * pairs, reader.grain)
        grain = pairs if grain % 2 else grain // 2  # no half of a pair
        for at in range(0, pairs, grain):
            first, second = (Part(2 * at + n, grain, stride=2) for n in (0, 1))
            turned.append(_Pair(first, second, at))
    elif pairs:
        grain = math.gcd(pairs, reader.grain)
        for at in range(0, pairs, grain):
            turned.append(_Pair(Part(at, grain), Part(pairs + at, grain), at))
    unrotated = split(2 * pairs, rest, math.gcd(2 * pairs, reader.grain))
    return _Keys(reader, turned, unrotated, turn.factor)


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _kernel(*leaves, plan: _Plan):
    """Runs one program; its refs are to the arrays of one row, list, and head of the store."""
    refs, sizes = jax.tree.unflatten(plan.tree, leaves), plan.sizes
    keys = plan.keys.reader
    row = pl.program_id(2) * sizes.rows + jnp.arange(sizes.rows, dtype=jnp.int32)
    is_row = row < sizes.total_rows

    def cells(part: Part):
        return (row[:, None], part.numbers[None, :]), is_row[:, None] & part.there[None, :]

    def queries(part: Part, limb: int = 0) -> Array:
        (at, channel), there = cells(part)
        cell = at, np.int32(limb), channel
        return route.load(refs.q.at[cell], mask=there, other=zero(refs.q.dtype))

    paired = [(pair, queries(pair.a), queries(pair.b)) for pair in plan.keys.pairs]
    limbs = range(keys.limbs)
    plain = [[queries(part, limb) for limb in limbs] for part in plan.keys.parts]
    if sizes.tokens == 1:
        query_position = refs.query_position[0]
    else:
        # Padding rows of the tile get the position -1, at which a query sees nothing.
        token = jax.lax.rem(row, jnp.full_like(row, sizes.tokens))
        query_position = route.load(refs.query_position.at[token], mask=is_row, other=NOWHERE)
    scale, shift = binary_scale(plan.mask), None
    if refs.scale is not None:
        of_query = route.load(refs.scale.at[row], mask=is_row, other=np.float32(0))
        scale = (of_query * scale)[:, None]
    if refs.shift is not None:
        of_query = route.load(refs.shift.at[row], mask=is_row, other=np.float32(0))
        shift = (of_query * binary_scale(plan.mask))[:, None]
    start, stop, first, end = _part(refs, plan)
    look = functools.partial(_look, refs, first, end, plan)

    def add(i, state, ahead=None):
        """Adds tile i; without what `look` has loaded of it, all queries see all of its slots."""
        top, total, acc = state
        slot = _places(i, plan)
        mask = live = turned = None
        k_tile = v_tile = _Tile(slot, slot, None)
        if ahead is not None:
            listed, mass, position, turned, k_row, v_row = ahead
            slot = slot if listed is None else listed
            live = live_slots(mass, position)
            mask = functools.partial(
                mask_tile, mass=mass, position=position, live=live, query_position=query_position,
                window=plan.mask.window,
            )  # fmt: skip
            k_tile = _tile(keys, slot, k_row, live, refs, plan)
            if plan.values.reader is not None:
                v_tile = _tile(plan.values.reader, slot, v_row, live, refs, plan)
        products = _products(refs, plan, paired, plain, k_tile, turned)
        products = _times(products, _factor(keys, refs.k, k_tile, live))
        products = products * scale
        logits = binary_logits(products if shift is None else products + shift, plan.mask)
        logits = logits if mask is None else mask(logits)
        if refs.logits is not None:
            place, natural = _places(i, plan), logits / LOG2_E
            inside = is_row[:, None] & (place < end)[None, :]
            route.store(refs.logits.at[row[:, None], place[None, :]], natural, mask=inside)
        new_top = jnp.maximum(top, logits.max(1))
        finite = new_top if mask is None else finite_or_zero(new_top)
        weights = route.exp2(logits - finite[:, None], plan.interpret)
        shrink = route.exp2(top - finite, plan.interpret)
        total = total * shrink + weights.sum(1)
        if acc:
            values = _mix(refs, plan, weights, v_tile, live)
            acc = tuple(a * shrink[:, None] + b for a, b in zip(acc, values, strict=True))
        return new_top, total, acc

    state = (
        jnp.full((sizes.rows,), -jnp.inf, jnp.float32),
        jnp.zeros((sizes.rows,), jnp.float32),
        tuple(jnp.zeros((sizes.rows, part.width), jnp.float32) for part in plan.values.parts),
    )
    skipped, skip_at = jnp.int32(0), stop
    if refs.plain_first is not None:
        skip_at = jnp.clip(refs.plain_first[...], start, stop)
        plain_end = jnp.clip(refs.plain_end[...], skip_at, stop)
        skipped = plain_end - skip_at
        state = jax.lax.fori_loop(skip_at, plain_end, add, state)

    def tile(n):
        """Returns the number of the n-th tile of those that are masked."""
        return n if refs.plain_first is None else jnp.where(n < skip_at, n, n + skipped)

    def add_masked(n, carry):
        # Addresses and masks are loaded one tile ahead. Loaded in the same round as the keys that
        # need them, they would keep the compiler from loading several tiles of keys at a time.
        ahead, state = carry
        return look(tile(n + 1)), add(tile(n), state, ahead)

    begin = look(tile(start)), state
    _, (top, total, acc) = jax.lax.fori_loop(start, stop - skipped, add_masked, begin)
    for part, rows in zip(plan.values.parts, acc, strict=True):
        cell, there = cells(part)
        rows = unscaled(rows, plan.values.reader.weights) / or_one(total)[:, None]
        route.store(refs.out.at[cell], rows.astype(refs.out.dtype), mask=there)
    route.store(refs.lse.at[row], top / LOG2_E + jnp.log(total), mask=is_row)


class _Tile(NamedTuple):
    """Slots of a tile, the addresses of their rows, and which rows are wanted; None: all."""

    slot: Array
    row: Array
    wanted: Array | None


def _tile(reader: Reader, slot, row: Array | None, live, refs: _Refs, plan: _Plan) -> _Tile:
    """Returns what is read of keys or values.

    Free slots are not read: they cost nothing, and their contents cannot reach a sum. Where they
    hold nothing but numbers, they are read all the same. The rows to load then do not depend on the
    mass and position of slots, which every thread would have to load for the rows that it reads.
    """
    if not reader.reads_free or refs.index is not None:
        return _Tile(slot, slot if row is None else row, live)
    if plan.sizes.places % plan.sizes.block:
        slot = jnp.minimum(slot, plan.sizes.places - 1)
    return _Tile(slot, slot, None)


def _products(refs: _Refs, plan: _Plan, paired, plain, tile: _Tile, position) -> Array:
    """Multiplies the queries with the keys of a tile, after rotating some of their channels."""
    reader, at = plan.keys.reader, (tile.row, tile.wanted)
    products: list[list[Array]] = []  # by part, those of each limb
    for pair, q_a, q_b in paired:
        a, b = (reader.load(refs.k, part, *at).astype(jnp.float32) for part in (pair.a, pair.b))
        frequency = route.load(
            refs.frequency.at[pair.first + jnp.arange(pair.a.width, dtype=jnp.int32)],
            mask=pair.a.there, other=np.int32(0),
        )  # fmt: skip
        turns = turns_of(position[:, None] * frequency[None, :])
        cos, sin = cos_sin_of_turns(turns, plan.keys.factor)
        for q, turned in ((q_a, a * cos - b * sin), (q_b, b * cos + a * sin)):
            products.append([dot(q, turned.astype(reader.dtype).T)])
    for limbs, keys in zip(plain, reader.rows(refs.k, plan.keys.parts, *at), strict=True):
        products.append([dot(limb, keys.T) for limb in limbs])
    of_limbs = [functools.reduce(operator.add, parts) for parts in zip(*products, strict=True)]
    return reader.joined(of_limbs)


def _factor(reader: Reader, at: dict, tile: _Tile, live) -> Array | None:
    """Returns what loaded rows must still be multiplied by; 0 for free slots."""
    factor = reader.factor(at, *tile)
    if factor is None or tile.wanted is not None:
        return factor
    return jnp.where(live, factor, 0)


def _mix(refs: _Refs, plan: _Plan, weights, tile: _Tile, live) -> list[Array]:
    """Sums the values of a tile by their weights, part by part."""
    reader = plan.values.reader
    factor, unit = _in_reach(_factor(reader, refs.v, tile, live), plan)
    weights = as_weights(_times(weights, factor), reader.weights)
    rows = reader.rows(refs.v, plan.values.parts, tile.row, tile.wanted)
    return [unit * dot_mixed(weights, part) for part in rows]


def _in_reach(factor: Float[Array, " N"] | None, plan: _Plan):
    """Returns factors over the greatest, and the greatest: float16 has no very small scales."""
    if factor is None or plan.values.reader.weights != jnp.float16:
        return factor, 1.0
    unit = factor.max(0)
    unit = jnp.where(unit > 0, unit, 1.0)
    return factor / unit, unit


def _times(x: Float[Array, "R N"], factor: Float[Array, " N"] | None) -> Float[Array, "R N"]:
    return x if factor is None else x * factor[None, :]


def _part(refs: _Refs, plan: _Plan):
    """Returns this program's tiles `[start, stop)`, and the places `[first, end)` to look at.

    Each program has an equal share of the tiles that hold those places.
    """
    block, end = jnp.int32(plan.sizes.block), jnp.minimum(refs.end[...], plan.sizes.places)
    first = refs.first[...] if refs.first is not None else jnp.int32(0)
    lowest = jax.lax.div(first, block)
    last = jax.lax.div(end + (block - 1), block)
    share = jax.lax.div(
        jnp.maximum(last - lowest, 0) + (plan.sizes.splits - 1), jnp.int32(plan.sizes.splits)
    )
    start = lowest + pl.program_id(3) * share
    return start, jnp.minimum(start + share, last), first, end


def _places(i, plan: _Plan):
    return i * plan.sizes.block + jnp.arange(plan.sizes.block, dtype=jnp.int32)


def _look(refs: _Refs, first, end, plan: _Plan, i):
    """Loads slots of tile i, with bias, position and addresses; a place without a slot is free.

    Slots are None if they are the places.
    """
    slot = place = _places(i, plan)
    there = (place >= first) & (place < end)
    if refs.index is not None:
        slot = route.load(refs.index.at[slot], mask=there, other=NOWHERE)
        there &= slot >= 0
    mass = route.load(refs.bias.at[slot], mask=there, other=NOTHING)
    position = route.load(refs.position.at[slot], mask=there, other=NOWHERE)
    turned = position
    if refs.turn_position is not None:
        turned = route.load(refs.turn_position.at[slot], mask=there, other=np.int32(0))
    rows = (
        None if side.reader is None else side.reader.address(arrays, slot, there)
        for side, arrays in ((plan.keys, refs.k), (plan.values, refs.v))
    )
    listed = None if refs.index is None else slot
    return listed, mass, position, turned if refs.frequency is not None else None, *rows


def binary_scale(mask: Mask) -> float:
    """Returns what products are multiplied by before `binary_logits` gets them."""
    return mask.scale * (LOG2_E if mask.soft_cap is None else 1.0)


def binary_logits(products: Float[Array, "R N"], mask: Mask) -> Float[Array, "R N"]:
    """Returns logits from scaled products, without bias and mask, times log2(e).

    With the factor, a weight is a power of 2, which a GPU computes by one instruction.
    """
    return products if mask.soft_cap is None else capped(products, mask.soft_cap) * LOG2_E


def mask_tile(
    logits: Float[Array, "R N"],
    mass: Float[Array, " N"],
    position: Int[Array, " N"],
    live: Bool[Array, " N"],
    query_position: Int[Array, " R"] | Int[Array, ""],
    window: int | None,
) -> Float[Array, "R N"]:
    """Adds the bias to `binary_logits`, and masks them as `masked` does.

    They are finite where slots are not live. If all queries have one position, the mask is one
    number for each slot.
    """
    mass, one_position = mass * LOG2_E, query_position.ndim == 0
    place = position if one_position else position[None, :]
    newest = query_position if one_position else query_position[:, None]
    visible = place <= newest
    if window is not None:
        visible &= place > newest - window
    if one_position:
        return logits + jnp.where(live & visible, mass, -jnp.inf)[None, :]
    return jnp.where(visible, logits + jnp.where(live, mass, -jnp.inf)[None, :], -jnp.inf)


def _join(
    out: Float[Array, "B K P R D"] | None, lse: Float[Array, "B K P R"], dtype, interpret: bool
) -> tuple[Float[Array, "B K R D"] | None, Float[Array, "B K R"]]:
    """Joins the parts, each weighted by its log-sum-exp."""
    if out is None:
        return None, jax.nn.logsumexp(lse, axis=2)
    batch, lists, parts, rows, channels = out.shape
    return route.pallas_call(
        functools.partial(_join_kernel, parts=parts, channels=channels),
        grid=(batch, lists, rows),
        in_specs=[
            pl.BlockSpec((None, None, parts, None, channels), lambda b, k, r: (b, k, 0, r, 0)),
            pl.BlockSpec((None, None, parts, None), lambda b, k, r: (b, k, 0, r)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, channels), lambda b, k, r: (b, k, r, 0)),
            pl.BlockSpec((None, None, None), lambda b, k, r: (b, k, r)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, lists, rows, channels), dtype),
            _float32(batch, lists, rows),
        ],
        interpret=interpret,
        name="join_parts",
    )(out, lse)


def _join_kernel(part_out, part_lse, out, lse, *, parts: int, channels: int):
    """Joins the parts of one query row."""

    def weigh(first, count: int, top):
        part = first + jnp.arange(count, dtype=jnp.int32)
        part_lses = route.load(part_lse.at[part], mask=part < parts, other=NOTHING)
        return part, part_lses if top is None else jnp.exp(part_lses - top)

    _, lses = weigh(0, power_of_two(parts), None)
    top = lses.max(0)
    finite = finite_or_zero(top)
    total = jnp.exp(lses - finite).sum(0)
    channel = jnp.arange(power_of_two(channels), dtype=jnp.int32)
    is_channel = channel < channels

    def add(i, acc):
        part, weight = weigh(i * PARTS, PARTS, finite)
        there = (part < parts)[:, None] & is_channel[None, :]
        rows = route.load(
            part_out.at[part[:, None], channel[None, :]], mask=there, other=zero(lse.dtype)
        )
        return acc + (rows * weight[:, None]).sum(0)

    acc = jnp.zeros(channel.shape, jnp.float32)
    acc = jax.lax.fori_loop(0, pl.cdiv(parts, PARTS), add, acc) / or_one(total)
    route.store(out.at[channel], acc.astype(out.dtype), mask=is_channel)
    lse[...] = top + jnp.log(total)


def nothing(q: Array, dtype: DTypeLike, places: int, with_logits: bool):
    """Returns the result without rows or places: a grid of no programs cannot be started."""
    logits = jnp.zeros((*q.shape[:-1], places), jnp.float32) if with_logits else None
    return jnp.zeros(q.shape, dtype), jnp.full(q.shape[:-1], -jnp.inf, jnp.float32), logits
