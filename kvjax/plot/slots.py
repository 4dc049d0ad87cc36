"""Pictures of one head's slots: how many tokens they stand for, and which belong together."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PathCollection

from kvjax.attention.layer import Cache, LayerCache
from kvjax.checks import check_count
from kvjax.plot.cluster_labels import cluster_labels

from .looks import COLOURS, check_axes, parts_of


def masses(axes: Axes, cache: Cache, *, head: int = 0, row: int = 0) -> LineCollection:
    """Draws how many tokens each slot of a head stands for, at the slot's position.

    The height of a line is the slot's mass, on a scale in which each step doubles it. A slot that
    nothing was merged into has mass 1.

    Args:
      axes: to draw on.
      cache: of one layer.
      head: which list of slots, of `HeadGroups` in the order of its groups. row: of the batch.

    Raises:
      TypeError, ValueError: no axes, no cache of a layer, a head or row out of range.

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp, kvjax
      >>> from kvjax import plot
      >>> from matplotlib.figure import Figure
      >>> cache = kvjax.init_cache(kvjax.Full(), batch=1, kv_heads=1, head_dim=1, max_prompt=3,
      ...                          max_new=0)
      >>> rows = jnp.array([[[[1.0], [3.0], [8.0]]]])
      >>> kv, _ = jax.jit(kvjax.kit.append)(cache.kv, rows, rows, jnp.arange(3)[None])
      >>> kv = jax.jit(kvjax.kit.merge)(kv, into=jnp.array([[[1, 1, 2]]]))
      >>> lines = plot.masses(Figure().subplots(), dataclasses.replace(cache, kv=kv))
      >>> [line[1].round(3).tolist() for line in lines.get_segments()]
      [[1.0, 2.0], [2.0, 1.0]]
    """
    check_axes(axes)
    part, head = _list(cache, head, row)
    position, log_mass = (np.asarray(x[row, head]) for x in (part.kv.position, part.kv.log_mass))
    live = np.isfinite(log_mass)
    order = np.argsort(position[live])
    at, mass = position[live][order], np.exp(log_mass[live].astype(np.float32))[order]
    lines = axes.vlines(at, 0.7, mass, color=COLOURS["kept"], linewidth=0.9)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylim(0.7, max(float(mass.max(initial=1.0)), 2.0) * 1.2)
    axes.set_xlabel("position of the slot")
    axes.set_ylabel("tokens in the slot")
    return lines


def clusters(
    axes: Axes,
    cache: Cache,
    *,
    head: int = 0,
    row: int = 0,
    seen: Bool[np.ndarray, " T"] | None = None,
) -> tuple[PathCollection, PathCollection]:
    """Draws which cluster each token of a head is in, and what a step recalled of them.

    Clusters are numbered by their first tokens, so that clusters of neighbours follow the diagonal,
    and those that reach over the text leave it.

    Args:
      axes: to draw on.
      cache: of one layer, made by `kvjax.ClusterKV`.
      head: which KV head, of `HeadGroups` in the order of its groups. row: of the batch.
      seen: whether a step attended to each position, a line of `Seen.marks`. Those are drawn large
        and dark, the others small and light.

    Returns:
      The dots of the others, and of those that were seen.

    Raises:
      TypeError, ValueError: no axes, a cache without clusters, a head or row out of range,
        `seen` of another length.

    Example:
      >>> import kvjax
      >>> from kvjax import plot
      >>> from kvjax.models import DecoderConfig, RopeConfig, random_decoder
      >>> from matplotlib.figure import Figure
      >>> model = random_decoder(DecoderConfig(
      ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=1, query_heads=4,
      ...     kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=8), max_positions=128))
      >>> tx = kvjax.ClusterKV(budget=16, sinks=4, tokens_per_cluster=6, dense_layers=())
      >>> context = kvjax.read(model, [list(range(60))], transform=tx, max_new=4)
      >>> marks = [position in (9, 20) for position in range(60)]
      >>> others, seen = plot.clusters(Figure().subplots(), context.caches[0], seen=marks)
      >>> len(others.get_offsets()), seen.get_offsets()[:, 0].tolist()
      (54, [9.0, 20.0])
    """
    check_axes(axes)
    part, head = _list(cache, head, row)
    label = cluster_labels(part, row)[head]
    chosen = np.zeros(label.shape, bool) if seen is None else np.asarray(seen, bool)
    if chosen.shape != label.shape:
        raise ValueError(
            f"seen must have a mark for each of {len(label)} positions, got {chosen.shape}"
        )
    dots = []
    clustered = label >= 0
    for which, colour, size in ((~chosen, "pale", 2), (chosen, "kept", 9)):
        at = np.flatnonzero(clustered & which)
        dots.append(axes.scatter(at, label[at], s=size, color=COLOURS[colour], linewidths=0))
    axes.set_xlim(0, len(label))
    axes.set_xlabel("position of the token")
    axes.set_ylabel("cluster")
    return dots[0], dots[1]


def _list(cache: Cache, head: int, row: int) -> tuple[LayerCache, int]:
    """The part of a layer's cache that has a list of slots, and the list's number there."""
    parts = parts_of(cache, row)
    lists = [(part, number) for part in parts for number in range(part.kv.shape[1])]
    check_count("head", head, 0, most=len(lists) - 1)
    return lists[head]
