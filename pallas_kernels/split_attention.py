"""The kernels of `decode_attention` and `gather_attention`: softmax over parts of the slots.

A program takes the query rows of one KV head and one part of its slots, goes through them tile by
tile with a running softmax, and leaves its part's normalised output and log-sum-exp in float32. A
second kernel joins the parts: by XLA that would be three launches, each as long as a short cache
takes to read. What is read of keys and values is the live slots, once.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.common import NEG_INF
from pallas_kernels.tiles import SMALLEST, Tile, power_of_two

ROWS = 64  # query rows of a program at most: more would not leave room for its output
PARTS = 32  # that are joined at a time
NOTHING = np.float32(NEG_INF)
NOWHERE = np.int32(-1)


class Slots(NamedTuple):
    """What a kernel knows of the slots, and the places `[first, end)` that it looks at.

    A place is a slot, or, with an `index`, an entry of the list.
    """

    bias: Float[Array, "B H S"]
    position: Int[Array, "B H S"]
    end: Int[Array, "B K"]
    first: Int[Array, "B K"] | None = None  # None: 0
    index: Int[Array, "B K N"] | None = None

    @property
    def places(self) -> int:
        """Static number of places."""
        return (self.bias if self.index is None else self.index).shape[2]


class _Sizes(NamedTuple):
    """What is static in a kernel."""

    rows: int  # query rows of a program
    total_rows: int
    tokens: int
    channels: int
    padded_channels: int
    block: int
    splits: int
    scale: float
    window: int | None
    soft_cap: float | None
    names: tuple[str, ...]  # of the refs


def split_attention(
    q: Float[Array, "B K G T D"],
    k: Float[Array, "B H S D"],
    v: Float[Array, "B H S D"],
    slots: Slots,
    query_position: Int[Array, "B T"],
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    tile: Tile,
    with_logits: bool,
    interpret: bool,
) -> tuple[Float[Array, "B K G T D"], Float[Array, "B K G T"], Float[Array, "B K G T N"] | None]:
    """Output, log-sum-exp and, if wanted, the logits that led there.

    K is H or a multiple of it: list k reads head `k // (K / H)`. Logits stand where a tile was
    looked at and are anything elsewhere: mask them.
    """
    batch, lists, group, tokens, channels = q.shape
    rows, places = group * tokens, slots.places
    if not batch * lists * rows * places:
        return _nothing(q, v, places, with_logits)
    padded = max(SMALLEST, power_of_two(channels))
    row_tile = min(ROWS, max(SMALLEST, power_of_two(rows)))
    row_tiles = pl.cdiv(rows, row_tile)
    block = tile.block(padded * k.dtype.itemsize, places)
    splits = tile.splits(batch * lists * row_tiles, places, block)
    per_head = np.int32(lists // k.shape[1])
    row, own, part = (0,), (0, 1), (0, 1, 3)  # axes of the grid that choose
    queries = q.astype(k.dtype).reshape(batch, lists, rows, channels)
    inputs = {
        "query_position": (query_position, row), "q": (queries, own), "k": (k, None),
        "v": (v, None), "bias": (slots.bias, None), "position": (slots.position, None),
        "end": (slots.end, own), "first": (slots.first, own), "index": (slots.index, own),
    }  # fmt: skip
    inputs = {name: (x, axes) for name, (x, axes) in inputs.items() if x is not None}
    outputs = {
        "out": (_float32(batch, lists, splits, rows, channels), part),
        "lse": (_float32(batch, lists, splits, rows), part),
    }
    if with_logits:
        outputs["logits"] = (_float32(batch, lists, rows, places), own)
    sizes = _Sizes(
        row_tile, rows, tokens, channels, padded, block, splits,
        scale, window, soft_cap, (*inputs, *outputs),
    )  # fmt: skip

    def spec(x: Array, axes: tuple[int, ...] | None) -> pl.BlockSpec:
        return _rows_of(x, axes) if axes else _head_of(x, per_head)

    parts = pl.pallas_call(
        functools.partial(_kernel, sizes=sizes),
        grid=(batch, lists, row_tiles, splits),
        in_specs=[spec(*x) for x in inputs.values()],
        out_specs=[spec(*x) for x in outputs.values()],
        out_shape=[x for x, _ in outputs.values()],
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="split_attention",
    )(*(x for x, _ in inputs.values()))
    out, lse = _join(*parts[:2], v.dtype, interpret)
    per_query = (batch, lists, group, tokens)
    return (
        out.reshape(*per_query, channels),
        lse.reshape(per_query),
        parts[2].reshape(*per_query, places) if with_logits else None,
    )


def _rows_of(x: Array, axes: tuple[int, ...]) -> pl.BlockSpec:
    """What the ids of a program on these axes of the grid pick, all of the other axes of `x`."""
    rest = x.ndim - len(axes)
    shape = (None,) * len(axes) + x.shape[len(axes) :]
    return pl.BlockSpec(shape, lambda *ids: (*(ids[axis] for axis in axes), *(0,) * rest))


def _head_of(x: Array, per_head: np.int32) -> pl.BlockSpec:
    """The head that a program's list reads, of what the store has."""

    def pick(*ids):
        head = ids[1] if per_head == 1 else jax.lax.div(ids[1], per_head)
        return (ids[0], head, *(0,) * (x.ndim - 2))

    return pl.BlockSpec((None, None, *x.shape[2:]), pick)


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _kernel(*refs, sizes: _Sizes):
    """One program: refs are of one (row, list), and those of the store of the list's head."""
    at = dict(zip(sizes.names, refs, strict=True))
    k, v, logits = at["k"], at["v"], at.get("logits")
    row = pl.program_id(2) * sizes.rows + jnp.arange(sizes.rows, dtype=jnp.int32)
    channel = jnp.arange(sizes.padded_channels, dtype=jnp.int32)
    is_row, is_channel = row < sizes.total_rows, channel < sizes.channels
    cell, there = (row[:, None], channel[None, :]), is_row[:, None] & is_channel[None, :]
    queries = plt.load(at["q"].at[cell], mask=there, other=_zero(k))
    # Rows that only fill the tile stand at -1, where a query sees nothing.
    token = jax.lax.rem(row, jnp.full_like(row, sizes.tokens))
    own = plt.load(at["query_position"].at[token], mask=is_row, other=NOWHERE)
    start, stop, end = _part(at, sizes)
    look = functools.partial(_look, at, end, sizes)

    def add(i, carry):
        (slot, mass, position), top, total, acc = carry
        # One tile ahead: an address or a mask that is loaded in the same round as the keys it is
        # for keeps the compiler from having several tiles of keys under way.
        ahead = look(i + 1)
        # Of a free slot nothing is read: what stands there costs nothing and cannot reach a sum.
        live = (mass > NEG_INF) & (position >= 0)
        wanted = live[:, None] & is_channel[None, :]
        cell = (slot[:, None], channel[None, :])
        keys = plt.load(k.at[cell], mask=wanted, other=_zero(k))
        seen = _logits(_dot(queries, keys.T), mass, position, live, own, sizes)
        if logits is not None:
            place = _places(i, sizes)
            inside = is_row[:, None] & (place < end)[None, :]
            plt.store(logits.at[row[:, None], place[None, :]], seen, mask=inside)
        new_top = jnp.maximum(top, seen.max(1))
        finite = _finite(new_top)
        weights, shrink = jnp.exp(seen - finite[:, None]), jnp.exp(top - finite)
        values = plt.load(v.at[cell], mask=wanted, other=_zero(v))
        acc = acc * shrink[:, None] + _dot(weights.astype(v.dtype), values)
        return ahead, new_top, total * shrink + weights.sum(1), acc

    begin = (
        look(start),
        jnp.full((sizes.rows,), NEG_INF, jnp.float32),
        jnp.zeros((sizes.rows,), jnp.float32),
        jnp.zeros((sizes.rows, sizes.padded_channels), jnp.float32),
    )
    _, top, total, acc = jax.lax.fori_loop(start, stop, add, begin)
    plt.store(at["out"].at[cell], acc / _or_one(total)[:, None], mask=there)
    plt.store(at["lse"].at[row], top + jnp.log(total), mask=is_row)


def _part(at, sizes: _Sizes):
    """The tiles of this program, an equal share of those that hold what is to be seen."""
    block, end = jnp.int32(sizes.block), at["end"][...]
    first = jax.lax.div(at["first"][...], block) if "first" in at else jnp.int32(0)
    last = jax.lax.div(end + (block - 1), block)
    share = jax.lax.div(jnp.maximum(last - first, 0) + (sizes.splits - 1), jnp.int32(sizes.splits))
    start = first + pl.program_id(3) * share
    return start, jnp.minimum(start + share, last), end


def _places(i, sizes: _Sizes):
    return i * sizes.block + jnp.arange(sizes.block, dtype=jnp.int32)


def _look(at, end, sizes: _Sizes, i):
    """The slots of tile i, their bias and position; free where there is none."""
    slot = _places(i, sizes)
    there = slot < end
    if "index" in at:
        slot = plt.load(at["index"].at[slot], mask=there, other=NOWHERE)
        there &= slot >= 0
    mass = plt.load(at["bias"].at[slot], mask=there, other=NOTHING)
    return slot, mass, plt.load(at["position"].at[slot], mask=there, other=NOWHERE)


def _logits(products, mass, position, live, own, sizes: _Sizes):
    """The masked logits of a tile, as `common.mask_products` has them."""
    logits = products * sizes.scale
    if sizes.soft_cap is not None:
        logits = sizes.soft_cap * jnp.tanh(logits / sizes.soft_cap)
    visible = live[None, :] & (position[None, :] <= own[:, None])
    if sizes.window is not None:
        visible &= position[None, :] > own[:, None] - sizes.window
    return jnp.where(visible, logits + mass[None, :], NEG_INF)


def _dot(a: Array, b: Array) -> Array:
    # What is stored as float32 is not rounded to TF32's 10 bits on the way.
    precision = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _zero(ref) -> np.generic:
    return np.zeros((), ref.dtype)[()]


def _finite(top: Array) -> Array:
    """What is taken off before exp: a row that has seen nothing has -inf, and exp(-inf - 0) = 0."""
    return jnp.where(top == NEG_INF, 0.0, top)


def _or_one(total: Array) -> Array:
    """What is divided by: a row that has seen nothing is 0 as it is."""
    return jnp.where(total == 0, 1.0, total)


def _join(
    out: Float[Array, "B K P R D"], lse: Float[Array, "B K P R"], dtype, interpret: bool
) -> tuple[Float[Array, "B K R D"], Float[Array, "B K R"]]:
    """Puts the parts together, each weighing what its log-sum-exp says."""
    batch, lists, parts, rows, channels = out.shape
    return pl.pallas_call(
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
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="join_parts",
    )(out, lse)


def _join_kernel(part_out, part_lse, out, lse, *, parts: int, channels: int):
    """One query row."""

    def weigh(first, count: int, top):
        part = first + jnp.arange(count, dtype=jnp.int32)
        own = plt.load(part_lse.at[part], mask=part < parts, other=NOTHING)
        return part, own if top is None else jnp.exp(own - top)

    _, own = weigh(0, power_of_two(parts), None)
    top = own.max(0)
    finite = _finite(top)
    total = jnp.exp(own - finite).sum(0)
    channel = jnp.arange(power_of_two(channels), dtype=jnp.int32)
    is_channel = channel < channels

    def add(i, acc):
        part, weight = weigh(i * PARTS, PARTS, finite)
        there = (part < parts)[:, None] & is_channel[None, :]
        rows = plt.load(part_out.at[part[:, None], channel[None, :]], mask=there, other=_zero(lse))
        return acc + (rows * weight[:, None]).sum(0)

    acc = jnp.zeros(channel.shape, jnp.float32)
    acc = jax.lax.fori_loop(0, pl.cdiv(parts, PARTS), add, acc) / _or_one(total)
    plt.store(out.at[channel], acc.astype(out.dtype), mask=is_channel)
    lse[...] = top + jnp.log(total)


def _nothing(q: Array, v: Array, places: int, with_logits: bool):
    """The answer where there is nothing to look at: no program could be started."""
    logits = jnp.zeros((*q.shape[:-1], places), jnp.float32) if with_logits else None
    return jnp.zeros(q.shape, v.dtype), jnp.full(q.shape[:-1], NEG_INF, jnp.float32), logits
