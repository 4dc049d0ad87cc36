"""Ranks clusters for a query, and lists their slots."""

from __future__ import annotations

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.base import route
from pallas_kernels.base.dispatch import choose_implementation
from pallas_kernels.base.kernel_parts import head_part, program_part, zero
from pallas_kernels.base.rows import take_slots
from pallas_kernels.base.tiles import power_of_two

GroupReduce = Literal["mean", "max"]

# Sizes of the kernels' tiles, all powers of two. 4 warps hold a few thousand numbers in registers.
# Smaller tiles mean more programs, so that even few clusters fill a device.
SCORED = 4096  # numbers of a tile of centroids: 32 centroids of 128 channels
RANKED = 16  # clusters whose ranks a program counts; divides COUNTED
COUNTED = 512  # clusters that a program compares them with at a time
PLACES = 128  # places of a list that a program fills
LOOKED_AT = 64  # ranks that it looks through at a time: about 1,000 slots in clusters of 16

NOTHING = np.float32(-np.inf)
NONE = np.int32(0)


def rank_clusters(
    q: Float[Array, "B H G D"],
    centroids: Float[Array, "B H C D"],
    sizes: Int[Array, "B H C"],
    *,
    most: int | None = None,
    per_query_head: bool = False,
    group_reduce: GroupReduce = "max",
    implementation: str | None = None,
) -> Int[Array, "B K M"]:
    """Ranks clusters by score, highest first; ties go to the lower one, empty clusters come last.

    The score of a cluster is `q·μ` in float32: the largest of the G query heads, their mean, or
    a score for each query head.

    There are two kernels: one reads the centroids, once, and one finds the rank of a cluster by
    counting the clusters that come before it. The centroid of an empty cluster is ignored. A score
    that is not a number counts as the highest.

    Args:
      q: queries, grouped under their KV head.
      centroids: centroids of the clusters.
      sizes: members of each cluster.
      most: M, how many clusters of each ranking to return (static); None: all.
      per_query_head: whether each query head has a ranking (K = H·G, head g of group h at
        `h·G + g`) or each group (K = H).
      group_reduce: how the scores of a group become one, `"max"` or `"mean"`; ignored with
        `per_query_head`.
      implementation: `"pallas"` (the kernels), `"interpret"` (the kernels, interpreted on any
        device), `"xla"`, or None: the kernels on a GPU that can run them, XLA elsewhere.

    Returns:
      The clusters of each ranking, int32.

    Raises:
      ValueError: shapes that do not fit each other; a `most` that is not from 1 to C; an unknown
        `group_reduce` or implementation, or one that the GPU is too old for.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import rank_clusters
      >>> q, sizes = jnp.ones((1, 1, 1, 2)), jnp.array([[[3, 2, 0]]])
      >>> centroids = jnp.array([[[[1.0, 0.0], [1.0, 1.0], [9.0, 9.0]]]])
      >>> rank_clusters(q, centroids, sizes).tolist()
      [[[1, 0, 2]]]
    """
    chosen = choose_implementation(implementation, centroids)
    if group_reduce not in get_args(GroupReduce):
        raise ValueError(
            f"group_reduce must be one of {get_args(GroupReduce)}, got {group_reduce!r}"
        )
    if q.ndim != 4:
        raise ValueError(f"q must be [B, H, G, D], got {q.shape}")
    clusters = sizes.shape[-1]
    expected = (*q.shape[:2], clusters, q.shape[3])
    for name, x, shape in (("centroids", centroids, expected), ("sizes", sizes, expected[:3])):
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {x.shape}")
    if most is None:
        most = clusters
    elif not 1 <= most <= clusters:
        raise ValueError(f"most must be from 1 to {clusters}, got {most}")
    if chosen != "xla":
        reduce = None if per_query_head else group_reduce
        return _rank(q, centroids, sizes, reduce, chosen == "interpret")[..., :most]
    q = q.astype(jnp.float32)
    if not per_query_head and group_reduce == "mean":
        q = q.mean(2, keepdims=True)  # the mean of q·μ is the mean q times μ
    score = jnp.einsum(
        "bhgd,bhcd->bhgc", q, centroids.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    if not per_query_head:
        score = score.max(2, keepdims=True)
    # A NaN with a minus sign would come after -inf and the padding below.
    score = jnp.where(jnp.isnan(score), jnp.inf, score)
    score = jnp.where(sizes[:, :, None] > 0, score, -jnp.inf)
    # Padding by one entry, which comes last, makes XLA on CPU use its top k. For the top C of C
    # entries it would use a sort, which is several times slower.
    score = jnp.pad(score, ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=-jnp.inf)
    _, order = jax.lax.top_k(score, most)
    return order.reshape(q.shape[0], -1, most)


def build_indices(
    order: Int[Array, "B K M"],
    sizes: Int[Array, "B H C"],
    starts: Int[Array, "B H C"],
    count: Int[Array, "B K"] | Int[Array, "B 1"],
    length: int,
    *,
    implementation: str | None = None,
) -> Int[Array, "B K N"]:
    """Lists the first `count` slots of the ranked clusters, padded with -1.

    A cluster is a range of slots. The last one listed is cut off where it has too many slots.
    Clusters without slots take no room.

    In the kernel, each program fills a part of the list. It looks through the clusters in the order
    of their rank until its part is full.

    Args:
      order: clusters as ranked, none of them twice; K = H or a multiple of it, see
        `rank_clusters`.
      sizes: slots of each cluster.
      starts: first slot of each cluster.
      count: how many slots to list, limited by the slots that there are and by `length`.
      length: N, static.
      implementation: as in `rank_clusters`.

    Returns:
      The slots of each list, int32.

    Raises:
      ValueError: an `order`, `starts` or `count` that does not fit, a length below 1; an unknown
        implementation, or one that the GPU is too old for.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import build_indices
      >>> sizes, starts = jnp.array([[[3, 2, 0]]]), jnp.array([[[0, 3, 5]]])
      >>> build_indices(jnp.array([[[1, 0, 2]]]), sizes, starts, jnp.array([[4]]), 6).tolist()
      [[[3, 4, 0, 1, -1, -1]]]
    """
    chosen = choose_implementation(implementation, order)
    rows, choices, ranked = order.shape
    heads = sizes.shape[1]
    if choices % heads:
        raise ValueError(f"order must rank for a multiple of {heads} heads, got {choices}")
    expected = (rows, heads, sizes.shape[2])
    for name, x in (("sizes", sizes), ("starts", starts)):
        if x.shape != expected:
            raise ValueError(f"{name} must have shape {expected}, got {x.shape}")
    if ranked > sizes.shape[2]:
        raise ValueError(f"order must rank at most {sizes.shape[2]} clusters, got {ranked}")
    if count.shape not in ((rows, choices), (rows, 1)):
        raise ValueError(
            f"count must have shape {(rows, choices)} or {(rows, 1)}, got {count.shape}"
        )
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    if chosen != "xla":
        return _list(order, sizes, starts, count, length, chosen == "interpret")
    size, start = (take_slots(x, order) for x in (sizes, starts))
    end = jnp.cumsum(size, axis=-1)
    # The difference between a slot and its place in the list is the same for a whole cluster. Its
    # changes are written where clusters begin, and summed up. Where several clusters begin at one
    # place, all but the last are empty, so their changes may be added.
    change = jnp.diff(start - (end - size), axis=-1, prepend=0)

    def spread(begin: Int[Array, " C"], change: Int[Array, " C"]) -> Int[Array, " N"]:
        return jnp.zeros(length, change.dtype).at[begin].add(change, mode="drop")

    place = jnp.arange(length, dtype=order.dtype)[None, None]
    slot = place + jnp.cumsum(jax.vmap(jax.vmap(spread))(end - size, change), axis=-1)
    return jnp.where(place < jnp.minimum(end[..., -1], count)[..., None], slot, -1)


def _rank(q, centroids, sizes, reduce: GroupReduce | None, interpret: bool) -> Int[Array, "B K C"]:
    """Computes scores by one kernel and ranks by another, which needs all scores of a ranking.

    Without `reduce`, each query head has a ranking.
    """
    batch, heads, group, channels = q.shape
    clusters, choices = sizes.shape[2], 1 if reduce else group
    order = jax.ShapeDtypeStruct((batch, heads * choices, clusters), jnp.int32)
    if not order.size:
        return jnp.zeros(order.shape, order.dtype)
    score = jax.ShapeDtypeStruct((batch, heads, choices, clusters), jnp.float32)
    tile = max(1, min(SCORED // power_of_two(channels), power_of_two(clusters)))
    sizes = sizes.astype(jnp.int32)
    axes = (0, 1)
    score = route.pallas_call(
        functools.partial(_score_kernel, tile=tile, reduce=reduce),
        grid=(batch, heads, pl.cdiv(clusters, tile)),
        in_specs=[program_part(x, axes) for x in (q, centroids, sizes)],
        out_specs=program_part(score, axes),
        out_shape=score,
        interpret=interpret,
        name="score_clusters",
    )(q, centroids, sizes).reshape(order.shape)
    return route.pallas_call(
        functools.partial(_rank_kernel, tile=RANKED, compared=COUNTED),
        grid=(*order.shape[:2], pl.cdiv(clusters, RANKED)),
        in_specs=[program_part(score, axes)],
        out_specs=program_part(order, axes),
        out_shape=order,
        interpret=interpret,
        name="rank_clusters",
    )(score)


def _score_kernel(q, centroids, sizes, score, *, tile: int, reduce: GroupReduce | None):
    """Scores a tile of clusters for all query heads of a group."""
    (group, channels), clusters = q.shape, sizes.shape[0]
    cluster = pl.program_id(2) * tile + jnp.arange(tile, dtype=jnp.int32)
    channel = jnp.arange(power_of_two(channels), dtype=jnp.int32)
    there, is_channel = cluster < clusters, channel < channels

    # Centroids of empty clusters are read too: waiting for the sizes first would take longer.
    cell, wanted = (cluster[:, None], channel[None, :]), there[:, None] & is_channel[None, :]
    centroid = route.load(centroids.at[cell], mask=wanted, other=zero(centroids.dtype))
    centroid = centroid.astype(jnp.float32)
    size = route.load(sizes.at[cluster], mask=there, other=NONE)

    def query(g):
        row = route.load(q.at[g, channel], mask=is_channel, other=zero(q.dtype))
        return row.astype(jnp.float32)

    def scores(query):
        # A matrix unit would pad this one query to 16, which takes longer than adding up here.
        product = (centroid * query[None, :]).sum(1)
        # Every cluster must have a rank of its own, or places of the order are never written.
        return jnp.where(product == product, product, jnp.inf)

    if reduce == "mean":
        per_ranking = [scores(sum(map(query, range(group))) / group)]
    else:
        per_ranking = [scores(query(g)) for g in range(group)]
    if reduce == "max":
        per_ranking = [functools.reduce(jnp.maximum, per_ranking)]
    for g, product in enumerate(per_ranking):
        route.store(score.at[g, cluster], jnp.where(size > 0, product, -jnp.inf), mask=there)


def _rank_kernel(score, order, *, tile: int, compared: int):
    """Ranks a tile of clusters: a rank is the number of clusters that come before."""
    clusters, first = score.shape[0], pl.program_id(2) * tile
    cluster = first + jnp.arange(tile, dtype=jnp.int32)
    there = cluster < clusters
    tile_scores = route.load(score.at[cluster], mask=there, other=NOTHING)[:, None]

    def count(begin, end, before, rank):
        """Counts the clusters that come before, `compared` clusters at a time."""

        def add(i, rank):
            number = i * compared + jnp.arange(compared, dtype=jnp.int32)
            scores = route.load(score.at[number], mask=number < clusters, other=NOTHING)
            return rank + before(scores[None, :], number[None, :]).sum(1, dtype=jnp.int32)

        return jax.lax.fori_loop(begin, end, add, rank)

    def comes_before(scores, number):
        return (scores > tile_scores) | ((scores == tile_scores) & (number < cluster[:, None]))

    # Of clusters with equal scores, those in earlier blocks come before this tile and those in
    # later blocks after it. So numbers are compared only in the tile's own block. Padding of a tile
    # has the score -inf and the highest numbers, so it comes before no cluster.
    here, last = jax.lax.div(first, jnp.int32(compared)), jnp.int32(pl.cdiv(clusters, compared))
    rank = jnp.zeros((tile,), jnp.int32)
    rank = count(jnp.int32(0), here, lambda scores, _: scores >= tile_scores, rank)
    rank = count(here, here + 1, comes_before, rank)
    rank = count(here + 1, last, lambda scores, _: scores > tile_scores, rank)
    route.store(order.at[rank], cluster, mask=there)


def _list(order, sizes, starts, count, length: int, interpret: bool) -> Int[Array, "B K N"]:
    """Makes the lists; each program fills a part of one."""
    lists = order.shape[1]
    index = jax.ShapeDtypeStruct((*order.shape[:2], length), jnp.int32)
    if not index.size or not order.size:
        return jnp.full(index.shape, -1, index.dtype)
    order, sizes, starts, count = (x.astype(jnp.int32) for x in (order, sizes, starts, count))
    axes = (0, 1)
    return route.pallas_call(
        functools.partial(_list_kernel, tile=PLACES, looked_at=LOOKED_AT),
        grid=(*index.shape[:2], pl.cdiv(length, PLACES)),
        in_specs=[
            program_part(order, axes), head_part(sizes, lists), head_part(starts, lists),
            program_part(count, axes),
        ],
        out_specs=program_part(index, axes),
        out_shape=index,
        interpret=interpret,
        name="build_indices",
    )(order, sizes, starts, count)  # fmt: skip


def _list_kernel(order, sizes, starts, count, index, *, tile: int, looked_at: int):
    """Finds the slots of a tile of places."""
    clusters, length = order.shape[0], index.shape[0]
    first = pl.program_id(2) * tile
    place = first + jnp.arange(tile, dtype=jnp.int32)
    total = count[...]
    stop = jnp.minimum(total, first + tile)

    def goes_on(carry):
        passed, begin, _ = carry
        return (passed < clusters) & (begin < stop)

    def look(carry):
        passed, begin, slot = carry
        rank = passed + jnp.arange(looked_at, dtype=jnp.int32)
        there = rank < clusters
        cluster = route.load(order.at[rank], mask=there, other=NONE)
        size = route.load(sizes.at[cluster], mask=there, other=NONE)
        start = route.load(starts.at[cluster], mask=there, other=NONE)
        end = begin + jnp.cumsum(size, dtype=jnp.int32)
        begins = end - size
        # A place is in one cluster at most. Its slot is -1 until then, so 1 is added to the slot.
        inside = (begins[None, :] <= place[:, None]) & (place[:, None] < end[None, :])
        slots = (start - begins + 1)[None, :] + place[:, None]
        slot = slot + jnp.where(inside, slots, 0).sum(1, dtype=jnp.int32)
        return passed + looked_at, begin + size.sum(dtype=jnp.int32), slot

    none = jnp.full((tile,), -1, jnp.int32)
    _, _, slot = jax.lax.while_loop(goes_on, look, (jnp.int32(0), jnp.int32(0), none))
    route.store(index.at[place], jnp.where(place < total, slot, -1), mask=place < length)
