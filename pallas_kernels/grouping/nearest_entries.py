"""Search for the codebook entry whose direction is nearest to that of a vector."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.base import route
from pallas_kernels.base.dispatch import choose_implementation
from pallas_kernels.base.kernel_parts import dot, load_rows, program_part
from pallas_kernels.base.tiles import SMALLEST, power_of_two
from pallas_kernels.base.varying import varying

VECTORS = 256  # vectors that are compared at a time
ENTRIES = 4096  # entries whose cosines are held at a time: so few that they stay in a CPU's caches
TILE, MOST = 8192, 64  # numbers of a kernel's tile, and its most vectors or entries


def nearest_entries(
    vectors: Float[Array, "B N D"],
    entries: Float[Array, "B E D"],
    count: Int[Array, " B"],
    *,
    implementation: str | None = None,
) -> tuple[Int[Array, "B N"], Float[Array, "B N"]]:
    """Finds the entry with the highest cosine to each vector, the first of equals, and the cosine.

    The kernel holds no cosines beyond a tile. XLA goes through the entries in a loop whose length
    only the device knows.

    Args:
      vectors: vectors of any length; the cosine of a zero vector is 0.
      entries: entries of any length but 0.
      count: number of entries; without any, the cosines are `-inf`.
      implementation: `"pallas"` (the kernel), `"interpret"` (the kernel, interpreted on any
        device), `"xla"`, or None: the kernel on a GPU that can run it, XLA elsewhere.

    Raises:
      ValueError: shapes that do not fit each other; an unknown implementation, or one that the
        GPU is too old for.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import nearest_entries
      >>> entries = jnp.array([[[1.0, 0.0], [0.0, 2.0]]])
      >>> index, cosine = nearest_entries(jnp.array([[[0.0, 5.0]]]), entries, jnp.array([2]))
      >>> index.tolist(), cosine.tolist()
      ([[1]], [[1.0]])
    """
    chosen = choose_implementation(implementation, entries)
    if vectors.ndim != 3 or entries.ndim != 3:
        shapes = f"{vectors.shape}, {entries.shape}"
        raise ValueError(f"vectors must be [B, N, D] and entries [B, E, D], got {shapes}")
    if vectors.shape[::2] != entries.shape[::2] or count.shape != vectors.shape[:1]:
        raise ValueError(
            f"vectors, entries and count must have the same B, and as many channels, got "
            f"{vectors.shape}, {entries.shape} and {count.shape}"
        )
    if chosen == "xla" or not vectors.size or not entries.size:
        return jax.vmap(_nearest)(vectors, entries, count)
    wanted = jnp.ones(vectors.shape[:2], bool)
    units = directions(vectors)[0]
    return nearest_of_wanted(units, wanted, entries, count, chosen == "interpret")


def directions(
    vectors: Float[Array, "... D"],
) -> tuple[Float[Array, "... D"], Float[Array, ...]]:
    """Returns float32 unit vectors and Euclidean norms; a zero vector stays zero."""
    vectors = vectors.astype(jnp.float32)
    # Each vector is first divided by its largest number, as the square of a small number may be 0.
    largest = jnp.abs(vectors).max(-1)
    scaled = vectors / jnp.where(largest > 0, largest, 1.0)[..., None]
    length = jnp.sqrt((scaled * scaled).sum(-1))
    return scaled / jnp.where(length > 0, length, 1.0)[..., None], length * largest


def nearest_directions(
    units: Float[Array, "N D"], entries: Float[Array, "E D"], count: Int[Array, ""]
) -> tuple[Int[Array, " N"], Float[Array, " N"]]:
    """Computes `nearest_entries` of so few unit vectors that N x ENTRIES cosines may be held."""
    number, total = units.shape[0], entries.shape[0]
    size = min(ENTRIES, total)

    def block(j: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        # The last block begins early enough to be whole; comparing entries twice changes nothing.
        start = jnp.minimum(j * size, total - size)
        rows, norms = directions(jax.lax.dynamic_slice_in_dim(entries, start, size))
        entry = (start + jnp.arange(size, dtype=jnp.int32))[:, None]
        cosine = jnp.minimum(jnp.dot(rows, units.T, precision="highest"), 1.0)
        cosine = jnp.where((entry < count) & (norms > 0)[:, None], cosine, -jnp.inf)
        highest = cosine.max(0)
        first = jnp.where(cosine == highest[None], entry, total).min(0)
        higher = highest > best[1]
        return jnp.where(higher, first, best[0]), jnp.maximum(highest, best[1])

    none = jnp.zeros(number, jnp.int32), jnp.full(number, -jnp.inf, jnp.float32)
    none = varying(none, units, entries, count)
    return jax.lax.fori_loop(0, -(-count // size), block, none)


def nearest_of_wanted(
    units: Float[Array, "B N D"],
    wanted: Bool[Array, "B N"],
    entries: Float[Array, "B E D"],
    count: Int[Array, " B"],
    interpret: bool,
) -> tuple[Int[Array, "B N"], Float[Array, "B N"]]:
    """Computes `nearest_entries` of unit vectors by one launch; unwanted ones get 0 and -inf.

    A program without wanted vectors ends at once.
    """
    batch, number, channels = units.shape
    padded = max(SMALLEST, power_of_two(channels))
    tile = max(SMALLEST, min(TILE // padded, MOST))
    out = [jax.ShapeDtypeStruct((batch, number), dtype) for dtype in (jnp.int32, jnp.float32)]
    return route.pallas_call(
        functools.partial(_kernel, tile=tile),
        grid=(batch, pl.cdiv(number, tile)),
        in_specs=[program_part(x, (0,)) for x in (units, wanted, entries, count)],
        out_specs=[program_part(x, (0,)) for x in out],
        out_shape=out,
        num_stages=1,
        interpret=interpret,
        name="nearest_entries",
    )(units, wanted.astype(jnp.int32), entries, count.astype(jnp.int32))


def _kernel(units, wanted, entries, count, index, cosine, *, tile: int):
    """Compares a tile of vectors with all entries."""
    vector = pl.program_id(1) * tile + jnp.arange(tile, dtype=jnp.int32)
    there = vector < units.shape[0]
    looks = route.load(wanted.at[vector], mask=there, other=np.int32(0)) > 0
    tile_units = load_rows(units, vector, there, SMALLEST)
    total = jnp.where(looks.astype(jnp.int32).max() > 0, count[...], 0)

    def compare(i, best):
        entry = i * tile + jnp.arange(tile, dtype=jnp.int32)
        rows, norms = directions(load_rows(entries, entry, entry < total, SMALLEST))
        similar = jnp.minimum(dot(rows, tile_units.T), 1.0)
        similar = jnp.where(((entry < total) & (norms > 0))[:, None], similar, -jnp.inf)
        highest = similar.max(0)
        first = jnp.where(similar == highest[None, :], entry[:, None], entries.shape[0]).min(0)
        higher = highest > best[1]
        return jnp.where(higher, first, best[0]), jnp.maximum(highest, best[1])

    none = jnp.zeros((tile,), jnp.int32), jnp.full((tile,), -jnp.inf)
    rounds = jax.lax.div(total + np.int32(tile - 1), np.int32(tile))
    best_entry, highest = jax.lax.fori_loop(np.int32(0), rounds, compare, none)
    route.store(index.at[vector], jnp.where(looks, best_entry, 0), mask=there)
    route.store(cosine.at[vector], jnp.where(looks, highest, -jnp.inf), mask=there)


def _nearest(
    vectors: Float[Array, "N D"], entries: Float[Array, "E D"], count: Int[Array, ""]
) -> tuple[Int[Array, " N"], Float[Array, " N"]]:
    units, size = directions(vectors)[0], vectors.shape[0]
    part = min(VECTORS, size)
    parts = jnp.pad(units, ((0, -size % part), (0, 0))).reshape(-1, part, units.shape[1])
    index, cosine = jax.lax.map(lambda units: nearest_directions(units, entries, count), parts)
    return index.reshape(-1)[:size], cosine.reshape(-1)[:size]
