"""k-means over the keys of every (row, KV head)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.common import NEG_INF, check_implementation


def kmeans(
    keys: Float[Array, "B H S D"],
    members: Bool[Array, "B H S"],
    centroids: Float[Array, "B H R D"],
    there: Bool[Array, "B H R"],
    *,
    rounds: int = 20,
    implementation: str | None = None,
) -> tuple[Int[Array, "B H S"], Float[Array, "B H S"]]:
    """Lloyd's algorithm: assigns every key to its nearest centroid, and moves that to their mean.

    Distances are Euclidean; ties go to the lower cluster, an empty one keeps its centroid.

    Args:
      keys: what to cluster.
      members: which of them.
      centroids: where to start.
      there: which centroids count.
      rounds: assignments followed by a move; one assignment more gives the result.
      implementation: `None` or `"xla"`.

    Returns:
      The cluster of every key, R where it is no member, and float32 squared distances to its
      centroid.
    """
    check_implementation(implementation)
    clusters = centroids.shape[2]

    def one_head(head: tuple[Array, ...]) -> tuple[Array, Array]:
        keys, members, centroids, there = head
        keys = keys.astype(jnp.float32)

        def assign(centroids: Float[Array, "R D"]) -> Int[Array, " S"]:
            near = keys @ centroids.T - 0.5 * (centroids**2).sum(-1)[None]
            best = jnp.where(there[None], near, NEG_INF).argmax(-1).astype(jnp.int32)
            return jnp.where(members, best, clusters)

        def move(_: int, centroids: Float[Array, "R D"]) -> Float[Array, "R D"]:
            label = assign(centroids)
            total = jnp.zeros_like(centroids).at[label].add(keys, mode="drop")
            size = jnp.zeros((clusters, 1)).at[label].add(1.0, mode="drop")
            return jnp.where(size > 0, total / jnp.maximum(size, 1.0), centroids)

        centroids = jax.lax.fori_loop(0, rounds, move, centroids.astype(jnp.float32))
        label = assign(centroids)
        return label, ((keys - centroids[label]) ** 2).sum(-1)

    # One head after the other: the distances of all at once would outweigh the cache.
    heads = (keys, members, centroids, there)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), heads)
    label, apart = jax.lax.map(one_head, flat)
    return label.reshape(members.shape), apart.reshape(members.shape)
