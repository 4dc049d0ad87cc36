"""Labels of the clusters that a cache's tokens are in."""

from __future__ import annotations

import jax
import numpy as np
from jaxtyping import Int

from kvjax.attention.layer import LayerCache
from kvjax.transforms.clusterkv.clusters import Clusters


def cluster_labels(cache: LayerCache, row: int = 0) -> Int[np.ndarray, "H T"]:
    """Returns the number of each token's cluster; clusters are numbered by their first tokens.

    Sinks, and generated tokens that are not clustered yet, have -1.

    Args:
      cache: cache of a layer, made by `ClusterKV`, alone or in a composition.
      row: row of the batch.

    Raises:
      ValueError: the cache has no clusters.
    """
    leaves = jax.tree.leaves(cache.state, is_leaf=lambda x: isinstance(x, Clusters))
    indices = [leaf for leaf in leaves if isinstance(leaf, Clusters)]
    if not indices:
        raise ValueError(f"clusters are those of ClusterKV, got a cache of {cache.transform!r}")
    position, starts, sizes = (
        np.asarray(x[row]) for x in (cache.kv.position, indices[0].starts, indices[0].sizes)
    )
    label = np.full((len(position), int(cache.kv.length[row])), -1)
    for head, head_label in enumerate(label):
        members = [
            position[head, start : start + size]
            for start, size in zip(starts[head], sizes[head], strict=True)
            if size
        ]
        for number, places in enumerate(sorted(members, key=min)):
            head_label[places] = number
    return label
