"""Bipartite soft matching in chunks: finds the most similar token of set B for each of set A."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.base.dispatch import choose_implementation
from pallas_kernels.base.rows import block_of
from pallas_kernels.base.tiles import tile_of
from pallas_kernels.base.varying import varying
from pallas_kernels.grouping.best_match import NO_NUMBER, ChunkRows, best_match
from pallas_kernels.grouping.cosine import inverse_length, round_cosine

# Rows of A that are compared with all of their chunk's B at once; bounds the memory of long chunks.
BLOCK = 512


def soft_matching(
    keys: Float[Array, "B H N D"],
    count: Int[Array, "B H"],
    *,
    chunk: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "B H N"], Int[Array, "B H N"]]:
    """Finds the edge of each token of set A: its most similar token of set B in the same chunk.

    Tokens 0 … count − 1 are cut into chunks of `chunk`. Even offsets of a chunk are set A and odd
    offsets set B. Similarity is the cosine `a·b / (|a| |b|)`, 0 for a zero key. Ties go to the
    lower token. Keys from `count` on are ignored.

    Cosines are rounded as those of `pair_cosine`: the similarity of keys that are equal, or
    positive multiples of each other, is exactly 1.

    Args:
      keys: keys in the order of their tokens. Their lengths do not matter.
      count: tokens per row and head.
      chunk: tokens per chunk, at least 2.
      implementation: `"pallas"` (the kernel), `"interpret"` (the kernel, interpreted on any
        device), `"xla"`, or None: the kernel on a GPU that can run it, XLA elsewhere.

    Returns:
      Float32 similarity of each token's edge, and the token that the edge leads to. A token without
      an edge (in set B, in A without any B, or not there) has `-inf` and leads to itself.

    Raises:
      ValueError: shapes that do not fit each other, a chunk of less than 2; an unknown
        implementation, or one that the GPU is too old for.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import soft_matching
      >>> keys = jnp.array([[[[1.0, 0.0], [0.0, 1.0], [0.0, 3.0], [2.0, 0.0]]]])
      >>> similarity, partner = soft_matching(keys, jnp.array([[4]]), chunk=4)
      >>> similarity.tolist(), partner.tolist()
      ([[[1.0, -inf, 1.0, -inf]]], [[[3, 1, 1, 3]]])
    """
    chosen = choose_implementation(implementation, keys)
    if chunk < 2:
        raise ValueError(f"chunk must be at least 2, got {chunk}")
    if keys.ndim != 4:
        raise ValueError(f"keys must be [B, H, N, D], got {keys.shape}")
    if count.shape != keys.shape[:2]:
        raise ValueError(f"count must have shape {keys.shape[:2]}, got {count.shape}")
    size = max(2, min(chunk, keys.shape[2]))
    if chosen == "xla":
        return _by_xla(keys, count, size)
    return _by_kernel(keys, count, size, chosen == "interpret")


def _by_kernel(
    keys: Float[Array, "B H N D"], count: Int[Array, "B H"], size: int, interpret: bool
) -> tuple[Float[Array, "B H N"], Int[Array, "B H N"]]:
    """Runs `soft_matching` in chunks of `size` by a kernel that reads the keys in place."""
    token = jnp.arange(keys.shape[2], dtype=jnp.int32)[None, None]
    there = token < count[..., None]
    similarity, partner = best_match(
        keys, keys, there, ChunkRows(size, 0, 2), ChunkRows(size, 1, 2), "rounded_cosine",
        tile=tile_of("best_match"), interpret=interpret,
    )  # fmt: skip
    similarity = jnp.where(there, similarity, -jnp.inf)
    return similarity, jnp.where(similarity > -jnp.inf, partner, token)


def _by_xla(
    keys: Float[Array, "B H N D"], count: Int[Array, "B H"], size: int
) -> tuple[Float[Array, "B H N"], Int[Array, "B H N"]]:
    """Runs the XLA reference chunk by chunk: on CPU a chunk's cosines stay in caches."""
    tokens, channels = keys.shape[2:]
    keys = _whole_chunks(keys, size)
    chunks = keys.shape[2] // size

    def match(i: Array, edges: tuple[Array, Array]) -> tuple[Array, Array]:
        """Adds the edges of chunk i."""
        chunk = block_of(keys, i * size, size, 2).astype(jnp.float32)
        token = i * size + jnp.arange(size, dtype=jnp.int32)[None, None]
        there = token < count[..., None]
        b, b_token, has_b = chunk[:, :, 1::2], token[:, :, None, 1::2], there[:, :, None, 1::2]
        b_scale = inverse_length(b)[:, :, None]

        def best_of(a: Float[Array, "B H A D"]) -> tuple[Array, Array]:
            dots = jnp.einsum(
                "bhad,bhed->bhae", a, b,
                precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
            )  # fmt: skip
            cosine = round_cosine(dots * inverse_length(a)[..., None] * b_scale, channels)
            cosine = jnp.where(jnp.isnan(cosine), NO_NUMBER, cosine)
            cosine = jnp.where(has_b, cosine, -jnp.inf)
            best = cosine.max(-1)
            # Two plain reductions find the first maximum several times faster on CPU than argmax.
            last = jnp.iinfo(jnp.int32).max
            return best, jnp.where(cosine == best[..., None], b_token, last).min(-1)

        similarity, partner = _in_blocks(best_of, chunk[:, :, 0::2])
        similarity = jnp.where(there, _spread(similarity, size, -jnp.inf), -jnp.inf)
        partner = jnp.where(similarity > -jnp.inf, _spread(partner, size, 0), token)
        similarity, partner = (
            jax.lax.dynamic_update_slice_in_dim(x, part, i * size, 2)
            for x, part in zip(edges, (similarity, partner), strict=True)
        )
        return similarity, partner

    token = jax.lax.broadcasted_iota(jnp.int32, keys.shape[:3], 2)
    none = varying((jnp.full(token.shape, -jnp.inf, jnp.float32), token), keys, count)
    # Chunks in which no head has a token are skipped.
    last = jnp.minimum(-(-count.max(initial=0) // size), chunks)
    edges = jax.lax.fori_loop(0, last, match, none)
    return tuple(x[..., :tokens] for x in edges)


def _in_blocks(best_of, a: Float[Array, "B H A D"]) -> tuple[Array, Array]:
    """Returns `best_of(a)`, with at most `BLOCK` tokens of a chunk's A at a time."""
    rows = a.shape[2]
    if rows <= BLOCK:
        return best_of(a)
    blocks = -(-rows // BLOCK)
    a = jnp.pad(a, ((0, 0),) * 2 + ((0, blocks * BLOCK - rows), (0, 0)))
    a = jnp.moveaxis(a.reshape(*a.shape[:2], blocks, BLOCK, a.shape[-1]), 2, 0)
    matches = jax.lax.map(best_of, a)  # [blocks, B, H, BLOCK]
    best, token = (jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1)[..., :rows] for x in matches)
    return best, token


def _spread(x: Array, size: int, fill: float) -> Array:
    """Spreads numbers of the even offsets of each chunk, `[..., A]`, to places among all."""
    low, high = 0, size - (2 * x.shape[-1] - 1)
    config = [(0, 0, 0)] * (x.ndim - 1) + [(low, high, 1)]
    return jax.lax.pad(x, jnp.asarray(fill, x.dtype), config)


def _whole_chunks(keys: Float[Array, "B H N D"], size: int) -> Array:
    missing = -keys.shape[2] % size
    return jnp.pad(keys, ((0, 0), (0, 0), (0, missing), (0, 0))) if missing else keys
