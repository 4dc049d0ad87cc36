"""Rows of arrays: gathered by number, or visited block by block."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.export
from jaxtyping import Array, Float, Int

BLOCK = 1024  # slots that are decoded at a time: as many as stay in the caches of a CPU
T = TypeVar("T")

# No index here is negative. Handling negative ones would add a fifth to what a prompt pass traces.
block_of = functools.partial(jax.lax.dynamic_slice_in_dim, allow_negative_indices=False)
entry_of = functools.partial(
    jax.lax.dynamic_index_in_dim, keepdims=False, allow_negative_indices=False
)
put_block = functools.partial(jax.lax.dynamic_update_slice_in_dim, allow_negative_indices=False)

# Mapped over rows and heads: indexing them by iota would bring collectives when a cache is sharded
# over rows or heads.
_take = jax.vmap(jax.vmap(lambda x, index: x.at[index].get(wrap_negative_indices=False)))


def counted_rows(x: Array) -> int:
    """Returns the number of rows of `x [B, ...]` by which sizes of blocks are chosen.

    It is 1 in a program that `jax.export` makes for any number of rows.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.base.rows import counted_rows
      >>> counted_rows(jnp.zeros((3, 4)))
      3
    """
    return 1 if jax.export.is_symbolic_dim(x.shape[0]) else x.shape[0]


def take_slots(x: Array, index: Int[Array, "B K N"]) -> Array:
    """Gathers slots of every head: `x [B, H, S, ...]` at `index` is `[B, K, N, ...]`.

    K is H or a multiple of it: list k reads head `k // (K / H)`. No index is negative.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.base.rows import take_slots
      >>> take_slots(jnp.array([[[5, 6, 7]]]), jnp.array([[[2, 0], [1, 1]]])).tolist()
      [[[7, 5], [6, 6]]]
    """
    by_head = index.reshape(*x.shape[:2], -1)
    return _take(x, by_head).reshape(*index.shape, *x.shape[3:])


def take_shared(x: Float[Array, "#B N D"], index: Int[Array, "B *I"]) -> Float[Array, "B *I D"]:  # noqa: UP037
    """Gathers from each row's own array, or from one that all share; indices are 0 to N - 1."""

    def take(x: Array, index: Array) -> Array:
        return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)

    if x.shape[0] == 1:  # on CPU a gather with a batch axis takes longer
        return take(x[0], index)
    return jax.vmap(take)(x, index)


def over_blocks(slots: int, block: int, add: Callable[[Array | int, int, T], T], carry: T) -> T:
    """Calls `add(start, count, carry)` block by block over slots; the last block has the rest.

    Fewer slots than two blocks form one block, which compiles in half the time.
    """
    blocks, rest = divmod(slots, block)
    if blocks <= 1:
        return add(0, slots, carry) if slots else carry
    carry = jax.lax.fori_loop(0, blocks, lambda i, c: add(i * block, block, c), carry)
    return add(blocks * block, rest, carry) if rest else carry
