"""The shapes of `kernels.py`, the bytes that a call must move there, and random arguments."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

import kvjax
from pallas_kernels import Encoded, References

# Tokens and rows: as many shapes as ten minutes suffice for.
SIZES = (
    (8_192, 1), (8_192, 32), (32_768, 8), (32_768, 32), (131_072, 1), (131_072, 8), (131_072, 32),
)  # fmt: skip
LARGE = 128e6  # bytes of a call, from which on what it reads comes from memory and not from L2
GROUP = 32  # numbers of 4 bits that share a scale
PAGE = 16
MAX_NEW = 512  # tokens that a cache has room for beside its prompt
PER_CLUSTER, SINKS, BUDGET = 80, 16, 1024  # ClusterKV's
# SpindleKV at 40 % of the full cache's bytes: tokens that are kept, entries per kept vector.
RESERVES = ((0.5, 0.8), (0.8, 0.5))

FORMULAS = {
    "decode_attention": "B·H·S·(2·D·i + 8) + B·Q·2·D·i",
    "gather_attention": "B·H·N·(2·D·i + 12) + B·Q·2·D·i",
    "quantized_attention 8 bits": "B·H·S·(2·(D + 4) + 8) + B·Q·2·D·i",
    "quantized_attention 4 bits": "B·H·S·(D + 4·D·i / 32 + 8) + B·Q·2·D·i",
    "codebook_attention": "B·(2·E·D·i + H·S·(2·(r + i) + 8)) + B·Q·2·D·i",
    "rank_clusters": "B·H·C·(4·D + 4 + 4) + B·Q·D·i",
    "build_indices": "B·H·(12·C + 4·N)",
    "choosing": "that of rank_clusters and build_indices",
    "page_scores": "B·H·P·2·D·i + B·Q·(D·i + 4·P)",
    "clusterkv step": "that of choosing, and of gather_attention of N and 320 new slots",
    "host_rows": "B·H·N·2·D·i, over the link to host memory",
    "where": "B rows, Q query heads, H KV heads, S slots that are there, D channels, i bytes of a "
    "number, N slots of a list, C clusters, P pages, E entries, r bytes of a reference; bias and "
    "position of a slot take 8 bytes, an entry of a list or a scale of 8 bits 4",
}


class Model(NamedTuple):
    """Heads and channels of a model's attention."""

    name: str
    query_heads: int
    kv_heads: int
    channels: int


MODELS = (Model("Llama-3.1-8B", 32, 8, 128), Model("GLM-4-9B", 32, 2, 128))
SMALL = (Model("small", 4, 2, 16),)


class Shape(NamedTuple):
    """One line of the table: a model's layer, its tokens and rows."""

    model: Model
    tokens: int
    batch: int
    dtype: str = "bfloat16"

    def __str__(self):
        return f"{self.model.name}, {self.tokens} tokens x {self.batch}"

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def heads(self) -> int:
        """KV heads of all rows."""
        return self.batch * self.model.kv_heads

    @property
    def row(self) -> int:
        """Bytes of a key and a value."""
        return 2 * self.model.channels * self.itemsize

    @property
    def dense(self) -> int:
        """Bytes of all keys and values."""
        return self.heads * self.tokens * self.row

    @property
    def query(self) -> int:
        """Bytes of queries and outputs."""
        return self.batch * self.model.query_heads * self.row

    @property
    def store(self) -> tuple[int, int, int]:
        """Rows, KV heads, slots."""
        return self.batch, self.model.kv_heads, self.tokens

    @property
    def clusters(self) -> int:
        """Of a head."""
        return max(self.tokens // PER_CLUSTER, 1)

    @property
    def budget(self) -> int:
        """Slots that ClusterKV selects."""
        return min(BUDGET, self.tokens // 2)

    @property
    def entries(self) -> dict[float, int]:
        """Entries of a row's book, by the share of tokens that it is for."""
        vectors = self.model.kv_heads * self.tokens
        return {kept: round(kept * each * vectors) for kept, each in RESERVES}

    def index_dtype(self, kept: float) -> str:
        """Of a reference, as a cache would have it."""
        return "uint16" if self.entries[kept] <= 2**16 else "uint32"

    # Bytes that must move: see FORMULAS.

    def decode_bytes(self) -> int:
        """Of attention to all slots."""
        return self.heads * self.tokens * (self.row + 8) + self.query

    def gather_bytes(self, rows: int) -> int:
        """Of attention to a list of slots."""
        return self.heads * rows * (self.row + 12) + self.query

    def quantized_bytes(self, bits: int) -> int:
        """Of attention to all slots in fewer bits."""
        channels = self.model.channels
        four = channels + 4 * channels * self.itemsize // min(GROUP, channels)
        per_slot = four if bits == 4 else 2 * (channels + 4)
        return self.heads * self.tokens * (per_slot + 8) + self.query

    def codebook_bytes(self, kept: float) -> int:
        """Of attention to the share of slots that is kept, by a book that is read once."""
        slots = self.heads * int(kept * self.tokens)
        book = self.batch * self.entries[kept] * self.row
        reference = jnp.dtype(self.index_dtype(kept)).itemsize + self.itemsize
        return book + slots * (2 * reference + 8) + self.query

    def rank_bytes(self) -> int:
        """Of ranking clusters."""
        return self.heads * self.clusters * (4 * self.model.channels + 8) + self.query // 2

    def build_bytes(self) -> int:
        """Of making the list."""
        return self.heads * 4 * (3 * self.clusters + self.budget)

    def page_bytes(self) -> int:
        """Of scoring pages."""
        pages = self.tokens // PAGE
        scores = self.batch * self.model.query_heads * pages * 4
        return self.heads * pages * self.row + self.query // 2 + scores


class Inputs(NamedTuple):
    """Arguments of dense attention at a shape."""

    q: jax.Array  # [B, H, G, 1, D]
    k: jax.Array
    v: jax.Array
    bias: jax.Array
    query: jax.Array
    position: jax.Array
    used: jax.Array


def _normal(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    # Threefry would take longer than all that is measured.
    return jax.random.normal(jax.random.key(seed, impl="unsafe_rbg"), shape, dtype)


@functools.partial(jax.jit, static_argnums=0)
def inputs(shape: Shape) -> Inputs:
    """Random keys and values in every slot; the query is the newest token's."""
    model, store = shape.model, shape.store
    group = model.query_heads // model.kv_heads
    q = _normal(0, (*store[:2], group, 1, model.channels), shape.dtype)
    k, v = (_normal(seed, (*store, model.channels), shape.dtype) for seed in (1, 2))
    place = jnp.broadcast_to(jnp.arange(shape.tokens, dtype=jnp.int32)[None, None], store)
    return Inputs(
        q, k, v, jnp.zeros(store), jnp.full((shape.batch, 1), shape.tokens - 1, jnp.int32), place,
        jnp.full(store[:2], shape.tokens, jnp.int32),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def lists(shape: Shape, rows: int, run: int = 1) -> jax.Array:
    """Slots `[B, H, N]`, each once, in runs that follow each other."""
    runs = shape.tokens // run
    count = -(-rows // run)
    # One random slot of each equal part: distinct, and no permutation of all slots is needed.
    part = runs // count
    key = jax.random.key(3, impl="unsafe_rbg")
    at = jax.random.randint(key, (*shape.store[:2], count), 0, part, jnp.int32)
    start = (at + part * jnp.arange(count, dtype=jnp.int32)[None, None]) * run
    slots = start[..., None] + jnp.arange(run, dtype=jnp.int32)[None, None, None]
    return slots.reshape(*shape.store[:2], -1)[..., :rows]


@functools.partial(jax.jit, static_argnums=1)
def encoded(x: jax.Array, encode: Callable) -> Encoded:
    """Rows in fewer bits, encoded row by row, so that no wide copy of all of them is made."""
    return Encoded(*jax.lax.map(encode, x))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def references(shape: Shape, kept: float, seed: int) -> References:
    """Each slot a reference to any of the entries, each entry named at least once."""
    slots, entries = int(kept * shape.tokens), shape.entries[kept]
    own = (shape.batch, shape.model.kv_heads, slots)
    book = _normal(seed, (shape.batch, 1, entries, shape.model.channels), shape.dtype)
    number = jax.random.permutation(jax.random.key(seed), own[1] * slots) % entries
    index = jnp.broadcast_to(number.reshape(1, *own[1:]), own).astype(shape.index_dtype(kept))
    return References(book, index, jnp.abs(_normal(seed + 1, own, shape.dtype)) + 1)


@functools.partial(jax.jit, static_argnums=0)
def page_bounds(shape: Shape) -> tuple[jax.Array, jax.Array]:
    """Least and greatest keys of pages."""
    size = (*shape.store[:2], shape.tokens // PAGE, shape.model.channels)
    one, other = _normal(4, size, shape.dtype), _normal(5, size, shape.dtype)
    return jnp.minimum(one, other), jnp.maximum(one, other)


def cluster_ranges(shape: Shape) -> tuple[jax.Array, jax.Array]:
    """Sizes and starts of clusters behind the sinks: all alike, the last one with the rest."""
    clustered = shape.tokens - SINKS
    size = clustered // shape.clusters
    sizes = jnp.full((shape.clusters,), size, jnp.int32)
    sizes = sizes.at[-1].add(clustered - size * shape.clusters)
    starts = SINKS + jnp.cumsum(sizes) - sizes
    own = (*shape.store[:2], shape.clusters)
    return tuple(jnp.broadcast_to(x[None, None].astype(jnp.int32), own) for x in (sizes, starts))


def centroids(shape: Shape) -> jax.Array:
    """As long as means of so many random keys are."""
    size = (*shape.store[:2], shape.clusters, shape.model.channels)
    return _normal(6, size, "float32") * PER_CLUSTER**-0.5


@functools.partial(jax.jit, static_argnums=(0, 1))
def clustered_cache(
    transform: kvjax.ClusterKV, shape: Shape, k: jax.Array, v: jax.Array
) -> kvjax.LayerCache:
    """A cache as ClusterKV leaves it after a prompt, without the prompt."""
    cache = init(transform, shape)
    kv, (clusters, key) = cache.kv, cache.state
    room = kv.slots - shape.tokens
    there = jnp.broadcast_to(jnp.arange(kv.slots, dtype=jnp.int32)[None, None], kv.shape)
    live = there < shape.tokens
    pad = ((0, 0), (0, 0), (0, room), (0, 0))
    kv = kv.replace(
        k=kv.k.write(None, jnp.pad(k, pad)),
        v=kv.v.write(None, jnp.pad(v, pad)),
        position=jnp.where(live, there, -1),
        log_mass=jnp.where(live, 0.0, -jnp.inf),
        used=jnp.full_like(kv.used, shape.tokens),
        length=jnp.full_like(kv.length, shape.tokens),
    )

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[:, :, : shape.clusters].set(new.astype(old.dtype))

    sizes, starts = cluster_ranges(shape)
    clusters = dataclasses.replace(
        clusters,
        centroids=put(clusters.centroids, centroids(shape)),
        sizes=put(clusters.sizes, sizes),
        starts=put(clusters.starts, starts),
        number=jnp.full_like(clusters.number, shape.clusters),
        sinks=jnp.full_like(clusters.sinks, SINKS),
        budget=jnp.full_like(clusters.budget, transform.budget),
    )
    return dataclasses.replace(cache, kv=kv, state=(clusters, key))


def init(transform: kvjax.KVTransform, shape: Shape) -> kvjax.LayerCache:
    """An empty cache for a shape."""
    return kvjax.init_cache(
        transform, batch=shape.batch, kv_heads=shape.model.kv_heads,
        query_heads=shape.model.query_heads, head_dim=shape.model.channels,
        max_prompt=shape.tokens, max_new=MAX_NEW, dtype=shape.dtype,
    )  # fmt: skip
