"""k-means by kernels: `best_match` assigns keys to centroids, another kernel computes means.

All rows and heads are one launch, and the number of launches is known beforehand: nothing waits for
the host. Rounds after convergence compute the same labels and centroids again.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.base import route
from pallas_kernels.base.kernel_parts import dot, load_rows, program_part, store_rows
from pallas_kernels.base.tiles import SMALLEST, Tile, power_of_two, tile_of
from pallas_kernels.grouping.best_match import ChunkRows, Similarity, best_match

NONE = np.int32(-1)


def kmeans_by_kernels(
    keys: Float[Array, "B H S D"],
    members: Bool[Array, "B H S"],
    centroids: Float[Array, "B H C D"],
    there: Bool[Array, "B H C"],
    similarity: Similarity,
    rounds: int,
    interpret: bool,
) -> tuple[Int[Array, "B H S"], Float[Array, "B H C D"]]:
    """Runs all rounds of `kmeans`."""
    size, clusters = keys.shape[2], centroids.shape[2]
    members = members & there.any(-1, keepdims=True)

    def assign(centroids: Float[Array, "B H C D"]) -> Int[Array, "B H S"]:
        _, label = best_match(
            keys, centroids, there, ChunkRows(size), ChunkRows(clusters), similarity,
            tile=tile_of("best_match"), interpret=interpret,
        )  # fmt: skip
        return jnp.where(members, label, clusters)

    def move(_, state: tuple[Array, Array]) -> tuple[Array, Array]:
        centroids = means(keys, *state, tile=tile_of("kmeans"), interpret=interpret)
        return assign(centroids), centroids

    centroids = centroids.astype(jnp.float32)
    # XLA runs a loop with static bounds on a GPU without waiting for the device.
    return jax.lax.fori_loop(0, rounds, move, (assign(centroids), centroids))


def means(
    keys: Float[Array, "B H S D"],
    label: Int[Array, "B H S"],
    centroids: Float[Array, "B H C D"],
    *,
    tile: Tile,
    interpret: bool,
) -> Float[Array, "B H C D"]:
    """Returns the float32 mean of each cluster's keys, or its old centroid if it has none.

    A program goes through all keys of its head in their order and adds up those of its clusters,
    so that sums are the same every time. Keys of no cluster are not read.

    Args:
      keys: keys as they are stored.
      label: the cluster of each key; C if it is in none.
      centroids: float32, replaced in place where they are not used again.
      tile: bytes of a tile of keys, and of one of centroids.
      interpret: whether the kernel is interpreted.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.base.tiles import tile_of
      >>> from pallas_kernels.grouping.kmeans_kernel import means
      >>> keys, label = jnp.array([[[[1.0], [5.0], [3.0]]]]), jnp.array([[[0, 2, 0]]])
      >>> centroids = jnp.array([[[[9.0], [8.0]]]])
      >>> means(keys, label, centroids, tile=tile_of("kmeans"), interpret=True).tolist()
      [[[[2.0], [8.0]]]]
    """
    if not (keys.size and centroids.size):
        return centroids
    axes = (0, 1)
    width = max(SMALLEST, power_of_two(keys.shape[3]))
    rows = tile.block(width * keys.dtype.itemsize, keys.shape[2])
    clusters = tile.block(width * centroids.dtype.itemsize, centroids.shape[2])
    return route.pallas_call(
        functools.partial(_means_kernel, rows=rows, tile=clusters),
        grid=(*keys.shape[:2], pl.cdiv(centroids.shape[2], clusters)),
        in_specs=[program_part(x, axes) for x in (keys, label, centroids)],
        out_specs=program_part(centroids, axes),
        out_shape=jax.ShapeDtypeStruct(centroids.shape, centroids.dtype),
        input_output_aliases={2: 0},
        num_warps=tile.warps,
        num_stages=tile.stages,
        interpret=interpret,
        name="kmeans_means",
    )(keys, label, centroids)


def _means_kernel(keys, label, centroids, out, *, rows: int, tile: int):
    """Computes the means of a tile of clusters, from `rows` keys at a time."""
    (size, channels), clusters = keys.shape, centroids.shape[0]
    first = pl.program_id(2) * tile
    cluster = first + jnp.arange(tile, dtype=jnp.int32)

    def add(i, carry):
        total, count = carry
        row = i * rows + jnp.arange(rows, dtype=jnp.int32)
        key_label = route.load(label.at[row], mask=row < size, other=NONE)
        wanted = (key_label >= first) & (key_label < jnp.minimum(first + tile, clusters))
        part = load_rows(keys, row, wanted, SMALLEST)
        member = cluster[:, None] == key_label[None, :]
        # Sums keys by a product with ones, which are exact in every dtype.
        total += dot(member.astype(keys.dtype), part)
        return total, count + member.astype(jnp.float32).sum(1)

    width = max(SMALLEST, power_of_two(channels))
    none = jnp.zeros((tile, width), jnp.float32), jnp.zeros((tile,), jnp.float32)
    blocks = jnp.int32(pl.cdiv(size, rows))
    total, count = jax.lax.fori_loop(jnp.int32(0), blocks, add, none)
    there = cluster < clusters
    centroid = load_rows(centroids, cluster, there, SMALLEST)
    mean = total / jnp.maximum(count, 1.0)[:, None]
    store_rows(out, cluster, there, jnp.where((count > 0)[:, None], mean, centroid))
