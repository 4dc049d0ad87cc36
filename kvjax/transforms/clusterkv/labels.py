"""Which cluster each token of a cache is in."""

from __future__ import annotations

import jax
import numpy as np
from jaxtyping import Int

from kvjax.attention.layer import LayerCache
from kvjax.transforms.clusterkv.clusters import Clusters


def cluster_labels(cache: LayerCache, row: int = 0) -> Int[np.ndarray, "H T"]:
    """The cluster of each token, numbered by their first tokens; -1 for those in none.

    In none are sinks, and generated tokens that are not clustered yet.

    Args:
      cache: of a layer, made by `ClusterKV`, alone or in a composition.
      row: of the batch.

    Raises:
      ValueError: the cache has no clusters.
    """
    leaves = jax.tree.leaves(cache.state, is_leaf=lambda x: isinstance(x, Clusters))
    found = [leaf for leaf in leaves if isinstance(leaf, Clusters)]
    if not found:
        raise ValueError(f"clusters are those of ClusterKV, got a cache of {cache.transform!r}")
    position, starts, sizes = (
        np.asarray(x[row]) for x in (cache.kv.position, found[0].starts, found[0].sizes)
    )
    label = np.full((len(position), int(cache.kv.length[row])), -1)
    for head, own in enumerate(label):
        members = [
            position[head, start : start + size]
            for start, size in zip(starts[head], sizes[head], strict=True)
            if size
        ]
        for number, places in enumerate(sorted(members, key=min)):
            own[places] = number
    return label
