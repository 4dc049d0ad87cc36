"""Pictures of one head's slots: tokens per slot, and clusters of tokens."""

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

    The height of a line is the slot's mass, on a logarithmic scale with base 2. A slot that nothing
    was merged into has mass 1.

    Args:
      axes: axes to draw on.
      cache: cache of one layer.
      head: index of the list of slots; lists of `HeadGroups` come in the order of its groups.
      row: row of the batch.

    Raises:
      TypeError, ValueError: `axes` are not axes, the cache is not one of a layer, or a head or row
        is out of range.

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
    places, mass = position[live][order], np.exp(log_mass[live].astype(np.float32))[order]
    # Lines begin below 1, so that a slot of mass 1 is visible.
    lines = axes.vlines(places, 0.7, mass, color=COLOURS["kept"], linewidth=0.9)
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
    """Draws the cluster of each token of a head, and the tokens that a step attended to.

    Clusters are numbered by their first tokens. So clusters of neighbouring tokens follow the
    diagonal, and clusters that span the text leave it.

    Args:
      axes: axes to draw on.
      cache: cache of one layer, made by `kvjax.ClusterKV`.
      head: index of the KV head; heads of `HeadGroups` come in the order of its groups.
      row: row of the batch.
      seen: whether a step attended to each position, a line of `Seen.marks`. These tokens are drawn
        large and dark, all others small and light.

    Returns:
      The dots of tokens that were not seen, and of those that were.

    Raises:
      TypeError, ValueError: `axes` are not axes, the cache has no clusters, a head or row is out of
        range, or `seen` has another length.

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
    clustered = label >= 0  # sinks and tokens that are not clustered yet have -1
    # The tokens that were seen come last, so that no other dot covers them.
    for mask, colour, size in ((~chosen, "pale", 2), (chosen, "kept", 9)):
        places = np.flatnonzero(clustered & mask)
        drawn = axes.scatter(places, label[places], s=size, color=COLOURS[colour], linewidths=0)
        dots.append(drawn)
    axes.set_xlim(0, len(label))
    axes.set_xlabel("position of the token")
    axes.set_ylabel("cluster")
    return dots[0], dots[1]


def _list(cache: Cache, head: int, row: int) -> tuple[LayerCache, int]:
    """Returns the part of a layer's cache with a list of slots, and the list's index in it."""
    parts = parts_of(cache, row)
    lists = [(part, number) for part in parts for number in range(part.kv.shape[1])]
    check_count("head", head, 0, most=len(lists) - 1)
    return lists[head]
