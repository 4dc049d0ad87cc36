"""The shapes of `kernels.py`, and random operands for each."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import References


class Shape(NamedTuple):
    """One line of the table: a layer's heads and channels, its tokens and rows."""

    model: str
    query_heads: int
    kv_heads: int
    channels: int
    tokens: int
    batch: int
    dtype: str = "bfloat16"

    @property
    def store(self) -> tuple[int, int, int]:
        """Rows, KV heads, slots."""
        return self.batch, self.kv_heads, self.tokens

    @property
    def row(self) -> int:
        """Bytes of a key and a value."""
        return 2 * self.channels * jnp.dtype(self.dtype).itemsize


LLAMA, GLM = ("Llama-3.1-8B", 32, 8, 128), ("GLM-4-9B", 32, 2, 128)
# What is wanted most comes first: not all of them fit into ten minutes.
SHAPES = tuple(
    Shape(*model, tokens, batch)
    for tokens, batch in ((131_072, 8), (8_192, 1), (32_768, 8), (32_768, 32))
    for model in (LLAMA, GLM)
)
SMALL = Shape("small", 4, 2, 16, 256, 2, "float32")


class Inputs(NamedTuple):
    """Arguments of attention to all slots at a shape."""

    q: jax.Array  # [B, H, G, 1, D]
    k: jax.Array
    v: jax.Array
    bias: jax.Array
    query: jax.Array
    position: jax.Array
    used: jax.Array


def normal(seed: jax.Array | int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Normal numbers; Threefry would take longer than all that is measured."""
    return jax.random.normal(jax.random.key(seed, impl="unsafe_rbg"), shape, dtype)


@functools.partial(jax.jit, static_argnums=0)
def inputs(shape: Shape) -> Inputs:
    """Random keys and values in every slot; the query is the newest token's."""
    store = shape.store
    q = (*store[:2], shape.query_heads // shape.kv_heads, 1, shape.channels)
    k, v = (normal(seed, (*store, shape.channels), shape.dtype) for seed in (1, 2))
    place = jnp.broadcast_to(jnp.arange(shape.tokens, dtype=jnp.int32)[None, None], store)
    query = jnp.full((shape.batch, 1), shape.tokens - 1, jnp.int32)
    used = jnp.full(store[:2], shape.tokens, jnp.int32)
    return Inputs(normal(0, q, shape.dtype), k, v, jnp.zeros(store), query, place, used)


@functools.partial(jax.jit, static_argnums=0)
def queries(shape: Shape) -> tuple[jax.Array, jax.Array]:
    """Queries `[B, H, G, T, D]` of a prompt's newest tokens, 8,192 at most; their positions."""
    tokens = min(8192, shape.tokens)
    size = (*shape.store[:2], shape.query_heads // shape.kv_heads, tokens, shape.channels)
    position = jnp.arange(shape.tokens - tokens, shape.tokens, dtype=jnp.int32)[None]
    return normal(7, size, shape.dtype), jnp.broadcast_to(position, (shape.batch, tokens))


@functools.partial(jax.jit, static_argnums=(0, 1))
def lists(shape: Shape, rows: int) -> jax.Array:
    """Slots `[B, H, N]`, each once: a random one of each equal part."""
    part, size = shape.tokens // rows, (*shape.store[:2], rows)
    at = jax.random.randint(jax.random.key(3, impl="unsafe_rbg"), size, 0, part, jnp.int32)
    return at + part * jnp.arange(rows, dtype=jnp.int32)[None, None]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def references(shape: Shape, kept: float, each: float, seed: int) -> References:
    """Each slot a reference to any of the entries, each entry named at least once."""
    batch, heads, _ = shape.store
    slots, entries = int(kept * shape.tokens), round(kept * each * heads * shape.tokens)
    book = normal(seed, (batch, 1, entries, shape.channels), shape.dtype)
    number = jax.random.permutation(jax.random.key(seed), heads * slots) % entries
    index = jnp.broadcast_to(number.reshape(1, heads, slots), (batch, heads, slots))
    index = index.astype("uint16" if entries <= 2**16 else "uint32")
    return References(book, index, jnp.abs(normal(seed + 1, index.shape, shape.dtype)) + 1)


def clusters(shape: Shape, each: int = 80) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Centroids, sizes and starts of clusters of so many tokens."""
    own = (*shape.store[:2], shape.tokens // each)
    starts = each * jnp.arange(own[2], dtype=jnp.int32)[None, None]
    sizes = jnp.full(own, each, jnp.int32)
    return normal(6, (*own, shape.channels), "float32"), sizes, jnp.broadcast_to(starts, own)
