"""Fetches rows of a store in host memory to the device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int, Shaped

from pallas_kernels.base import route
from pallas_kernels.base.dispatch import choose_implementation
from pallas_kernels.base.kernel_parts import head_part, program_part, zero
from pallas_kernels.base.tiles import power_of_two

PIECE = 16  # slots of a long piece: a page of Quest, a fifth of an average cluster
# Numbers that a program of the kernel fetches: 16 rows of 128 channels. A row takes long to cross,
# so tiles are small and many, and all rows of a step are on their way at once.
TILE = 2048
NOWHERE = np.int32(-1)


def host_rows(
    stores: tuple[Shaped[Array, "B H S D"], ...],
    rows: tuple[Shaped[Array, "B K N D"], ...],
    index: Int[Array, "B K N"],
    missing: Bool[Array, "B K N"],
    *,
    implementation: str | None = None,
) -> tuple[Shaped[Array, "B K N D"], ...]:
    """Fills the missing entries of `rows` with the stores' slots `index`; nothing else moves.

    The kernel reads the missing rows directly from host memory. It fills `rows` in place, unless
    their former contents are still needed. Entries that are not missing are neither fetched nor
    written.

    The reference cuts entries whose slots follow each other into pieces of 16 and of 1. Each piece
    is a dynamic slice of the host array that is then put on the device. The store is never gathered
    from or copied as a whole, and only the missing rows cross.

    Args:
      stores: arrays in host memory (such as keys and values), read at the same slots.
      rows: rows that are already in device memory. K = H, or a multiple of it: entry k reads head
        `k // (K / H)`.
      index: slot of each entry; the stores must have the slots of missing entries.
      missing: which entries to fetch.
      implementation: `"pallas"` (the kernel), `"interpret"` (the kernel, interpreted on any device;
        it copies the stores to the device first, since not every version of JAX can interpret a
        kernel that reads host memory), `"xla"`, or None: the kernel on a GPU that can run it, XLA
        elsewhere.

    Returns:
      The rows, filled.

    Raises:
      ValueError: shapes that do not fit each other; an unknown implementation, or one that the
        GPU is too old for.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import host_rows
      >>> store = jax.device_put(jnp.arange(8.0).reshape(1, 1, 4, 2), jax.memory.Space.Host)
      >>> index, missing = jnp.array([[[3, 0]]]), jnp.array([[[True, False]]])
      >>> jax.jit(host_rows)((store,), (jnp.zeros((1, 1, 2, 2)),), index, missing)[0].tolist()
      [[[[6.0, 7.0], [0.0, 0.0]]]]
    """
    chosen = choose_implementation(implementation, *rows)
    _check(stores, rows, index, missing)
    if chosen != "xla":
        return _read(stores, rows, index, missing, chosen == "interpret")
    length = _run_left(index, missing)
    first = _run_start(index, missing)
    place = jnp.arange(index.shape[2], dtype=jnp.int32)[None, None]
    offset = place - jax.lax.cummax(jnp.where(first, place, 0), axis=2)
    piece = min(PIECE, index.shape[2], stores[0].shape[2])
    covered = (offset + length) // piece * piece  # slots of the run that long pieces cover
    long = missing & (offset < covered) & (offset % piece == 0)
    rows = _fetch(stores, rows, index, long, piece)
    return _fetch(stores, rows, index, missing & (offset >= covered), 1)


def _check(stores, rows, index, missing) -> None:
    """Raises ValueError unless all shapes fit those of the first store and of the index."""
    if not stores or len(stores) != len(rows):
        raise ValueError(
            f"stores and rows must be of one number, at least 1, got {len(stores)} and {len(rows)}"
        )
    first = stores[0].shape
    if len(first) != 4 or index.ndim != 3:
        raise ValueError(
            f"stores must be [B, H, S, D] and index [B, K, N], got {first} and {index.shape}"
        )
    if index.shape[0] != first[0] or first[1] < 1 or index.shape[1] % first[1]:
        raise ValueError(
            f"index must be [B, K, N] with B = {first[0]} and K a multiple of {first[1]}, got "
            f"{index.shape}"
        )
    expected = [("stores", x, first) for x in stores]
    expected += [("rows", x, (*index.shape, first[3])) for x in rows]
    for name, x, shape in (*expected, ("missing", missing, index.shape)):
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {x.shape}")


def _read(stores, rows, index, missing, interpret: bool) -> tuple[Shaped[Array, "B K N D"], ...]:
    """Fetches all missing rows by one launch."""
    if not rows[0].size:
        return tuple(rows)
    if interpret:
        stores = [jax.device_put(x, jax.memory.Space.Device) for x in stores]
    # One array for both: the slot of a missing entry, -1 for the others.
    slot = jnp.where(missing, index.astype(jnp.int32), NOWHERE)
    lists, entries, channels = index.shape[1], index.shape[2], rows[0].shape[3]
    tile = max(1, min(TILE // power_of_two(channels), power_of_two(entries)))
    filled = [program_part(x, (0, 1)) for x in rows]
    filled_rows = route.pallas_call(
        functools.partial(_kernel, tile=tile, stores=len(stores)),
        grid=(*index.shape[:2], pl.cdiv(entries, tile)),
        in_specs=[program_part(slot, (0, 1)), *(head_part(x, lists) for x in stores), *filled],
        out_specs=filled,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in rows],
        input_output_aliases={1 + len(stores) + i: i for i in range(len(rows))},
        interpret=interpret,
        name="host_rows",
    )(slot, *stores, *rows)
    return tuple(filled_rows)


def _kernel(slot, *refs, tile: int, stores: int):
    """Fetches a tile of entries of all stores.

    `refs` are the stores, the rows, and the rows once more as outputs.
    """
    sources, filled = refs[:stores], refs[2 * stores :]
    (slots, channels), entries = sources[0].shape, slot.shape[0]
    entry = pl.program_id(2) * tile + jnp.arange(tile, dtype=jnp.int32)
    channel = jnp.arange(power_of_two(channels), dtype=jnp.int32)
    wanted_slot = route.load(slot.at[entry], mask=entry < entries, other=NOWHERE)
    wanted = ((wanted_slot >= 0) & (wanted_slot < slots))[:, None] & (channel < channels)[None, :]
    # All loads are issued before the first is waited for.
    fetched = [
        route.load(x.at[wanted_slot[:, None], channel[None, :]], mask=wanted, other=zero(x.dtype))
        for x in sources
    ]
    for x, into in zip(fetched, filled, strict=True):
        route.store(into.at[entry[:, None], channel[None, :]], x.astype(into.dtype), mask=wanted)


def _run_start(index: Int[Array, "B K N"], missing: Bool[Array, "B K N"]) -> Bool[Array, "B K N"]:
    """Returns first entries of runs: missing, with a slot that does not follow the slot before."""
    goes_on = missing[..., 1:] & missing[..., :-1] & (index[..., 1:] == index[..., :-1] + 1)
    return missing & ~jnp.pad(goes_on, ((0, 0), (0, 0), (1, 0)))


def _run_left(index: Int[Array, "B K N"], missing: Bool[Array, "B K N"]) -> Int[Array, "B K N"]:
    """Returns how many entries of its run are left at each entry, itself included."""
    size = index.shape[2]
    place = jnp.arange(size, dtype=jnp.int32)[None, None]
    stop = _run_start(index, missing) | ~missing
    after = jnp.pad(stop[..., 1:], ((0, 0), (0, 0), (0, 1)), constant_values=True)
    end = jax.lax.cummin(jnp.where(after, place, size), axis=2, reverse=True)
    return end + 1 - place


@functools.partial(jax.jit, static_argnames="size")
def _fetch(stores, rows, index, jobs: Bool[Array, "B K N"], size: int):
    """Fetches pieces of `size` slots one by one, each beginning at an entry that is a job."""
    _, entries, places = index.shape
    group = entries // stores[0].shape[1]
    flat, slot = jobs.reshape(-1), index.reshape(-1)
    # Writes the j-th job to place j of a list, which is cheaper than a sort or jnp.nonzero.
    number = jnp.where(flat, jnp.cumsum(flat, dtype=jnp.int32) - 1, flat.size)
    listed = jnp.zeros(flat.size, jnp.int32)
    listed = listed.at[number].set(jnp.arange(flat.size, dtype=jnp.int32), mode="drop")

    def piece(carry):
        done, rows = carry
        job = jax.lax.dynamic_index_in_dim(listed, done, keepdims=False)
        row, entry, place = job // (entries * places), job // places % entries, job % places
        zero = jnp.zeros_like(job)  # all indices of a slice have one type, also with x64
        start = jax.lax.dynamic_index_in_dim(slot, job, keepdims=False)

        def move(store: Array, into: Array) -> Array:
            shape = (1, 1, size, store.shape[3])
            slots = jax.lax.dynamic_slice(store, (row, entry // group, start, zero), shape)
            slots = jax.device_put(slots, jax.memory.Space.Device)
            return jax.lax.dynamic_update_slice(
                into, slots.astype(into.dtype), (row, entry, place, zero)
            )

        return done + 1, tuple(map(move, stores, rows))

    count = flat.sum(dtype=jnp.int32)
    return jax.lax.while_loop(lambda c: c[0] < count, piece, (jnp.zeros_like(count), rows))[1]
