"""Bytes of caches with codebooks, the ratio of SpindleKV's paper, and what finds no room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Array, Int

from kvjax.attention.layer import Cache, LayerCache, layer_caches
from kvjax.cache.nbytes import nbytes
from kvjax.cache.slots import KVCache
from kvjax.storage.codebook.payload import CodebookPayload


@dataclass(frozen=True)
class Reserve:
    """Sizes of caches with codebooks, relative to full caches' keys and values.

    Args:
      stored: bytes of books (at their capacity), indices and magnitudes. Like `used` and `beside`,
        they are divided by the bytes of a full cache's keys and values, `2 · L · H · D` numbers
        per row.
      used: bytes of the entries in use, and of live slots' indices and magnitudes.
      equation_15: the paper's `r1 · r2 · r3`, from the entries in use and the kept vectors. It is
        the mean over rows and layers.
      beside: bytes of everything else that the caches hold (positions, masses, counters).
      overflow: as `overflow_share`.
    """

    stored: float
    used: float
    equation_15: float
    beside: float
    overflow: float


def reserve_ratio(layers: Sequence[LayerCache], tokens: Int[Array, " B"]) -> Reserve:
    """Returns the sizes of SpindleKV's caches relative to full caches.

    Equation 15 multiplies `r1 = kept / (L · h)`, `r2 = entries / (2 · kept)` and
    `r3 = (D + 2) / D`, since index and magnitude each have the size of a number. h is the number of
    lists of slots: where heads are unfolded, the full cache of equation 15 is repeated too.

    Args:
      layers: caches of layers, each with a codebook, after a prompt.
      tokens: L, the number of tokens of each row.

    Raises:
      TypeError: a cache has no codebook.

    Example:
      >>> import jax.numpy as jnp, kvjax, kvjax.evaluation
      >>> rope = kvjax.Rope(jnp.ones(4))
      >>> tx = kvjax.Codebook(capacity=4)
      >>> cache = kvjax.init_cache(tx, batch=1, kv_heads=2, head_dim=8, max_prompt=16, max_new=0,
      ...                          dtype="float32")
      >>> rows = jnp.ones((1, 2, 16, 8))
      >>> _, cache = kvjax.attend(cache, rows, rows, rows, jnp.arange(16)[None],
      ...                         phase="prompt", rope=rope)
      >>> reserve = kvjax.evaluation.reserve_ratio([cache], jnp.array([16]))
      >>> round(reserve.stored, 4), round(reserve.used, 4), round(reserve.equation_15, 4)
      (0.3125, 0.2188, 0.0391)
    """
    lengths = np.asarray(tokens)
    stored = used = full = beside = 0.0
    products = []
    for cache in layers:
        kv = cache.kv
        if not isinstance(kv.k, CodebookPayload) or not isinstance(kv.v, CodebookPayload):
            raise TypeError(f"reserve_ratio takes caches with codebooks, got {cache.transform!r}")
        head_dim, size, lists = kv.k.shape[3], kv.k.dtype.itemsize, kv.shape[1]
        kept = np.asarray(kv.live).sum((1, 2))
        full += float(2 * lengths.sum() * (lists // kv.unfolded) * head_dim * size)
        beside += nbytes(cache)
        for payload in (kv.k, kv.v):
            book = payload.entries[:, :, : payload.book.entries]
            arrays = book, payload.index, payload.magnitude
            stored += nbytes(arrays)
            beside -= nbytes(arrays)
            per_slot = nbytes(arrays[1:]) / payload.index.size
            used += float(np.asarray(payload.count).sum() * head_dim * size + kept.sum() * per_slot)
        entries = np.asarray(kv.k.count) + np.asarray(kv.v.count)
        products.append(entries / (2 * lengths * lists) * (head_dim + 2) / head_dim)
    return Reserve(
        stored / full, used / full, float(np.mean(products)), beside / full, overflow_share(layers)
    )


def overflow_share(layers: Sequence[Cache]) -> float:
    """Returns the share of kept vectors for which a codebook had neither an entry nor room.

    Such a vector is read in the direction of the nearest entry, however far away it is. A token
    that several query heads keep (`unfold=True`) counts as one vector. After further turns or
    pieces of a prompt, or where decode steps evict, the share is an upper bound: vectors that are
    gone by then are among those counted, up to all that a row keeps.

    Args:
      layers: caches of layers. Those without a codebook have no part in it; if none has one, the
        share is 0.

    Example:
      >>> import jax, jax.numpy as jnp, kvjax, kvjax.evaluation
      >>> tx = kvjax.Codebook(capacity=4)
      >>> cache = kvjax.init_cache(tx, batch=1, kv_heads=1, head_dim=8, max_prompt=8, max_new=0,
      ...                          dtype="float32")
      >>> rows = jnp.eye(8)[None, None]  # no two alike: four of eight find no room
      >>> _, cache = kvjax.attend(cache, rows, rows, rows, jnp.arange(8)[None],
      ...                         phase="prompt", rope=kvjax.Rope(jnp.zeros(4)))
      >>> kvjax.evaluation.overflow_share([cache])
      0.5
    """
    over = vectors = 0
    for kv in (part.kv for cache in layers for part in layer_caches(cache)):
        books = [payload for payload in (kv.k, kv.v) if isinstance(payload, CodebookPayload)]
        kept = _vectors(kv) if books else 0
        for payload in books:
            vectors += int(np.sum(kept))
            # Vectors that are gone still count, and may be more than those that are kept.
            over += int(np.minimum(np.asarray(payload.overflow), kept).sum())
    return over / vectors if vectors else 0.0


def _vectors(kv: KVCache) -> Int[np.ndarray, " B"]:
    """Counts the kept keys of each row; a key that several lists of a KV head keep counts once."""
    position = np.where(kv.live, kv.position, -1)
    position = np.sort(position.reshape(len(position), kv.shape[1] // kv.unfolded, -1))
    return (np.diff(position, prepend=-1) > 0).sum((1, 2))
