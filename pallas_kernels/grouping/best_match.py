"""Best partners: the most similar row of B for each row of A, without a matrix of similarities.

A program takes some rows of A and goes through the rows of B, tile by tile, with a running maximum.
A and B are rows of stores that are read in place; `ChunkRows` says which.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.base import route
from pallas_kernels.base.kernel_parts import dot_mixed, load_rows, program_part
from pallas_kernels.base.tiles import SMALLEST, Tile, power_of_two
from pallas_kernels.grouping.cosine import inverse_length, round_cosine

Similarity = Literal["cosine", "l2", "inner_product", "rounded_cosine"]

NO_NUMBER = np.float32(-2.0)  # the rounded cosine of rows that hold NaN: below every cosine
NOTHING = np.float32(-np.inf)
LAST = np.int32(np.iinfo(np.int32).max)


class ChunkRows(NamedTuple):
    """Rows of a store that take part: each `step`-th from `first` on, in every chunk of `chunk`.

    The last chunk may be shorter.

    Example:
      >>> from pallas_kernels.grouping.best_match import ChunkRows
      >>> odd = ChunkRows(chunk=5, first=1, step=2)
      >>> odd.per_chunk, odd.chunks(12)
      (2, 3)
    """

    chunk: int
    first: int = 0
    step: int = 1

    @property
    def per_chunk(self) -> int:
        """Number of rows of a complete chunk that take part."""
        return len(range(self.first, self.chunk, self.step))

    def chunks(self, size: int) -> int:
        """Returns how many chunks a store of `size` rows has."""
        return -(-size // self.chunk)

    def rows(self, chunk: Array, number: Int[Array, " N"], size: int) -> tuple[Array, Array]:
        """Returns the `number`-th participating rows of a chunk, and whether they exist."""
        row = chunk * self.chunk + (self.first + number * self.step)
        return row, (number < self.per_chunk) & (row < size)

    def taken(self, size: int) -> Bool[np.ndarray, " S"]:
        """Returns which rows of a store take part, of `size` rows."""
        place = np.arange(size) % self.chunk
        return (place >= self.first) & ((place - self.first) % self.step == 0)


class _Plan(NamedTuple):
    """Static arguments of the kernel."""

    of_a: ChunkRows
    of_b: ChunkRows
    similarity: Similarity
    dtypes: tuple[jnp.dtype, jnp.dtype]  # dtypes in which rows of A and B are multiplied
    a_tile: int
    b_tile: int


def best_match(
    a: Float[Array, "B H M D"],
    b: Float[Array, "B H N D"],
    there: Bool[Array, "B H N"],
    of_a: ChunkRows,
    of_b: ChunkRows,
    similarity: Similarity,
    *,
    tile: Tile,
    interpret: bool,
) -> tuple[Float[Array, "B H M"], Int[Array, "B H M"]]:
    """Finds the most similar row of B for each row of A, in the chunk with the same number.

    Ties go to the lower row. Products and sums are float32; stored numbers of fewer bits are
    multiplied without conversion.

    Args:
      a: the store of A.
      b: the store of B, which may be the same.
      there: rows of b that may be partners; contents of other rows are ignored.
      of_a: which rows of `a` are A.
      of_b: which rows of `b` are B, in as many chunks.
      similarity: similarity of rows x of A and y of B. `"rounded_cosine"`: `x·y / (|x| |y|)`, 0 for
        a zero row, rounded by `round_cosine`, and -2 where it is not a number. The others order B
        as k-means does, and rows where they are not a number are not candidates: `"cosine"`,
        `x·y / |y|`; `"l2"`, `x·y - |y|² / 2`; `"inner_product"`, `x·y`.
      tile: bytes of the tiles of both stores.
      interpret: whether the kernel is interpreted.

    Returns:
      The float32 similarity of each row's best match, and its row in `b`; `-inf` and 0 where there
      is none, and for rows that are not in A.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.base.tiles import tile_of
      >>> from pallas_kernels.grouping.best_match import ChunkRows, best_match
      >>> x = jnp.array([[[[1.0, 0.0], [0.0, 1.0], [0.0, 3.0], [2.0, 0.0]]]])
      >>> similarity, row = best_match(x, x, jnp.ones((1, 1, 4), bool), ChunkRows(4, 0, 2),
      ...                              ChunkRows(4, 1, 2), "rounded_cosine",
      ...                              tile=tile_of("best_match"), interpret=True)
      >>> similarity.tolist(), row.tolist()
      ([[[1.0, -inf, 1.0, -inf]]], [[[3, 0, 1, 0]]])
    """
    shape, channels = a.shape[:3], a.shape[3]
    if not (a.size and b.size and of_b.per_chunk):
        return jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.int32)
    width = max(SMALLEST, power_of_two(channels))
    dtypes = _dtypes(a.dtype, b.dtype)
    tiles = (
        tile.block(width * dtype.itemsize, every.per_chunk)
        for dtype, every in zip(dtypes, (of_a, of_b), strict=True)
    )
    plan = _Plan(of_a, of_b, similarity, dtypes, *tiles)
    axes = (0, 1)
    out = [jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.float32, jnp.int32)]
    there = there.astype(jnp.int32)
    matches = route.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid=(*shape[:2], of_a.chunks(shape[2]), pl.cdiv(of_a.per_chunk, plan.a_tile)),
        in_specs=[program_part(x, axes) for x in (a, b, there)],
        out_specs=[program_part(x, axes) for x in out],
        out_shape=out,
        num_warps=tile.warps,
        num_stages=tile.stages,
        interpret=interpret,
        name="best_match",
    )(a, b, there)
    # The kernel writes the rows of A only.
    taken = of_a.taken(shape[2])
    value, token = matches
    if taken.all():
        return value, token
    taken = taken[None, None]
    return jnp.where(taken, value, NOTHING), jnp.where(taken, token, np.int32(0))


def _dtypes(a: jnp.dtype, b: jnp.dtype) -> tuple[jnp.dtype, jnp.dtype]:
    """Returns the dtypes of factors: those of the stores if `_product` takes them, else float32."""
    if a == b or (a, b) == (jnp.bfloat16, jnp.float32):
        return a, b
    return jnp.dtype(jnp.float32), jnp.dtype(jnp.float32)


def _kernel(a, b, there, best, match, *, plan: _Plan):
    """Finds the best matches of a tile of A; the refs hold the arrays of one row and head."""
    (a_rows, channels), b_rows = a.shape, b.shape[0]
    chunk = pl.program_id(2)

    def numbers(first, tile: int) -> Array:
        return first * tile + jnp.arange(tile, dtype=jnp.int32)

    def load(ref, row, wanted, dtype) -> Array:
        return load_rows(ref, row, wanted, SMALLEST).astype(dtype)

    a_row, is_row = plan.of_a.rows(chunk, numbers(pl.program_id(3), plan.a_tile), a_rows)
    x = load(a, a_row, is_row, plan.dtypes[0])

    def compare(i, carry):
        top, at = carry
        row, inside = plan.of_b.rows(chunk, numbers(i, plan.b_tile), b_rows)
        live = route.load(there.at[row], mask=inside, other=np.int32(0)) > 0
        similar = _similar(x, load(b, row, live, plan.dtypes[1]), channels, plan.similarity)
        similar = jnp.where(live[None, :], similar, NOTHING)
        here = similar.max(1)
        first = jnp.where(similar == here[:, None], row[None, :], LAST).min(1)
        higher = here > top  # of equals, the row of an earlier tile stays
        return jnp.where(higher, here, top), jnp.where(higher, first, at)

    none = jnp.full(a_row.shape, NOTHING, jnp.float32), jnp.zeros(a_row.shape, jnp.int32)
    tiles = jnp.int32(pl.cdiv(plan.of_b.per_chunk, plan.b_tile))
    top, at = jax.lax.fori_loop(jnp.int32(0), tiles, compare, none)
    route.store(best.at[a_row], top, mask=is_row)
    route.store(match.at[a_row], at, mask=is_row)


def _similar(
    x: Float[Array, "M D"], y: Float[Array, "N D"], channels: int, similarity: Similarity
) -> Float[Array, "M N"]:
    """Returns the similarities of two tiles; none is NaN, so that they can be ordered."""
    product, fallback = dot_mixed(x, y.T), NOTHING
    if similarity == "rounded_cosine":
        cosine = product * inverse_length(x)[:, None] * inverse_length(y)[None, :]
        product, fallback = round_cosine(cosine, channels, in_kernel=True), NO_NUMBER
    elif similarity == "cosine":
        product = product * inverse_length(y)[None, :]
    elif similarity == "l2":
        product = product - 0.5 * jnp.square(y.astype(jnp.float32)).sum(1)[None, :]
    return jnp.where(product == product, product, fallback)
