"""Which clusters of slots a query selects, and the list of their slots."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common import NEG_INF, check_implementation, take_rows


def rank_clusters(
    q: Float[Array, "B H G D"],
    centroids: Float[Array, "B H C D"],
    sizes: Int[Array, "B H C"],
    *,
    per_query_head: bool = False,
    implementation: str | None = None,
) -> Int[Array, "B K C"]:
    """All clusters by their score, the highest first; ties go to the lower, empty ones come last.

    The score of a cluster is `q·μ`, its mean over the G query heads or that of each of them.

    Args:
      sizes: members of each cluster.
      per_query_head: a ranking for each query head, K = H·G with that of head g of group h at
        `h·G + g`, instead of one for each group, K = H.
      implementation: `None` or `"xla"`.

    Raises:
      ValueError: an unknown implementation.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import rank_clusters
      >>> q, sizes = jnp.ones((1, 1, 1, 2)), jnp.array([[[3, 2, 0]]])
      >>> centroids = jnp.array([[[[1.0, 0.0], [1.0, 1.0], [9.0, 9.0]]]])
      >>> rank_clusters(q, centroids, sizes).tolist()
      [[[1, 0, 2]]]
    """
    check_implementation(implementation)
    q = q.astype(jnp.float32)
    if not per_query_head:
        q = q.mean(2, keepdims=True)  # the mean of q·μ is the mean q times μ
    score = jnp.einsum(
        "bhgd,bhcd->bhgc", q, centroids.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    score = jnp.where(sizes[:, :, None] > 0, score, NEG_INF)
    clusters = score.shape[-1]
    # One more entry, behind all others: XLA on CPU takes the top C of C by a sort, which is several
    # times slower than its top k.
    score = jnp.pad(score, ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=NEG_INF)
    _, order = jax.lax.top_k(score, clusters)
    return order.reshape(len(q), -1, clusters)


def build_indices(
    order: Int[Array, "B K C"],
    sizes: Int[Array, "B H C"],
    starts: Int[Array, "B H C"],
    count: Int[Array, "B K"] | Int[Array, "B 1"],
    length: int,
    *,
    implementation: str | None = None,
) -> Int[Array, "B K N"]:
    """The slots of the ranked clusters one after the other, `count` of them, padded with -1.

    A cluster is a range of slots; of the last one, those that are too many are left out at its end.
    Clusters without slots take no room.

    Args:
      order: the clusters as ranked, each once; K = H or a multiple of it, see `rank_clusters`.
      sizes: slots of each cluster.
      starts: its first slot.
      count: how many slots to list; no more than there are, nor than `length`, are listed.
      length: N, static.
      implementation: `None` or `"xla"`.

    Raises:
      ValueError: an `order` or a `count` that does not fit, a length below 1, an unknown
        implementation.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import build_indices
      >>> sizes, starts = jnp.array([[[3, 2, 0]]]), jnp.array([[[0, 3, 5]]])
      >>> build_indices(jnp.array([[[1, 0, 2]]]), sizes, starts, jnp.array([[4]]), 6).tolist()
      [[[3, 4, 0, 1, -1, -1]]]
    """
    check_implementation(implementation)
    rows, choices, _ = order.shape
    heads = sizes.shape[1]
    if choices % heads:
        raise ValueError(f"order must rank for a multiple of {heads} heads, got {choices}")
    if count.shape not in ((rows, choices), (rows, 1)):
        raise ValueError(
            f"count must have shape {(rows, choices)} or {(rows, 1)}, got {count.shape}"
        )
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    size, start = (
        take_rows(jnp.repeat(x, choices // heads, axis=1), order) for x in (sizes, starts)
    )
    end = jnp.cumsum(size, axis=-1)
    # What separates a slot from its place in the list changes where a cluster begins. The changes
    # of clusters that begin at one place, all but the last of them empty, add up.
    change = jnp.diff(start - (end - size), axis=-1, prepend=0)

    def spread(begin: Int[Array, " C"], change: Int[Array, " C"]) -> Int[Array, " N"]:
        return jnp.zeros(length, change.dtype).at[begin].add(change, mode="drop")

    place = jnp.arange(length, dtype=order.dtype)[None, None]
    slot = place + jnp.cumsum(jax.vmap(jax.vmap(spread))(end - size, change), axis=-1)
    return jnp.where(place < jnp.minimum(end[..., -1], count)[..., None], slot, -1)
