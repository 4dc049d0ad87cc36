"""Rows of a store in host memory, brought to the device one run after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.common import check_implementation

PIECE = 16  # slots of a long piece: a page of Quest, a fifth of an average cluster


def host_rows(
    stores: tuple[Float[Array, "B H S D"], ...],
    rows: tuple[Float[Array, "B K N D"], ...],
    index: Int[Array, "B K N"],
    missing: Bool[Array, "B K N"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "B K N D"], ...]:
    """Fills the missing entries of `rows` with the stores' slots `index`; nothing else moves.

    Entries whose slots follow each other are cut into pieces of 16 and of 1, each a dynamic slice
    of the host array that is then put on the device: a gather or a copy of the whole store never
    happens, and as many rows cross as are missing.

    Args:
      stores: in host memory (keys and values, say), read at the same slots.
      rows: in device memory, what is there already. K = H, or a multiple of it: entry k reads head
        `k // (K / H)`.
      index: slot of each entry.
      missing: which entries to fetch.
      implementation: `None` or `"xla"`.

    Returns:
      The rows, filled.
    """
    check_implementation(implementation)
    length = _run_left(index, missing)
    first = _run_start(index, missing)
    place = jnp.arange(index.shape[2], dtype=jnp.int32)[None, None]
    offset = place - jax.lax.cummax(jnp.where(first, place, 0), axis=2)
    piece = min(PIECE, index.shape[2], stores[0].shape[2])
    whole = (offset + length) // piece * piece  # slots of the run that long pieces cover
    long = missing & (offset < whole) & (offset % piece == 0)
    rows = _fetch(stores, rows, index, long, piece)
    return _fetch(stores, rows, index, missing & (offset >= whole), 1)


def _run_start(index: Int[Array, "B K N"], missing: Bool[Array, "B K N"]) -> Bool[Array, "B K N"]:
    """Missing entries that do not go on from the entry before."""
    goes_on = missing[..., 1:] & missing[..., :-1] & (index[..., 1:] == index[..., :-1] + 1)
    return missing & ~jnp.pad(goes_on, ((0, 0), (0, 0), (1, 0)))


def _run_left(index: Int[Array, "B K N"], missing: Bool[Array, "B K N"]) -> Int[Array, "B K N"]:
    """Entries of the run from each one on, itself included."""
    size = index.shape[2]
    place = jnp.arange(size, dtype=jnp.int32)[None, None]
    stop = _run_start(index, missing) | ~missing
    after = jnp.pad(stop[..., 1:], ((0, 0), (0, 0), (0, 1)), constant_values=True)
    end = jax.lax.cummin(jnp.where(after, place, size), axis=2, reverse=True)
    return end + 1 - place


def _fetch(stores, rows, index, jobs: Bool[Array, "B K N"], size: int):
    """One piece of `size` slots after the other, from every entry that is a job."""
    _, entries, places = index.shape
    group = entries // stores[0].shape[1]
    flat, slot = jobs.reshape(-1), index.reshape(-1)
    # The j-th job comes to place j of a list: cheaper than a sort or jnp.nonzero.
    number = jnp.where(flat, jnp.cumsum(flat, dtype=jnp.int32) - 1, flat.size)
    listed = jnp.zeros(flat.size, jnp.int32)
    listed = listed.at[number].set(jnp.arange(flat.size, dtype=jnp.int32), mode="drop")

    def piece(carry):
        done, rows = carry
        job = jax.lax.dynamic_index_in_dim(listed, done, keepdims=False)
        row, entry, place = job // (entries * places), job // places % entries, job % places
        start = jax.lax.dynamic_index_in_dim(slot, job, keepdims=False)

        def move(store: Array, into: Array) -> Array:
            shape = (1, 1, size, store.shape[3])
            found = jax.lax.dynamic_slice(store, (row, entry // group, start, 0), shape)
            found = jax.device_put(found, jax.memory.Space.Device)
            return jax.lax.dynamic_update_slice(
                into, found.astype(into.dtype), (row, entry, place, 0)
            )

        return done + 1, tuple(map(move, stores, rows))

    count = flat.sum(dtype=jnp.int32)
    return jax.lax.while_loop(lambda c: c[0] < count, piece, (jnp.zeros_like(count), rows))[1]
