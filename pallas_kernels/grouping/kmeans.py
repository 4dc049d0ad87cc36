"""k-means over the keys of every (row, KV head)."""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.export
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.base.dispatch import choose_implementation
from pallas_kernels.base.varying import varying
from pallas_kernels.grouping.kmeans_kernel import kmeans_by_kernels

Metric = Literal["cosine", "l2", "inner_product"]

# Similarities that are held at a time: on CPU, so few that they stay in its caches. Elsewhere
# 256 MB, since each step of a loop costs a launch there.
SIMILARITIES = 2**20
ACCELERATOR_SIMILARITIES = 2**26


def kmeans(
    keys: Float[Array, "B H S D"],
    members: Bool[Array, "B H S"],
    centroids: Float[Array, "B H C D"],
    there: Bool[Array, "B H C"],
    *,
    metric: Metric = "cosine",
    rounds: int = 20,
    implementation: str | None = None,
) -> tuple[Int[Array, "B H S"], Float[Array, "B H C D"]]:
    """Clusters keys by Lloyd's algorithm: keys go to centroids, centroids to means of their keys.

    Each key goes to its most similar centroid. A centroid is the float32 mean of its keys as they
    are, for every metric; a centroid without keys stays unchanged. Ties go to the lower cluster.
    The algorithm ends after `rounds` moves, or once no label changes. The labels are those of the
    final centroids.

    The kernels do all rounds, since rounds after convergence change nothing: so the host need not
    know when it is reached. They hold no similarities, and add up a cluster's keys in their order.

    Args:
      keys: keys to cluster.
      members: mask of the keys to cluster; contents of other keys are ignored.
      centroids: initial centroids.
      there: mask of the clusters that exist. In a head without clusters, keys are in none.
      metric: similarity of a key k and a centroid μ: `"cosine"`, `k·μ / (|k| |μ|)`, 0 for a zero
        centroid; `"l2"`, `-|k - μ|²`; `"inner_product"`, `k·μ`.
      rounds: most moves of the centroids.
      implementation: `"pallas"` (the kernels), `"interpret"` (the kernels, interpreted on any
        device), `"xla"`, or None: the kernels on a GPU that can run them, XLA elsewhere.

    Returns:
      The cluster of each key (C if it is in none), and the float32 centroids.

    Raises:
      ValueError: shapes that do not fit each other; an unknown metric, a negative number of rounds;
        an unknown implementation, or one that the GPU is too old for.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import kmeans
      >>> keys = jnp.array([[[[1.0, 0.0], [3.0, 1.0], [0.0, 2.0]]]])
      >>> members, there = jnp.ones((1, 1, 3), bool), jnp.ones((1, 1, 2), bool)
      >>> label, centroids = kmeans(keys, members, keys[:, :, 1:], there)
      >>> label.tolist(), centroids.tolist()
      ([[[0, 0, 1]]], [[[[2.0, 0.5], [0.0, 2.0]]]])
    """
    chosen = choose_implementation(implementation, keys)
    _check(keys, members, centroids, there, metric, rounds)
    if chosen != "xla":
        interpret = chosen == "interpret"
        return kmeans_by_kernels(keys, members, centroids, there, metric, rounds, interpret)
    return _by_xla(keys, members, centroids, there, metric, rounds)


def _check(keys, members, centroids, there, metric: Metric, rounds: int) -> None:
    """Raises ValueError for arguments that `kmeans` cannot take."""
    if metric not in get_args(Metric):
        raise ValueError(f"metric must be one of {get_args(Metric)}, got {metric!r}")
    if rounds < 0:
        raise ValueError(f"rounds must be at least 0, got {rounds}")
    if keys.ndim != 4 or centroids.ndim != 4:
        raise ValueError(
            f"keys must be [B, H, S, D] and centroids [B, H, C, D], got {keys.shape} and "
            f"{centroids.shape}"
        )
    expected = {
        "members": (members, keys.shape[:3]),
        "centroids": (centroids, (*keys.shape[:2], centroids.shape[2], keys.shape[3])),
        "there": (there, (*keys.shape[:2], centroids.shape[2])),
    }
    for name, (x, shape) in expected.items():
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {x.shape}")


def _by_xla(
    keys: Float[Array, "B H S D"],
    members: Bool[Array, "B H S"],
    centroids: Float[Array, "B H C D"],
    there: Bool[Array, "B H C"],
    metric: Metric,
    rounds: int,
) -> tuple[Int[Array, "B H S"], Float[Array, "B H C D"]]:
    """Runs the XLA reference, with as many similarities at a time as suit the device."""
    size, clusters = keys.shape[2], centroids.shape[2]
    on_cpu = jax.default_backend() == "cpu"
    most = SIMILARITIES if on_cpu else ACCELERATOR_SIMILARITIES
    tokens_at_once, heads_at_once = most // clusters or 1, most // (size * clusters) or 1

    def one_head(head: tuple[Array, ...]) -> tuple[Array, Array]:
        keys, members, centroids, there = head
        keys, members = keys.astype(jnp.float32), members & there.any()

        def assign(centroids: Float[Array, "C D"]) -> Int[Array, " S"]:
            towards, bias = _linear(jnp.where(there[:, None], centroids, 0.0), metric)
            bias = jnp.where(there, bias, -jnp.inf)

            def nearest(key: Float[Array, " D"]) -> Int[Array, ""]:
                return _first_best(jnp.dot(key, towards.T, precision="highest") + bias)

            label = jax.lax.map(nearest, keys, batch_size=tokens_at_once)
            return jnp.where(members, label, clusters)

        def move(state: tuple[Array, ...]) -> tuple[Array, ...]:
            done, label, centroids, _ = state
            centroids = _means(keys, label, centroids)
            moved = assign(centroids)
            return done + 1, moved, centroids, (moved != label).any()

        def goes_on(state: tuple[Array, ...]) -> Bool[Array, ""]:
            return (state[0] <= rounds) & state[-1]

        # The first round only assigns, since no key has a label yet: `assign` is compiled once.
        label = jnp.full(keys.shape[:1], clusters, jnp.int32)
        start = jnp.int32(0), label, centroids.astype(jnp.float32), jnp.array(True)
        start = varying(start, *head)
        _, label, centroids, _ = jax.lax.while_loop(goes_on, move, start)
        return label, centroids

    heads = (keys, members, centroids, there)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), heads)
    # The batch size divides the number of heads, since a rest would be compiled once more. If it is
    # larger than their number, there is no loop. None stands for 1, which would copy all keys. A
    # program that is exported for any number of rows takes a divisor of a row's heads.
    rows, count = keys.shape[:2]
    if jax.export.is_symbolic_dim(rows):
        heads_at_once = min(heads_at_once, count)
    else:
        count *= rows
    dividing = (n for n in range(heads_at_once, 1, -1) if n > count or count % n == 0)
    label, moved = jax.lax.map(one_head, flat, batch_size=next(dividing, None))
    return label.reshape(members.shape), moved.reshape(centroids.shape)


def _linear(
    centroids: Float[Array, "C D"], metric: Metric
) -> tuple[Float[Array, "C D"], Float[Array, " C"]]:
    """Returns w and b of each centroid such that `k·w + b` orders centroids by similarity to k.

    The key's own length does not change the order.
    """
    square = (centroids * centroids).sum(-1)
    if metric == "l2":
        return centroids, -0.5 * square
    if metric == "cosine":
        length = jnp.sqrt(jnp.where(square > 0, square, 1.0))
        centroids = centroids / length[:, None]
    return centroids, jnp.zeros_like(square)


def _first_best(similarity: Float[Array, " C"]) -> Int[Array, ""]:
    """Returns the first maximum, by two plain reductions: on CPU faster than argmax."""
    last = similarity.shape[0] - 1
    cluster = jnp.arange(last + 1, dtype=jnp.float32)
    best = jnp.where(similarity == similarity.max(), cluster, float(last))
    return best.min().astype(jnp.int32)


def _means(
    keys: Float[Array, "S D"], label: Int[Array, " S"], centroids: Float[Array, "C D"]
) -> Float[Array, "C D"]:
    """Returns the mean of each label's keys, or the old centroid without any. Label C: none."""
    total = jnp.zeros_like(centroids).at[label].add(keys, mode="drop")
    count = jnp.zeros((len(centroids), 1), jnp.float32).at[label].add(1.0, mode="drop")
    return jnp.where(count > 0, total / jnp.maximum(count, 1.0), centroids)
