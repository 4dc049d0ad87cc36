"""What is alike in the cache of a given text, and what is used: what the methods live on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.attention.layer import LayerCache
from kvjax.cache.selection import keep_best
from kvjax.compiled_code import compiled
from kvjax.compose.wrappers import Everywhere
from kvjax.evaluation.fidelity.full_run import FullRun
from kvjax.generation.reading_once import Observe
from kvjax.protocol import Full, KVTransform, Needs
from kvjax.transforms.clusterkv.clusterkv import ClusterKV
from kvjax.transforms.clusterkv.labels import cluster_labels
from kvjax.transforms.kvmerger.kvmerger import KVMerger
from kvjax.transforms.spindlekv.spindlekv import SpindleKV
from pallas_kernels import pair_cosine

DISTANCES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""How far apart tokens are whose keys are compared; Chelsea's paper looks at up to 256."""

EPSILON = 0.75
"""The cosine above which KVMerger's paper merges neighbours."""

SHARE = 0.2
"""The tokens that each query head would retain, as a share of the prompt."""

RESERVE = 0.5
"""SpindleKV's budget. Its books have room for every vector, so that none overflows."""

_KEYS = Everywhere(Full())
_ATTENTION = Everywhere(Observe(Needs(attention_mass=True)))
_CLUSTERS = Everywhere(ClusterKV(budget=SHARE, dense_layers=()))
_MERGED = Everywhere(KVMerger(epsilon=EPSILON, recent=0, heavy=0))
_CODEBOOK = Everywhere(SpindleKV(RESERVE, capacity=1.0))

OBSERVED: tuple[KVTransform, ...] = (_KEYS, _ATTENTION, _CLUSTERS, _MERGED, _CODEBOOK)
"""The methods whose caches `find_redundancy` looks at."""


@dataclass(frozen=True)
class Redundancy:
    """What is alike in the cache of a prompt, and what is used.

    Axis letters: L layers, H KV heads, Q query heads, T tokens of the prompt.

    Args:
      layer: the layer of `cluster`, `cluster_attention` and `bits`: the one in the middle.
      distances: numbers of tokens between two tokens that are compared.
      similarity: mean cosine of keys that are so far apart, in each layer and head (Chelsea, its
        second observation; KVMerger, Figures 2 and 3).
      cluster: the cluster of each token, -1 for sinks (ClusterKV).
      cluster_attention: share of the new tokens' attention that the token's cluster gets.
      run: how many tokens the run has that each token would be merged with (KVMerger).
      bits: whether each query head retains each token among those with the most attention
        (KVCrush, Figure 3).
      agreement: share of the tokens that 0, 1, ... Q query heads retain.
      kept: share of the vectors that SpindleKV's eviction leaves.
      entries: share of the vectors that are entries of its books of keys and of values.
    """

    layer: int
    distances: tuple[int, ...]
    similarity: Float[np.ndarray, "L H N"]
    cluster: Int[np.ndarray, "H T"]
    cluster_attention: Float[np.ndarray, "H T"]
    run: Int[np.ndarray, "L H T"]
    bits: Bool[np.ndarray, "Q T"]
    agreement: Float[np.ndarray, "L Q+1"]
    kept: Float[np.ndarray, " L"]
    entries: Float[np.ndarray, "L 2"]

    def merged(self) -> Float[np.ndarray, "L H"]:
        """Slots that KVMerger would leave, as a share of the tokens."""
        return (1 / self.run).mean(-1)

    def summary(self) -> dict[str, list[float]]:
        """A number for each layer, means over its heads."""
        return {
            "adjacent_similarity": self.similarity[:, :, 0].mean(1).tolist(),
            "merged": self.merged().mean(1).tolist(),
            "retained_by_no_head": self.agreement[:, 0].tolist(),
            "kept": self.kept.tolist(),
            "key_entries": self.entries[:, 0].tolist(),
            "value_entries": self.entries[:, 1].tolist(),
        }


def find_redundancy(run: FullRun) -> Redundancy:
    """What is alike in the cache of the first row's prompt.

    Args:
      run: of a model that was given the methods of `OBSERVED`, among others.
    """
    keys: Any = run.context(_KEYS).caches
    tokens, layer = int(keys[0].kv.used[0, 0]), len(keys) // 2
    distances = tuple(distance for distance in DISTANCES if distance < tokens)
    of_distances = jnp.array(distances, jnp.int32)
    similarity = [_similarity(cache.kv.k.read()[:1], tokens, of_distances) for cache in keys]
    del keys
    clustered = run.context(_CLUSTERS).caches[layer]
    cluster = cluster_labels(clustered)
    attention = np.asarray(run.truth[layer].attention, np.float64)[:, 0, :, :tokens]
    by_head = attention.reshape(len(attention), len(cluster), -1, tokens).mean((0, 2))
    merged = run.context(_MERGED).caches
    retained = [_retained(cache, tokens) for cache in run.context(_ATTENTION).caches]
    spindle = [_books(cache, tokens) for cache in run.context(_CODEBOOK).caches]
    kept, entries = zip(*spindle, strict=True)
    return Redundancy(
        layer=layer,
        distances=distances,
        similarity=np.stack(similarity),
        cluster=cluster,
        cluster_attention=_summed(by_head, cluster),
        run=np.stack([_runs(cache) for cache in merged]),
        bits=retained[layer],
        agreement=np.stack([_agreement(bits) for bits in retained]),
        kept=np.array(kept),
        entries=np.array(entries),
    )


@compiled()
def _similarity(
    keys: Float[Array, "1 H S D"], tokens: int, distances: Int[Array, " N"]
) -> Float[Array, "H N"]:
    """Mean cosine of the keys of tokens that are so far apart, of the first `tokens` slots."""
    place = jnp.broadcast_to(jnp.arange(keys.shape[2], dtype=jnp.int32), keys.shape[:3])

    def mean(distance: Int[Array, ""]) -> Float[Array, " H"]:
        cosine = pair_cosine(keys, place, jnp.minimum(place + distance, keys.shape[2] - 1))
        pairs = place + distance < tokens
        return jnp.where(pairs, cosine, 0.0).sum((0, 2)) / pairs[0, 0].sum(dtype=jnp.float32)

    return jax.lax.map(mean, distances).T


def _summed(weight: Float[np.ndarray, "H T"], cluster: Int[np.ndarray, "H T"]) -> np.ndarray:
    """For each token, what the tokens of its cluster have together."""
    return np.stack(
        [
            np.bincount(label + 1, weights=own)[label + 1]
            for own, label in zip(weight, cluster, strict=True)
        ]
    )


def _runs(cache: LayerCache) -> Int[np.ndarray, "H T"]:
    """For each token, the length of its run: runs are neighbours, and their masses count them."""
    kv = cache.kv
    lengths = []
    for live, position, log_mass in zip(kv.live[0], kv.position[0], kv.log_mass[0], strict=True):
        order = np.argsort(np.asarray(position)[np.asarray(live)])
        mass = np.rint(np.exp(np.asarray(log_mass)[np.asarray(live)][order])).astype(int)
        lengths.append(np.repeat(mass, mass))
    return np.stack(lengths)


def _retained(cache: LayerCache, tokens: int) -> Bool[np.ndarray, "Q T"]:
    """Whether a token is among those with the most attention of a query head."""
    mass = cache.state.mass[:1, :, :tokens]
    place = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), mass.shape)
    count = jnp.array([max(int(SHARE * tokens), 1)], jnp.int32)
    return np.asarray(keep_best(mass, jnp.ones(mass.shape, bool), place, count)[0])


def _agreement(bits: Bool[np.ndarray, "Q T"]) -> Float[np.ndarray, " N"]:
    """Share of the tokens that 0, 1, ... query heads retain."""
    return np.bincount(bits.sum(0), minlength=len(bits) + 1) / bits.shape[1]


def _books(cache: LayerCache, tokens: int) -> tuple[float, tuple[float, float]]:
    """Vectors that are kept, and entries of the books of keys and values, as shares of all."""
    kv = cache.kv
    vectors = tokens * kv.shape[1]
    kept = float(kv.live[0].sum()) / vectors
    return kept, tuple(float(payload.count[0]) / vectors for payload in (kv.k, kv.v))  # pyright: ignore[reportAttributeAccessIssue]
